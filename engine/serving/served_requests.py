"""The requests that an engine serves, each from when it is added to its last event."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from itertools import count

from ..errors import InvalidRequestError
from ..execution.runner import BlockMemory
from ..request import FinishReason, Request, RequestEvent, RequestOutputKind
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence
from .admission import Admission
from .served_request import ServedRequest


class ServedRequests:
    """Takes requests on, starts those that follow another once its prompt is computed, and lets all of them go.

    `by_id`: all that are served. `num_guided`: how many of them follow a grammar; `num_adapted`: have a LoRA adapter;
    `num_with_images`: have images in their prompts.
    `parked`: those whose adapter has no place yet, first come first served: nobody with an adapter overtakes them.
    """

    def __init__(self, admission: Admission, scheduler: Scheduler, memory: BlockMemory) -> None:
        self._admission = admission
        self._scheduler = scheduler
        self._memory = memory
        self.by_id: dict[str, ServedRequest] = {}
        self.num_guided = 0
        self.num_adapted = 0
        self.num_with_images = 0
        self.parked: dict[str, Request] = {}
        self._arrivals = count()
        # Requests whose answer needs no computation; they end at the next step.
        self._decided: list[ServedRequest] = []

    def __len__(self) -> int:
        return len(self.by_id) + len(self.parked)

    def add(self, request: Request) -> None:
        """Queue a request. Raises `InvalidRequestError` when it could never run; nothing changes then."""
        if request.request_id in self.by_id or request.request_id in self.parked:
            raise InvalidRequestError(f"request id {request.request_id!r} is already in use")
        if request.lora_request is not None and (self.parked or not self._admission.has_place_for(request)):
            self.parked[request.request_id] = request
        else:
            self._take_on(request)

    def admit_parked(self) -> list[RequestEvent]:
        """Take on those whose adapter has a place by now; returns the only events of those that cannot be."""
        events = []
        while self.parked and self._admission.has_place_for(first := next(iter(self.parked.values()))):
            del self.parked[first.request_id]
            try:
                self._take_on(first)
            except InvalidRequestError as error:
                refused = RequestEvent(first.request_id, (), FinishReason.ERROR, error=str(error), is_invalid=True)
                events.append(refused)
        return events

    def _take_on(self, request: Request) -> None:
        served = self._admission.accept(request, next(self._arrivals))
        leader = self._leader_of(served)
        self.by_id[request.request_id] = served
        self._count(served, 1)
        if served.is_decided:
            self._decided.append(served)
            return
        sequence = served.first_sequence()
        if leader is not None:
            served.leader = leader
            leader.followers.append(served)
        else:
            self._scheduler.add(sequence)

    def _count(self, served: ServedRequest, number: int) -> None:
        """Note that so many more are served that have what this one has."""
        if served.guide is not None:
            self.num_guided += number
        if served.images is not None:
            self.num_with_images += number
        if served.adapter is not None:
            served.adapter.num_requests += number
            self.num_adapted += number

    def abort(self, request_id: str) -> bool:
        """Drop a request and free its KV blocks; false when it is not here (any more)."""
        if self.parked.pop(request_id, None) is not None:
            return True
        served = self.by_id.get(request_id)
        if served is None:
            return False
        self._decided = [other for other in self._decided if other is not served]
        self._drop(served)
        return True

    def watch(self, request_id: str) -> RequestEvent | None:
        """Tell of each step that brings this request tokens, from now on; returns what was not told so far, if any."""
        if (parked := self.parked.get(request_id)) is not None:
            self.parked[request_id] = replace(parked, output_kind=RequestOutputKind.DELTA)
        if (served := self.by_id.get(request_id)) is None or served.tells_each_step:
            return None
        # What is kept of those that decode says of each whether it is told.
        self._scheduler.part_decodes()
        return served.watch()

    def end_decided(self) -> list[RequestEvent]:
        """The only events of those that were added since and whose answer needs no computation."""
        decided, self._decided = self._decided, []
        return [self.end(served, served.decide()) for served in decided]

    def end(self, served: ServedRequest, event: RequestEvent) -> RequestEvent:
        """Let a request go with this event, its last."""
        self._drop(served)
        return event

    def fail(self, served: ServedRequest, error: str, *, is_invalid: bool = False) -> RequestEvent:
        """Let a request go that cannot go on, with what it has and nobody was told of."""
        event = served.untold()
        if served.request.params.logprobs is not None:
            # The token that it failed on has none yet.
            event = event._replace(new_token_ids=event.new_token_ids[: len(event.logprobs)])
        event = event._replace(finish_reason=FinishReason.ERROR, error=error, is_invalid=is_invalid)
        return self.end(served, event)

    def is_served(self, sequence: Sequence) -> bool:
        """Whether a sequence's request has not ended since the sequence was scheduled."""
        served = self.by_id.get(sequence.request_id)
        return served is not None and served.arrival == sequence.arrival

    def refresh_masks(self, sequences: SequenceOf[Sequence]) -> None:
        """Compute which tokens the grammars of the sequences' requests, and of their followers, allow next."""
        for sequence in sequences:
            served = self.by_id[sequence.request_id]
            for each in (served, *served.followers):
                if each.guide is not None:
                    each.guide.refresh()

    def _leader_of(self, served: ServedRequest) -> ServedRequest | None:
        """The request whose prompt this one is to share, if it is still to be computed."""
        request = served.request
        leader = self.by_id.get(request.fork_of) if request.fork_of is not None else None
        if leader is None or served.tree is not None or request.params.prompt_logprobs is not None:
            return None
        # Its first token does not come from the prompt's logits.
        if request.resume_token_ids:
            return None
        if leader.prompt != served.prompt:
            raise InvalidRequestError(f"fork_of names {request.fork_of!r}, which has another prompt")
        if _content(leader) != _content(served):
            raise InvalidRequestError(f"fork_of names {request.fork_of!r}, which has other images")
        if leader.adapter is not served.adapter:
            raise InvalidRequestError(f"fork_of names {request.fork_of!r}, which has another LoRA adapter")
        return leader if leader.waits_for_prompt and leader.request.priority == request.priority else None

    def start_followers(self, served: ServedRequest, parent: Sequence) -> None:
        """Start those that waited for a request's prompt, which `parent` has now computed."""
        followers, served.followers = served.followers, []
        children = [follower.sequences[0] for follower in followers]
        copies = [copy for child in children for copy in self._scheduler.fork(parent, child)]
        for follower in followers:
            follower.leader = None
        if copies:
            self._copy(copies, children)

    def _copy(self, copies: list[tuple[int, int]], children: Iterable[Sequence]) -> None:
        try:
            self._memory.copy(copies)
        except BaseException:
            for child in children:
                if child.block_table:
                    self._scheduler.start_over(child)
            raise

    def _drop(self, served: ServedRequest) -> None:
        """Forget a request; the first of those that waited for its prompt computes it for the others."""
        del self.by_id[served.request.request_id]
        self._count(served, -1)
        for sequence in served.sequences:
            if served.leader is None:
                self._scheduler.finish(sequence)
            else:
                self._scheduler.leave(sequence)
        if served.leader is not None:
            served.leader.followers.remove(served)
        if served.followers:
            heir, *others = served.followers
            heir.leader, heir.followers = None, others
            for other in others:
                other.leader = heir
            self._scheduler.add(heir.sequences[0])


def _content(served: ServedRequest) -> tuple[bytes, ...]:
    return served.images.content if served.images is not None else ()
