"""The slots that adapters have on a GPU; their memory may as well be the host's."""

from typing import Any

import pytest
import torch

from headrace.engine.lora.adapter import Adapter, LowRank
from headrace.engine.lora.slots import AdapterSlots
from headrace.engine.models.blocks import LinearPart
from headrace.kernels.linear import Linear
from headrace.kernels.lora import AdapterMatrices


def adapter(number: int, *names: str) -> Adapter:
    return Adapter(number, str(number), 1, {name: LowRank(torch.ones(1, 4), torch.ones(1, 2)) for name in names})


def test_what_found_no_memory_half_way_leaves_nothing_to_the_next_in_its_slot(monkeypatch):
    linear = Linear(torch.zeros(4, 4))
    parts = {"q": LinearPart(linear, 0, 2), "v": LinearPart(linear, 2, 2)}
    slots = AdapterSlots(parts, 1, 8, torch.float32, torch.device("cpu"))
    put = AdapterMatrices.put

    def put_the_first(matrices: AdapterMatrices, slot: int, part: int, *rest: Any) -> None:
        if part > 0:
            raise torch.OutOfMemoryError
        put(matrices, slot, part, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(AdapterMatrices, "put", put_the_first)
        with pytest.raises(torch.OutOfMemoryError):
            slots.install([adapter(1, "q", "v")])
    slots.install([adapter(2, "v")])
    assert slots._matrices[linear].ranks.tolist() == [[0, 1]]
