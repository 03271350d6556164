"""What a graph is to read of each step is what the step is, whoever joins, leaves, forks or is preempted meanwhile."""

import pytest
import torch
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.cuda_graphs import CudaGraphs, GraphLimits, Replay
from headrace.engine.request import Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams
from headrace.kernels.kv_cache import PADDING_SLOT
from headrace.kernels.paged_attention import AttentionMetadata, planning
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.followed_plan import FollowedPlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.recurrent_states import StateSlots

from ...kernels.decode_cases import held_plan
from ...kernels.test_attention_plan import check_parts, seen, wanted
from ..fakes import CONTEXT, FakeRunner, fake_answer, fake_engine
from ..running import token_ids

SHAPE = AttentionShape(4, 2, 64, torch.float32)
BLOCK_SIZE = 4
# Steps of more than eight tokens have prompts in them.
SIZES = (1, 4, 8, 14, 20)
# A layer that looks back at everything, and one that does not.
WINDOWS = (None, 9)


class Mismatch(BaseException):
    """The engine would try what raises an error once more, in halves."""


class GraphedRunner(FakeRunner):
    """Answers as the fake model does, after a look at what graphs would compute by."""

    def __init__(self, num_blocks: int, num_states: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, num_states=num_states)
        self.num_replays = 0
        self.num_captures = 0
        self._is_captured = False
        self._batch: Batch | None = None
        # One graph at a time: of a size that comes again it is made again, after steps were computed with it.
        limits = GraphLimits(SIZES, CONTEXT // BLOCK_SIZE, BLOCK_SIZE, max_num_seqs=8, max_graphs=1)
        self._graphs = CudaGraphs(self._forward, limits, self.device, self._capture, has_states=num_states > 0)

    def execute(self, batch: Batch) -> Tensor:
        self._batch = batch
        hidden = self._graphs.forward(batch)
        assert len(batch.wanted(hidden)) == len(batch.last_token_index)
        return super().execute(batch)

    def _capture(self, function: Replay) -> Replay:
        """As torch's, it computes all of it once before."""
        self.num_captures += 1
        self._is_captured = True
        function()
        self._is_captured = False
        return function

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        states: StateSlots | None,
    ) -> Tensor:
        if not attention.device_plans:
            for window in WINDOWS:
                plan = plan_attention(attention, SHAPE, window)
                attention.device_plans[SHAPE, window] = DevicePlan.holding(plan, 4, 64, self.device)
        elif self._is_captured:
            self._check_nobody_has_a_state(states)
        elif self._batch is not None:
            self.num_replays += 1
            try:
                self._check(self._batch, token_ids, positions, slots, attention)
                self._check_states(self._batch, len(token_ids), states)
            except AssertionError as error:
                raise Mismatch from error
        return torch.zeros(len(token_ids), 1)

    def _check(
        self, batch: Batch, token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata
    ) -> None:
        number = len(batch.token_ids)
        assert token_ids[:number].tolist() == batch.token_ids.tolist()
        assert slots.tolist() == [*batch.places[0], *[PADDING_SLOT] * (len(slots) - number)]
        assert positions.tolist() == [*batch.places[1], *[0] * (len(slots) - number)]
        for (_, window), held in attention.device_plans.items():
            plan = held_plan(held)
            assert seen(plan, BLOCK_SIZE, window) == wanted(batch.attention, window)
            check_parts(plan)

    def _check_nobody_has_a_state(self, states: StateSlots | None) -> None:
        """It would be changed by what is computed for the capture's sake."""
        assert states is None or {length for _, length, _, _ in states.table.sequences.tolist()} == {0}

    def _check_states(self, batch: Batch, size: int, states: StateSlots | None) -> None:
        """Of decodes each token has its sequence's; padding has none."""
        assert (states is None) == (batch.states is None) == (not self.num_states)
        if states is not None and batch.states is not None:
            number = len(batch.states.query_lens)
            own = [[row, 1, *both] for row, both in enumerate(zip(batch.states.read, batch.states.write, strict=True))]
            assert states.table.sequences.tolist()[:number] == own
            assert [length for _, length, _, _ in states.table.sequences.tolist()[number:]] == [0] * (size - number)


@pytest.fixture(autouse=True)
def _short_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MIN_SHARED_TOKENS", ((2, 1),))


@pytest.fixture
def advanced(monkeypatch: pytest.MonkeyPatch) -> list[FollowedPlan]:
    """The plans that went on, as often as they did."""
    found: list[FollowedPlan] = []
    advance = FollowedPlan.advance

    def noted(self: FollowedPlan, *arguments: object) -> None:
        found.append(self)
        advance(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FollowedPlan, "advance", noted)
    return found


def requests() -> list[Request]:
    """Some share a prefix, some a whole prompt, and they end at different times."""
    shared = [1, 2, 3, 4] * 3
    plain = [
        Request(f"r{index}", [*shared[: 4 * (index % 4)], 5 + index % 3, index], sampled(index)) for index in range(9)
    ]
    forks = [
        Request(f"f{index}", [*shared, 7, 8], sampled(20 + index), fork_of="f0" if index else None)
        for index in range(3)
    ]
    return plain + forks


def sampled(index: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=23 + 3 * index % 17, seed=index, ignore_eos=True)


@pytest.mark.parametrize("is_async", [False, True], ids=["one step at a time", "one step ahead"])
@pytest.mark.parametrize("num_blocks", [30, 200], ids=["preempted", "with room"])
@pytest.mark.parametrize("num_states", [0, 12], ids=["no states", "states"])
def test_graphs_are_given_what_each_step_is(num_blocks, num_states, is_async, advanced):
    runner = GraphedRunner(num_blocks, num_states)
    config = EngineConfig(block_size=BLOCK_SIZE, max_num_seqs=8, max_num_batched_tokens=20, async_scheduling=is_async)
    engine = fake_engine(runner, config)
    wanted_requests = requests()
    events: dict[str, list[RequestEvent]] = {request.request_id: [] for request in wanted_requests}
    for request in wanted_requests[:6]:
        engine.add(request)
    later = wanted_requests[6:]
    number = 0
    while engine.has_work or later:
        number += 1
        # The forks with whom they follow.
        if number == 12:
            for request in later:
                engine.add(request)
            later = []
        for event in engine.step():
            events[event.request_id].append(event)
        engine.check()
    for request in wanted_requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)
    assert bool(engine.stats.num_preemptions) == (num_blocks == 30)
    assert runner.num_replays > 20
    assert num_blocks > 30 or runner.num_captures > len(SIZES)
    # Two kinds of layers; and plans go on in more than one series of steps.
    assert len(advanced) > 20
    assert len({id(each) for each in advanced}) > 2
