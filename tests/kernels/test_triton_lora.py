"""LoRA's products on the GPU against one token at a time."""

from collections.abc import Sequence

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")
from triton.runtime.interpreter import TensorHandle

from headrace.kernels.lora import AdapterMatrices, TokenTiles
from headrace.kernels.lora.token_tiles import pack_tiles, tile_rows
from headrace.kernels.lora.triton import add_low_rank_triton

from .tolerances import assert_close

# A part of more outputs than a program computes, a small one, and outputs between them that nothing is added to.
PARTS = ((0, 96), (120, 24))
NUM_OUTPUTS, MAX_RANK, NUM_SLOTS = 150, 24, 4
# Of three adapters: the first adds to both parts, the second to one, the third has the highest rank.
RANKS = ((3, 8), (0, 16), (24, 24))
MIXED = (-1, 2, 0, 0, -1, 1, 2, 0, -1)
CASES = {
    "mixed": MIXED,
    "nobody": (-1, -1, -1),
    "one": (1,),
    "more-than-a-tile": (0,) * 19 + (2,) * 33 + (-1,) * 3 + (0,) * 5,
    "many": (2,) * 150 + (-1,) * 20 + (0,) * 101,
}
# Many inputs of many tokens take the interpreter its time.
SIZES = [
    pytest.param(slots, num_inputs, id=f"{name}-{num_inputs}")
    for name, slots in CASES.items()
    for num_inputs in (40, 1200)
    if name != "many" or num_inputs == 40
]


def filled(num_inputs: int, dtype: torch.dtype, device: torch.device) -> AdapterMatrices:
    torch.manual_seed(1)
    matrices = AdapterMatrices.blank(NUM_SLOTS, MAX_RANK, num_inputs, NUM_OUTPUTS, PARTS, dtype, device)
    # What an adapter leaves that was there before is not to be seen.
    matrices.down.fill_(torch.nan)
    matrices.up.fill_(torch.nan)
    for slot, ranks in enumerate(RANKS):
        for part, (rank, (start, size)) in enumerate(zip(ranks, PARTS, strict=True)):
            if rank:
                down, up = torch.randn(rank, num_inputs) * num_inputs**-0.5, torch.randn(rank, size) / 3
                matrices.put(slot, part, start, down.to(dtype), up.to(dtype))
    return matrices


def expected(output: Tensor, x: Tensor, matrices: AdapterMatrices, slots: Sequence[int]) -> Tensor:
    rows = output.double().clone()
    for token, slot in enumerate(slots):
        for part, (start, size) in enumerate(PARTS if slot >= 0 else ()):
            rank = RANKS[slot][part]
            down, up = matrices.down[slot, part, :rank], matrices.up[slot, :rank, start : start + size]
            rows[token, start : start + size] += x[token].double() @ down.double().T @ up.double()
    return rows.to(output.dtype)


@pytest.mark.parametrize(("slots", "num_inputs"), SIZES)
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_each_token_gets_its_own_adapters(slots, num_inputs, triton_dtype, device):
    matrices = filled(num_inputs, triton_dtype, device)
    # Small enough that 1,200 products of them may be summed in any order, one after another too.
    x = (torch.randn(len(slots), num_inputs, device=device) / 4).to(triton_dtype)
    # As a part of something larger.
    before = torch.randn(len(slots), 2 * NUM_OUTPUTS, device=device).to(triton_dtype)[:, :NUM_OUTPUTS]
    output = before.clone() if len(slots) > 3 else before
    wanted = expected(before, x, matrices, slots)
    add_low_rank_triton(output, x, matrices, TokenTiles.of(numpy.array(slots), NUM_SLOTS, device))
    assert_close(output, wanted)


def test_nothing_that_is_not_finite_passes_to_others(device):
    matrices = filled(40, torch.float32, device)
    matrices.up[2] = torch.inf
    x = torch.ones(len(MIXED), 40, device=device)
    before = torch.randn(len(MIXED), NUM_OUTPUTS, device=device)
    output = before.clone()
    add_low_rank_triton(output, x, matrices, TokenTiles.of(numpy.array(MIXED), NUM_SLOTS, device))
    slots = torch.tensor(MIXED, device=device)
    assert not output[slots == 2].isfinite().all()
    assert output[slots != 2].isfinite().all()
    assert torch.equal(output[slots < 0], before[slots < 0])


def test_an_adapter_that_has_left(device):
    matrices = filled(40, torch.float32, device)
    matrices.clear(0)
    x, before = torch.randn(3, 40, device=device), torch.randn(3, NUM_OUTPUTS, device=device)
    output = before.clone()
    add_low_rank_triton(output, x, matrices, TokenTiles.of(numpy.array([0, 0, 0]), NUM_SLOTS, device))
    assert torch.equal(output, before)


def test_memory_that_stays_serves_steps_of_fewer_tokens(device):
    matrices, tiles = filled(40, torch.float32, device), TokenTiles.blank(20, NUM_SLOTS, device)
    x = torch.randn(20, 40, device=device)
    for slots in ((0,) * 20, (1, -1, 2), (-1,)):
        before = torch.randn(20, NUM_OUTPUTS, device=device)
        output = before.clone()
        tiles.load(numpy.array(slots))
        add_low_rank_triton(output, x, matrices, tiles)
        assert_close(output, expected(before, x, matrices, slots))


@pytest.mark.parametrize(
    ("parts", "are_aligned"), [(PARTS, True), (((0, 96), (100, 24)), False), (((0, 96), (120, 30)), False)]
)
def test_outputs_are_read_many_at_once_only_where_all_parts_let_them(parts, are_aligned, device, monkeypatch):
    matrices = AdapterMatrices.blank(1, 8, 16, NUM_OUTPUTS, parts, torch.float16, device)
    assert matrices.are_aligned is are_aligned
    if device.type == "cuda":
        return
    # What a compiler would be told, and the interpreter does nothing with.
    told: list[tuple[int, int]] = []

    def note(place: TensorHandle, name: str, multiples: list[int]) -> None:
        if name == "tt.divisibility":
            told.append((place.data.item(), *multiples))

    monkeypatch.setattr(TensorHandle, "set_attr", note)
    x, output = torch.zeros(1, 16, dtype=torch.float16), torch.zeros(1, NUM_OUTPUTS, dtype=torch.float16)
    add_low_rank_triton(output, x, matrices, TokenTiles.of(numpy.array([0]), 1, device))
    assert bool(told) is are_aligned
    assert not any(place % multiple for place, multiple in told)


@pytest.mark.parametrize("num_tokens", [1, 40, 300])
def test_every_token_is_in_one_tile(num_tokens):
    for seed in range(20):
        slots = numpy.random.default_rng(seed).integers(-1, NUM_SLOTS, num_tokens)
        tiles = TokenTiles.of(slots, NUM_SLOTS, torch.device("cpu"))
        seen = []
        for slot, first, count in tiles.tiles.view(-1, 3)[: int(tiles.num_tiles)].tolist():
            assert 0 < count <= tile_rows(num_tokens)
            tokens = tiles.tokens[first : first + count].tolist()
            assert (slots[tokens] == slot).all()
            seen += tokens
        assert sorted(seen) == numpy.flatnonzero(slots >= 0).tolist()
    assert len(pack_tiles(slots, num_tokens, NUM_SLOTS)) == len(tiles.memory)
