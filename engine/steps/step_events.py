"""What a step that was computed brings the requests: tokens, scores, their end."""

import logging

from ..errors import one_line
from ..logprobs import TokenLogprobs
from ..request import RequestEvent
from ..scheduling.block_tables import BlockTables
from ..scheduling.decode_rows import DecodeRows
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence
from ..scheduling.step_plan import StepPlan
from ..serving.served_request import ServedRequest
from ..serving.served_requests import ServedRequests
from .sampling_batch import SampledRow
from .step_result import StepResult
from .verification import verify

logger = logging.getLogger(__name__)

_NOT_FINITE = "the model's logits are not finite (NaN or infinity): its weights or dtype do not bear this prompt"


class StepEvents:
    """Tells scheduler and requests of a step's result, at most one event a request.

    `num_tokens`: how many tokens were appended to answers so far.
    """

    def __init__(self, scheduler: Scheduler, tables: BlockTables, requests: ServedRequests) -> None:
        self._scheduler = scheduler
        self._tables = tables
        self._requests = requests
        self.num_tokens = 0

    def of(self, plan: StepPlan, result: StepResult) -> list[RequestEvent]:
        decodes, is_plain = plan.decodes, result.batch.is_plain and not result.broken_rows
        # Those that the scheduler still has: nobody has left since the step was launched.
        if decodes is not None and decodes is self._scheduler.decodes and is_plain:
            return self._append_all(decodes, result)
        self._scheduler.settle()
        if is_plain:
            return self._append_plain(result)
        return self._append_verified(plan, result) if plan.num_draft_tokens else self._append_each(result)

    def anyone_tries_again(self, result: StepResult) -> bool:
        """Whether the result makes a sequence begin anew, so that of the step after it nothing is of use to it."""
        return bool(result.broken_rows) and any(map(self._may_try_alone, result.broken))

    def _may_try_alone(self, sequence: Sequence) -> bool:
        """Whether it may be others' fault that a sequence's logits are not finite.

        A NaN among somebody's tokens reaches back behind the mask, as 0 × NaN, to blocks with tokens before it.
        """
        if not sequence.began_cached or sequence.is_alone or not self._requests.is_served(sequence):
            return False
        return sequence.images is None or sequence.images.problem is None

    def _append_all(self, decodes: DecodeRows, result: StepResult) -> list[RequestEvent]:
        """As `_append_each`, of a step in which nothing but their tokens tells most rows apart."""
        answers, tokens = result.batch.answers, result.tokens
        self._scheduler.read_all(decodes, tokens)
        events = answers.events(tokens)
        for row in answers.ending(tokens):
            served, sequence = result.batch.served[row], result.batch.sequences[row]
            event = self._appended(served, sequence, tokens[row], result.logprobs_of(row))
            if event is not None and row in answers.places:
                events[answers.places[row]] = event
            elif event is not None:
                events.append(event)
        self.num_tokens += len(tokens)
        return events

    def _append_plain(self, result: StepResult) -> list[RequestEvent]:
        """As `_append_each`, of a step in which each row is sampled once and for itself: most have nothing to tell."""
        by_id, batch = self._requests.by_id, result.batch
        drawn = zip(range(len(batch.served)), batch.served, batch.sequences, result.tokens, strict=True)
        wanted = [each for each in drawn if by_id.get(each[2].request_id) is each[1]]
        self._scheduler.read_each((sequence, token) for _, _, sequence, token in wanted)
        self.num_tokens += len(wanted)
        events = []
        for row, served, sequence, token in wanted:
            if not served.goes_on_silently(sequence, token):
                event = self._appended(served, sequence, token, result.logprobs_of(row))
                if event is not None:
                    events.append(event)
        return events

    def _append_verified(self, plan: StepPlan, result: StepResult) -> list[RequestEvent]:
        """As `_append_each`, of a step with guesses: those that were right bring a request several tokens."""
        result, verdicts = verify(plan, result)
        for sequence, (num_draft_tokens, num_accepted, is_broken) in verdicts.items():
            if self._requests.is_served(sequence):
                self._scheduler.verified(sequence, num_draft_tokens, num_accepted, is_broken)
        return _joined(self._append_each(result))

    def _append_each(self, result: StepResult) -> list[RequestEvent]:
        requests = self._requests
        broken_sequences = [sequence for sequence in result.broken if requests.is_served(sequence)]
        for sequence in broken_sequences:
            self._tables.taint(sequence)
        tried_again = list(filter(self._may_try_alone, broken_sequences))
        for sequence in tried_again:
            self._scheduler.try_alone(sequence)
        # Once a request: one with choices may have several sequences in a step.
        broken = dict.fromkeys(each.request_id for each in broken_sequences if each not in tried_again)
        events = [self._fail_broken(served) for served in map(requests.by_id.__getitem__, broken)]
        drawn = [each for each in result.drawn() if self._is_wanted(each[0])]
        for (_, served, sequence, _, _), _, _ in drawn:
            if served.followers:
                requests.start_followers(served, sequence)
        for (_, served, sequence, _, num_guessed), token, logprobs in drawn:
            # It may have ended with a guess before this one.
            if num_guessed and not requests.is_served(sequence):
                continue
            self._scheduler.read(sequence, token)
            self.num_tokens += 1
            if (event := self._appended(served, sequence, token, logprobs)) is not None:
                events.append(event)
        for sequence, score in result.scores:
            events += self._reach(sequence, score)
        return events

    def _is_wanted(self, sampled: SampledRow) -> bool:
        """Whether a token is still its request's next one: that may have ended, or lost whom it followed, meanwhile."""
        _, served, sequence, leader, _ = sampled
        return self._requests.by_id.get(sequence.request_id) is served and served.leader is leader

    def _appended(
        self, served: ServedRequest, sequence: Sequence, token: int, logprobs: tuple[TokenLogprobs, ...]
    ) -> RequestEvent | None:
        """What a sequence's new token brings its request, and perhaps ends it; None where that is told later."""
        try:
            reason = served.finish_reason(token, len(sequence.token_ids) - sequence.num_prompt_tokens)
        # The stop checker and the grammar are the caller's: whatever they raise is that request's fault alone.
        except Exception as error:
            logger.exception("request %s failed on its token %d", sequence.request_id, token)
            return self._requests.fail(served, one_line(error))
        event = served.event(sequence, token, logprobs, reason)
        if served.end_thinking_if_over(sequence.token_ids[sequence.num_prompt_tokens :]):
            return self._choose(served, sequence, event)
        return event if event is None or reason is None else self._requests.end(served, event)

    def _choose(self, served: ServedRequest, thinking: Sequence, event: RequestEvent | None) -> RequestEvent | None:
        """Go on from the thinking to the choices; what is told of that, with the thinking's last `event`."""
        served.leave(thinking)
        self._scheduler.finish(thinking)
        if not served.is_decided:
            self._scheduler.add(served.first_sequence())
            return event
        decided = self._requests.end(served, served.decide())
        return decided if event is None else _joined([event, decided])[0]

    def _reach(self, sequence: Sequence, logprobs: list[float]) -> list[RequestEvent]:
        """Note a choice node's scores; the request's event when it was the last node."""
        if not self._requests.is_served(sequence):
            return []
        served = self._requests.by_id[sequence.request_id]
        following = served.reach(sequence, logprobs)
        self._scheduler.finish(sequence)
        if following is not None:
            self._scheduler.add(following)
        return [] if served.sequences else [self._requests.end(served, served.decide())]

    def _fail_broken(self, served: ServedRequest) -> RequestEvent:
        """A broken image is NaNs to the model."""
        problem = served.images.problem if served.images is not None else None
        return self._requests.fail(served, problem or _NOT_FINITE, is_invalid=problem is not None)


def _joined(events: list[RequestEvent]) -> list[RequestEvent]:
    """One event a request: all tokens that the step brought it, and its last word."""
    joined: dict[str, RequestEvent] = {}
    for event in events:
        if (before := joined.get(event.request_id)) is not None:
            tokens, logprobs = before.new_token_ids + event.new_token_ids, before.logprobs + event.logprobs
            event = event._replace(new_token_ids=tokens, logprobs=logprobs, prompt_logprobs=before.prompt_logprobs)
        joined[event.request_id] = event
    return list(joined.values())
