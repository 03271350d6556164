"""A model that is a function of its tokens, and what it answers when nothing else runs."""

import math
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.draft_model import DraftModel
from headrace.engine.kv_cache.state_pool import NULL_STATE
from headrace.engine.kv_cache.swap import PreemptionCosts
from headrace.engine.lora.adapters import LoraAdapters
from headrace.engine.request import Request
from headrace.engine.sampling.adjustment import Adjustment
from headrace.engine.sampling.sampler import SampleRow, sample

VOCAB_SIZE = 11
END_TOKEN_ID = 0
CONTEXT = 64


def fake_logits(tokens: Sequence[int]) -> Tensor:
    """What the fake model says after these tokens: [VOCAB_SIZE] float32."""
    angle = zlib.crc32(array("i", tokens).tobytes()) / 2**32 * 2 * math.pi
    return 4 * torch.sin(angle * torch.arange(1, VOCAB_SIZE + 1))


class FakeMemory:
    """Blocks that remember, for each slot, the token and the position last written to it."""

    block_bytes = 1

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.slots: dict[int, tuple[int, int]] = {}

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, destinations = zip(*pairs, strict=True)
        assert len({*sources, *destinations}) == len(set(sources)) + len(destinations)
        for source, destination in pairs:
            self._write(destination, self._read(source))

    def zero(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._write(block, [None] * self.block_size)

    def swap_out(self, blocks: Sequence[int]) -> list[list[tuple[int, int] | None]]:
        return [self._read(block) for block in blocks]

    def swap_in(self, content: list[list[tuple[int, int] | None]], first: int, blocks: Sequence[int]) -> None:
        for block, slots in zip(blocks, content[first:], strict=True):
            self._write(block, slots)

    def _read(self, block: int) -> list[tuple[int, int] | None]:
        assert 1 <= block <= self.num_blocks
        return [self.slots.get(block * self.block_size + offset) for offset in range(self.block_size)]

    def _write(self, block: int, slots: Sequence[tuple[int, int] | None]) -> None:
        assert 1 <= block <= self.num_blocks
        for offset, slot in enumerate(slots):
            if slot is None:
                self.slots.pop(block * self.block_size + offset, None)
            else:
                self.slots[block * self.block_size + offset] = slot


class FakeRunner:
    """A model without weights: its logits are a function of the tokens it finds in its paged memory.

    Like a real one it writes a step's tokens to their slots and then reads each sequence's whole context back
    through its block table, so a block that is lost, mixed up or read before it was written shows.
    With a `sliding_window` it reads, and answers by, that many last tokens. `fail_next`: the next step raises this
    before it writes. `poison`: a step with this token in it raises. `fits`: with more tokens a step runs out of memory.
    `breaks`: the logits after this token are NaN.
    With `num_states` it also has a state for each sequence, which is all of its tokens, and which a step that raises
    leaves in pieces.
    """

    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")
    # Moving is always the cheaper way.
    preemption_costs = PreemptionCosts(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_swap=0.0)
    loras: LoraAdapters | None = None
    processes = None

    def __init__(
        self, num_blocks: int, block_size: int, sliding_window: int | None = None, num_states: int = 0
    ) -> None:
        self.num_states = num_states
        self.states: dict[int, list[int] | None] = {NULL_STATE: []}
        self.memory = FakeMemory(num_blocks, block_size)
        self.sliding_window = sliding_window
        self.fail_next: type[BaseException] | None = None
        self.poison: int | None = None
        self.breaks: int | None = None
        self.fits: int | None = None

    def execute(self, batch: Batch) -> Tensor:
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error("asked for by the test")
        slots = batch.slots.tolist()
        if self.num_states:
            self._advance_states(batch)
        if self.poison in batch.token_ids.tolist():
            self._break_states(batch)
            raise RuntimeError("poisoned\nrow")
        if self.fits is not None and len(slots) > self.fits:
            self._break_states(batch)
            raise torch.OutOfMemoryError("asked for by the test")
        assert len(set(slots)) == len(slots), "two tokens are written to one slot"
        written = zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        self.memory.slots.update(zip(slots, written, strict=True))
        if batch.prompt_reader is not None:
            batch.prompt_reader.read(lambda index: self._prompt_logits(batch, index), self.vocab_size, self.device)
        rows = [self._logits(self._context(batch, token)) for token in batch.last_token_index.tolist()]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _advance_states(self, batch: Batch) -> None:
        assert batch.states is not None
        read, write = batch.states.read, batch.states.write
        assert NULL_STATE not in write
        assert len(set(write)) == len(write), "two sequences leave one state"
        for index, (one, other) in enumerate(zip(read, write, strict=True)):
            assert one == other or other not in read, "a state is overwritten that another one goes on from"
            assert 0 <= one <= self.num_states >= other > 0
            start = batch.attention.query_starts[index]
            tokens = batch.token_ids[start : start + batch.attention.query_lens[index]].tolist()
            before = self.states[one]
            assert before is not None, "a state is read that a failed step has left"
            assert len(before) == int(batch.positions[start]), "a state is of another length"
            self.states[other] = before + tokens

    def _break_states(self, batch: Batch) -> None:
        for state in batch.states.write if batch.states is not None else ():
            self.states[state] = None

    def _prompt_logits(self, batch: Batch, tokens: Tensor) -> Tensor:
        """What the model says after each of the batch's tokens that `tokens` names."""
        return torch.stack([fake_logits(self._context(batch, token)) for token in tokens.tolist()])

    def _logits(self, context: list[int]) -> Tensor:
        return fake_logits(context) if context[-1] != self.breaks else torch.full((VOCAB_SIZE,), torch.nan)

    def _context(self, batch: Batch, token: int) -> list[int]:
        """The tokens that one of the batch's tokens sees, itself included, as its sequence's blocks hold them."""
        index = bisect_right(batch.attention.query_starts, token) - 1
        block_table, block_size = batch.attention.block_tables[index], self.memory.block_size
        end = int(batch.positions[token]) + 1
        tokens = []
        for position in range(0 if self.sliding_window is None else max(0, end - self.sliding_window), end):
            block, offset = divmod(position, block_size)
            token, written_position = self.memory.slots[block_table[block] * block_size + offset]
            assert written_position == position, "a slot holds another position's token"
            tokens.append(token)
        if batch.states is not None:
            state = self.states[batch.states.write[index]]
            assert state is not None
            assert state[:end] == tokens, "a state is of other tokens"
        return tokens


def fake_engine(
    runner: FakeRunner, config: EngineConfig, context: int = CONTEXT, draft: DraftModel | None = None
) -> Engine:
    return Engine(runner, config, context, [END_TOKEN_ID], proposer=draft)


def make_engine(num_blocks: int = 32, sliding_window: int | None = None, **options: Any) -> tuple[Engine, FakeRunner]:
    config = EngineConfig(**{"block_size": 8, **options})
    runner = FakeRunner(num_blocks, config.block_size, sliding_window)
    return fake_engine(runner, config), runner


def fake_answer(request: Request, max_model_len: int, sliding_window: int | None = None) -> list[int]:
    """What the fake model generates for a request that has it for itself."""
    prompt, params = list(request.prompt_token_ids), request.params
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (END_TOKEN_ID,))}
    room = max_model_len - len(prompt)
    answer: list[int] = []
    while len(answer) < min(params.max_tokens or room, room) and not stops & set(answer):
        # A new one for each token: nothing is carried over from the last.
        adjustment = Adjustment.of(params, list(stops), len(prompt))
        adjustment = adjustment and adjustment.after(prompt + answer)
        row = SampleRow(params, params.seed or 0, len(answer), adjustment)
        tokens = prompt + answer
        seen = tokens if sliding_window is None else tokens[-sliding_window:]
        answer += sample(fake_logits(seen).unsqueeze(0), [row])
    return answer
