"""What the engine knows of a request that it serves."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from ..errors import InvalidRequestError
from ..kv_cache.block_hashes import ROOT, salted
from ..logprobs import PromptLogprobs, TokenLogprobs
from ..lora.adapter import Adapter
from ..request import FinishReason, Request, RequestEvent, RequestOutputKind
from ..sampling.adjustment import Adjustment
from ..sampling.sampler import pick_choice
from ..scheduling.sequence import Sequence
from ..structured.choices import ChoiceNode, ChoiceTree
from ..structured.thinking_guide import AnyGuide, ThinkingGuide
from ..vision.prompt_images import PromptImages

# At most so many of a prompt's last tokens open the answer, as Qwen3.5's <think> and </think> with their line breaks.
# In the next turn's prompt the answer comes without.
_OPENING_TOKENS = 8


@dataclass(slots=True, eq=False)
class ServedRequest:
    """A request, the sequences that still compute for it, and what is known of its answer.

    `prompt`: its tokens, perhaps the request's own array. `followers` wait to share them, `leader` is whom this one
    waits for. `ended`: why the answer was over before anything was computed, if the tokens it resumes from complete it.
    `guide`: where it stands in its grammar. `forced`: the end token where the grammar leaves nothing else, so that no
    step is spent on it. `thought`: what was said before the choices, once that is known; with choices only, and empty
    where nothing is.
    """

    request: Request
    prompt: "array[int]"
    arrival: int
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    block_size: int
    tree: ChoiceTree | None
    guide: AnyGuide | None = None
    end_token_id: int | None = None
    adapter: Adapter | None = None
    images: PromptImages | None = None
    adjustment: Adjustment | None = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    followers: list["ServedRequest"] = field(default_factory=list)
    leader: "ServedRequest | None" = None
    ended: FinishReason | None = None
    forced: tuple[int, ...] = ()
    thought: tuple[int, ...] | None = field(init=False)
    num_cached_tokens: int = 0
    # Whether each step's tokens are told; if not, the log-probabilities of those that are to be told at the end.
    tells_each_step: bool = field(init=False)
    untold_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Whether somebody looks at each token before it counts, or has more to tell of it than what it is.
    is_checked: bool = field(init=False)
    _node_logprobs: dict[ChoiceNode, list[float]] = field(default_factory=dict)
    _nodes: Iterator[ChoiceNode] = field(init=False)
    _branches: Iterator[int] = field(default_factory=count)
    _known_choice: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        request = self.request
        self.tells_each_step = request.output_kind is RequestOutputKind.DELTA
        wants_logprobs = request.params.logprobs is not None
        self.is_checked = request.stop_checker is not None or self.guide is not None or wants_logprobs
        self.thought = None if self._thinks_first else ()
        self.adjustment = Adjustment.of(
            request.params, tuple(self.stop_token_ids), len(self.prompt), self.guide, request.bad_words_token_ids
        )

    @property
    def _thinks_first(self) -> bool:
        return self.tree is not None and isinstance(self.guide, ThinkingGuide)

    @property
    def is_decided(self) -> bool:
        """Whether the answer needs no computation: it is complete, or there is only one choice."""
        return self.ended is not None or (self.tree is not None and not self.tree.nodes and self.thought is not None)

    @property
    def waits_for_prompt(self) -> bool:
        """Whether it is about to compute its prompt for the first time, so that others may join."""
        if self.is_decided or self.tree is not None or self.leader is not None:
            return False
        sequence = self.sequences[0]
        return not sequence.num_output_tokens and sequence.num_computed_tokens < sequence.num_prompt_tokens

    def resume(self) -> None:
        """Take in the tokens that the request resumes from; the answer may end with the last of them.

        Tells the stop checker. Raises `InvalidRequestError` when they cannot be this request's.
        """
        known = tuple(self.request.resume_token_ids)
        if self.tree is not None:
            self._resume_choice(known)
            return
        for length, token in enumerate(known, 1):
            if self.forced and token in self.stop_token_ids:
                # It came with the token before.
                self.forced = ()
            elif self.ended is not None:
                raise _cannot_resume(f"go on after token {length - 1}, with which the answer ends")
            else:
                self.ended = self.finish_reason(token, length)

    def _resume_choice(self, known: tuple[int, ...]) -> None:
        assert self.tree is not None
        num_thought = 0
        while self.thought is None and num_thought < len(known):
            self.guide_to(known[num_thought])
            num_thought += 1
            self.end_thinking_if_over(known[:num_thought])
        if (choice := known[num_thought:]) and choice not in self.tree.choices:
            raise _cannot_resume("are none of the choices, and an answer with choices comes whole")
        self._known_choice = choice

    def guide_to(self, token: int) -> None:
        """Tell the guide of a token of the thinking before the choices."""
        assert self.guide is not None
        self.guide.advance(token)

    def end_thinking_if_over(self, said: Iterable[int]) -> bool:
        """Whether the choices come next, for the first time; then `said`, all of the answer so far, is the thought."""
        is_over = self.thought is None and isinstance(self.guide, ThinkingGuide) and self.guide.is_over
        if is_over:
            self.thought = tuple(said)
        return is_over

    def first_sequence(self) -> Sequence:
        """The one that a request begins with, or begins anew with after its thinking."""
        return self.new_sequence(self.tree.nodes[0] if self.tree and self.thought is not None else None)

    def new_sequence(self, node: ChoiceNode | None = None) -> Sequence:
        """A further sequence of this request, at its beginning or at one of its choices' nodes."""
        prompt, token_ids = self.prompt, self.prompt[:]
        token_ids.extend((*(self.thought or ()), *node.path) if node else self.request.resume_token_ids)
        num_top = self.request.params.prompt_logprobs
        sequence = Sequence(
            request_id=self.request.request_id,
            token_ids=token_ids,
            num_prompt_tokens=len(prompt),
            block_size=self.block_size,
            choice_node=node,
            prompt_logprobs=None if num_top is None else PromptLogprobs(num_top, len(prompt)),
            adapter_number=self.adapter.number if self.adapter else 0,
            hash_root=salted(self.adapter.hash_root if self.adapter else ROOT, self.request.cache_salt),
            images=self.images,
            priority=self.request.priority,
            arrival=self.arrival,
            branch=next(self._branches),
            num_followed_tokens=self._num_followed_tokens(node, len(token_ids)),
            # Whatever depends on what was said before would have to know each guess.
            speculates_up_to=0 if node or self.adjustment else len(prompt) + self.max_tokens - 1,
        )
        self.sequences.append(sequence)
        return sequence

    def _num_followed_tokens(self, node: ChoiceNode | None, num_tokens: int) -> int:
        """With how many of a new sequence's tokens the tree's other nodes are going to begin, or the next turn."""
        if self.tree is not None:
            return num_tokens - 1 if len(self.tree.nodes) > 1 and node is self.tree.nodes[0] else 0
        return max(0, len(self.prompt) - _OPENING_TOKENS) if self.request.is_conversation else 0

    def goes_on_silently(self, sequence: Sequence, token: int) -> bool:
        """Whether nothing is to be done about the sequence's newest token: it ends nothing, and nobody is told."""
        return not (
            self.tells_each_step
            or self.is_checked
            or token in self.stop_token_ids
            or len(sequence.token_ids) - sequence.num_prompt_tokens >= self.max_tokens
        )

    def finish_reason(self, token: int, num_output_tokens: int) -> FinishReason | None:
        """Whether and why this token, the last one of so many, ends the answer, perhaps with what is then `forced`.

        Tells the stop checker and the guide, so to be asked once a token. Raises what they raise.
        """
        stop_checker = self.request.stop_checker
        if token in self.stop_token_ids or (stop_checker is not None and stop_checker(token)):
            return FinishReason.STOP
        if num_output_tokens >= self.max_tokens:
            return FinishReason.LENGTH
        return self._guided_end(token) if self.guide is not None else None

    def _guided_end(self, token: int) -> FinishReason | None:
        assert self.guide is not None
        self.guide.advance(token)
        # Its log-probability would have to be computed.
        if not self.guide.is_complete or self.request.params.logprobs is not None:
            return None
        assert self.end_token_id is not None
        self.forced = (self.end_token_id,)
        return FinishReason.STOP

    def untold_token_ids(self) -> "array[int]":
        """What was generated and no event has told of; of choices only what was thought, as they come whole."""
        num_known = len(self.request.resume_token_ids)
        if self.tells_each_step:
            return array("i")
        if self.tree is not None and self.thought is not None:
            return array("i", self.thought[num_known:])
        # Another thread may ask while they change.
        for sequence in self.sequences[:1]:
            return sequence.token_ids[sequence.num_prompt_tokens + num_known :]
        return array("i")

    def event(
        self,
        sequence: Sequence,
        token: int,
        logprobs: tuple[TokenLogprobs, ...],
        reason: FinishReason | None,
    ) -> RequestEvent | None:
        """What is told of its newest token; None where that is to be told later."""
        if self.tells_each_step:
            token_ids, is_due = (token, *self.forced), self.is_first(sequence)
        else:
            self.untold_logprobs += logprobs
            if reason is None:
                return None
            token_ids, is_due = (*self.untold_token_ids(), *self.forced), True
            logprobs = tuple(self.untold_logprobs)
        collected = sequence.prompt_logprobs
        prompt_logprobs = collected.entries() if collected is not None and is_due else None
        return RequestEvent(
            self.request.request_id,
            token_ids,
            reason,
            sequence.num_cached_tokens,
            None,
            None,
            logprobs,
            prompt_logprobs,
        )

    def watch(self) -> RequestEvent | None:
        """From now on tell of each step; returns what was not told so far, None where there is nothing."""
        # Of one that is decided already there is no sequence.
        event = self.untold() if self.sequences else None
        self.tells_each_step = True
        self.untold_logprobs = []
        return event if event is not None and event.new_token_ids else None

    def untold(self) -> RequestEvent:
        """What no event has told of, perhaps no token, of a request that has a sequence."""
        token_ids, sequence = tuple(self.untold_token_ids()), self.sequences[0]
        # The first event that has tokens has them.
        collected = sequence.prompt_logprobs if token_ids else None
        is_known = bool(self._node_logprobs or self.thought)
        return RequestEvent(
            self.request.request_id,
            token_ids,
            num_cached_tokens=self.num_cached_tokens if is_known else sequence.num_cached_tokens,
            logprobs=tuple(self.untold_logprobs),
            prompt_logprobs=None if collected is None else collected.entries(),
        )

    def is_first(self, sequence: Sequence) -> bool:
        """Whether the sequence's last token is the first one that was computed for this request."""
        return sequence.num_output_tokens == len(self.request.resume_token_ids) + 1

    def leave(self, thinking: Sequence) -> None:
        """Forget the sequence that has come to the end of the thinking."""
        self.sequences.remove(thinking)
        self.num_cached_tokens = thinking.num_cached_tokens

    def reach(self, sequence: Sequence, logprobs: list[float]) -> Sequence | None:
        """Note the scores at the choice node that ends `sequence`; returns the sequence that is to be queued, if any.

        Once the first node is known its prompt is cached: the tree's other nodes share it. Each of them brings the
        next one when it is admitted: made all at once, thousands of them would keep the step from its end.
        """
        assert self.tree is not None
        assert sequence.choice_node is not None
        self._node_logprobs[sequence.choice_node] = logprobs
        self.sequences.remove(sequence)
        if sequence.choice_node is not self.tree.nodes[0]:
            return None
        # Of what was thought here the sequence that did has told.
        if len(self.thought or ()) <= len(self.request.resume_token_ids):
            self.num_cached_tokens = sequence.num_cached_tokens
        self._nodes = iter(self.tree.nodes[1:])
        return self._next_sequence()

    def _next_sequence(self) -> Sequence | None:
        """That of the next of the tree's nodes."""
        if (node := next(self._nodes, None)) is None:
            return None
        sequence = self.new_sequence(node)
        sequence.next_in_line = self._next_sequence
        return sequence

    def decide(self) -> RequestEvent:
        """The last event of a request that is complete, or has choices all of whose nodes are known."""
        if self.tree is None:
            return RequestEvent(self.request.request_id, self.forced, self.ended)
        probabilities = self.tree.probabilities(self._node_logprobs)
        known, untold = self._known_choice, tuple(self.untold_token_ids())
        # What was told to somebody already stands, even should it be computed otherwise here.
        chosen = self.tree.choices.index(known) if known else pick_choice(probabilities, self.request.params, self.seed)
        return RequestEvent(
            self.request.request_id,
            untold if known else (*untold, *self.tree.choices[chosen]),
            FinishReason.STOP,
            self.num_cached_tokens,
            chosen,
            probabilities,
        )


def _cannot_resume(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"resume_token_ids {why}: leave them out", "resume_token_ids")
