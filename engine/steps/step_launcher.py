"""Steps on their way to the device: what was planned is handed to the model, and its logits to the sampler."""

from dataclasses import replace

import numpy

from ..execution.batch import Batch, DecodeBatches, SampledTokens
from ..execution.image_batch import with_image_offsets, with_image_positions
from ..execution.proposer import Proposer
from ..execution.runner import Runner
from ..scheduling.scheduler import Scheduler
from ..scheduling.step_plan import StepPlan
from ..serving.served_requests import ServedRequests
from .in_flight import StepInFlight
from .sampling_batch import SamplingBatch
from .step_result import LaunchedResult


class StepLauncher:
    """Begins to compute steps, and waits for none of them. What raises here has told the scheduler of nothing."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        requests: ServedRequests,
        block_size: int,
        proposer: Proposer | None = None,
    ) -> None:
        self._runner = runner
        self._proposer = proposer
        self._scheduler = scheduler
        self._requests = requests
        self._block_size = block_size
        self._decode_batches = DecodeBatches(runner.device)
        # What the last step sampled, while the sequences that decode stay the same.
        self._last_sampled: LaunchedResult | None = None

    def launch(self, plan: StepPlan, may_be_followed: bool, sampled: SampledTokens | None = None) -> StepInFlight:
        """Begin to compute a step; `sampled` is what the step before it samples, where that is not read yet.

        No step follows before it is read where what the next one guesses depends on that.
        """
        self._swap(plan)
        if not plan.scheduled:
            return StepInFlight(plan, None)
        result = self._computed(plan, sampled)
        has_guesses = plan.num_draft_tokens > 0 or self._scheduler.guesses_may_follow
        if has_guesses and self._proposer is not None:
            self._proposer.computed(result.batch.ended)
        step = StepInFlight.of(plan, result, may_be_followed and not has_guesses)
        self._scheduler.launched(plan, step.unread)
        self._last_sampled = result if result.batch.is_plain else None
        return step

    def forget_last(self) -> None:
        """Let the next step go by what is known on the host alone: the last one failed, or none of it is wanted."""
        self._last_sampled = None

    def _swap(self, plan: StepPlan) -> None:
        for sequence, blocks in plan.swapped_out:
            if sequence.swapped is not None:
                sequence.swapped.content = self._runner.memory.swap_out(blocks)
        for swap_in in plan.swapped_in:
            self._runner.memory.swap_in(swap_in.swapped.content, swap_in.first, swap_in.blocks)

    def _computed(self, plan: StepPlan, sampled: SampledTokens | None) -> LaunchedResult:
        # Until this one is launched there is no last one.
        last, self._last_sampled = self._last_sampled, None
        if self._proposer is not None:
            self._proposer.fill(plan)
        device = self._runner.device
        if plan.decodes is not None and last is not None and last.batch.ended is plan.decodes.sequences:
            batch = self._decode_batches.batch(plan.decodes, last.tokens)
            if self._requests.num_with_images:
                batch = with_image_offsets(batch, plan.decodes)
            logits = self._runner.execute(self._adapted(plan, batch))
            last.batch.advance()
            return LaunchedResult.of(logits, last.batch)
        self._scheduler.settle()
        batch = Batch.build(plan.scheduled, self._block_size, device, sampled)
        if self._requests.num_with_images:
            batch = with_image_positions(batch, plan.scheduled)
        logits = self._runner.execute(self._adapted(plan, batch))
        return LaunchedResult.of(logits, self._sampling_of(plan))

    def _adapted(self, plan: StepPlan, batch: Batch) -> Batch:
        """The batch with each token's LoRA adapter, where a request has one."""
        if not self._requests.num_adapted:
            return batch
        numbers = [item.sequence.adapter_number for item in plan.scheduled]
        if not any(numbers):
            return batch
        return replace(batch, adapters=numpy.repeat(numbers, batch.attention.query_lens))

    def _sampling_of(self, plan: StepPlan) -> SamplingBatch:
        if plan.decodes is not None:
            ended = plan.decodes.sequences
        else:
            ended = [item.sequence for item in plan.scheduled if item.reaches_end for _ in (None, *item.draft)]
        if self._requests.num_guided:
            # On a GPU, while it computes.
            self._requests.refresh_masks(ended)
        return SamplingBatch(ended, self._requests.by_id, self._runner.device)
