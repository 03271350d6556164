"""What the engine knows of a request that it serves."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from .adjustment import Adjustment
from .choices import ChoiceNode, ChoiceTree
from .logprobs import PromptLogprobs
from .request import FinishReason, Request, RequestEvent
from .sampler import pick_choice
from .sequence import Sequence


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request, the sequences that still compute for it, and what is known of its answer.

    `followers` wait to share this one's prompt, `leader` is whom this one waits for.
    """

    request: Request
    arrival: int
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    block_size: int
    tree: ChoiceTree | None
    adjustment: Adjustment | None = field(init=False)
    sequences: list[Sequence] = field(default_factory=list)
    followers: list["LiveRequest"] = field(default_factory=list)
    leader: "LiveRequest | None" = None
    num_cached_tokens: int = 0
    _node_logprobs: dict[ChoiceNode, list[float]] = field(default_factory=dict)
    _branches: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        num_prompt_tokens = len(self.request.prompt_token_ids)
        self.adjustment = Adjustment.of(self.request.params, tuple(self.stop_token_ids), num_prompt_tokens)

    @property
    def is_decided(self) -> bool:
        """Whether the answer needs no computation: there is only one choice."""
        return self.tree is not None and not self.tree.nodes

    @property
    def waits_for_prompt(self) -> bool:
        """Whether it is about to compute its prompt for the first time, so that others may join."""
        return self.tree is None and self.leader is None and not self.sequences[0].num_output_tokens

    def new_sequence(self, node: ChoiceNode | None = None) -> Sequence:
        """A further sequence of this request, at its beginning or at one of its choices' nodes."""
        prompt = list(self.request.prompt_token_ids)
        num_top = self.request.params.prompt_logprobs
        sequence = Sequence(
            request_id=self.request.request_id,
            token_ids=prompt + list(node.path if node else ()),
            num_prompt_tokens=len(prompt),
            block_size=self.block_size,
            choice_node=node,
            prompt_logprobs=None if num_top is None else PromptLogprobs(num_top, len(prompt)),
            priority=self.request.priority,
            arrival=self.arrival,
            branch=next(self._branches),
        )
        self.sequences.append(sequence)
        return sequence

    def finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether and why the sequence's last token ends it. Tells the stop checker, so to be asked once a token."""
        token, stop_checker = sequence.token_ids[-1], self.request.stop_checker
        if token in self.stop_token_ids or (stop_checker is not None and stop_checker(token)):
            return FinishReason.STOP
        return FinishReason.LENGTH if sequence.num_output_tokens >= self.max_tokens else None

    def reach(self, sequence: Sequence, logprobs: list[float]) -> list[Sequence]:
        """Note the scores at the choice node that ends `sequence`; returns the sequences that are wanted next.

        Once the first node is known its prompt is cached: the tree's other nodes share it.
        """
        assert self.tree is not None
        assert sequence.choice_node is not None
        self._node_logprobs[sequence.choice_node] = logprobs
        self.sequences.remove(sequence)
        if sequence.choice_node is not self.tree.nodes[0]:
            return []
        self.num_cached_tokens = sequence.num_cached_tokens
        return [self.new_sequence(node) for node in self.tree.nodes[1:]]

    def decide(self) -> RequestEvent:
        """The last event of a request with choices, all of whose nodes are known."""
        assert self.tree is not None
        probabilities = self.tree.probabilities(self._node_logprobs)
        chosen = pick_choice(probabilities, self.request.params, self.seed)
        return RequestEvent(
            self.request.request_id,
            self.tree.choices[chosen],
            FinishReason.STOP,
            self.num_cached_tokens,
            chosen,
            probabilities,
        )
