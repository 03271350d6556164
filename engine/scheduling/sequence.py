"""A request's tokens on their way through the engine, and the KV blocks they own."""

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ..kv_cache.block_hashes import ROOT, BlockHash, add_hashes, add_marked_hashes, hash_block
from ..kv_cache.shared_run import SharedRun
from ..kv_cache.state_pool import NULL_STATE
from ..kv_cache.swap import SwappedBlocks
from ..logprobs import PromptLogprobs
from ..speculative.pace import Pace
from ..structured.choices import ChoiceNode
from ..vision.prompt_images import PromptImages


def new_block_table(blocks: Iterable[int] = ()) -> "array[int]":
    """Of 32 bits each: that is what attention wants, and then they need not be looked at one by one."""
    return array("i", blocks)


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them have their KV computed, and where that KV lies.

    A sequence either generates (tokens are appended as they are sampled) or, with `choice_node` set, only reads
    the probabilities of that node's children after its last token. It is served in the order of `turn`.
    """

    request_id: str
    # Of 32 bits each: a list would have an object for each.
    token_ids: "array[int]"
    num_prompt_tokens: int
    block_size: int
    choice_node: ChoiceNode | None = None
    # Makes its request's next one, which takes its place in the queue: of thousands only one waits.
    next_in_line: "Callable[[], Sequence | None] | None" = None
    # Collects log-probabilities of the prompt's tokens, where the request asks for them.
    prompt_logprobs: PromptLogprobs | None = None
    # Of the LoRA adapter that it is computed with, 0 where it has none, and where its blocks' hashes begin.
    adapter_number: int = 0
    hash_root: BlockHash = ROOT
    images: PromptImages | None = None
    # Lower is served first.
    priority: int = 0
    # When its request arrived, and its place among that request's sequences; no two sequences have the same.
    arrival: int = 0
    branch: int = 0
    # With those that a step in flight computes.
    num_computed_tokens: int = 0
    # Sampled by steps in flight: the sequence has them, but only the device knows which they are. One that is sure to
    # be the last is not counted: it is never computed.
    num_unread_tokens: int = 0
    # Guesses may make it as long as this: what is sure to be the last token is followed by nothing. 0: it has none.
    speculates_up_to: int = 0
    # Known once it has guessed.
    pace: Pace | None = None
    # Of how many of its first tokens the model that guesses has KV in the blocks, wrong guesses apart.
    num_drafted_tokens: int = 0
    # Prompt tokens found in the prefix cache when the sequence was first admitted.
    num_cached_tokens: int = 0
    was_admitted: bool = False
    # Others may have computed some of the blocks that it began with. `is_alone`: it computes all of its own.
    began_cached: bool = False
    is_alone: bool = False
    # Blocks that slid out of the attention window are NULL_BLOCK: `num_slid_blocks`, the first ones.
    block_table: "array[int]" = field(default_factory=new_block_table)
    num_slid_blocks: int = 0
    # Of its blocks the first ones, if it owns them together with others.
    shared_run: SharedRun | None = None
    block_hashes: list[BlockHash] = field(default_factory=list)
    # Of a model with recurrent states: the one that its next step leaves, and the one that step goes on from, which is
    # another one only until the step is launched.
    state: int = NULL_STATE
    read_state: int = NULL_STATE
    # After how many blocks its state is to be kept for others, ascending. `num_followed_tokens`: with how many of its
    # tokens others are going to begin that are not here yet.
    snapshot_ends: list[int] = field(default_factory=list)
    num_followed_tokens: int = 0
    # A step that failed has cost it its state: the next ones leave theirs elsewhere, so that it loses none again.
    spares_state: bool = False
    # While it waits, its KV may lie in the host's memory.
    swapped: SwappedBlocks | None = None

    @property
    def turn(self) -> tuple[int, int, int]:
        return self.priority, self.arrival, self.branch

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) + self.num_unread_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Those whose ids are known."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_read_cache(self) -> bool:
        """Not while the logits of prompt tokens are still wanted: cached KV comes without them."""
        return not self.is_alone and (self.prompt_logprobs is None or self.prompt_logprobs.is_complete)

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def hashes(self) -> list[BlockHash]:
        """Hashes of all full blocks whose tokens are known; computed once per block."""
        if len(self.block_hashes) < len(self.token_ids) // self.block_size:
            if self.images is None:
                add_hashes(self.block_hashes, self.token_ids, self.block_size, self.hash_root)
            else:
                marks = self.images.marks(self.block_size)
                add_marked_hashes(self.block_hashes, self.token_ids, self.block_size, self.hash_root, marks)
        return self.block_hashes

    def hash_filled(self) -> BlockHash:
        """The last of `hashes`, in less time: of the block that the last known token fills, which has none yet."""
        hashes, first = self.block_hashes, len(self.token_ids) - self.block_size
        # The block may begin with an image of the prompt.
        if len(hashes) * self.block_size != first or self.images is not None:
            return self.hashes()[-1]
        hashes.append(hash_block(hashes[-1] if hashes else self.hash_root, self.token_ids[first:]))
        return hashes[-1]
