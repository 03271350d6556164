"""A request's tokens on their way through the engine, and the KV blocks they own."""

from dataclasses import dataclass, field

from .choices import ChoiceNode
from .prefix_cache import BlockHash, hash_blocks


@dataclass(slots=True, eq=False)
class Sequence:
    """Tokens, how many of them have their KV computed, and where that KV lies.

    A sequence either generates (tokens are appended as they are sampled) or, with `choice_node` set, only reads
    the probabilities of that node's children after its last token.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    block_size: int
    choice_node: ChoiceNode | None = None
    num_computed_tokens: int = 0
    # Prompt tokens found in the prefix cache when the sequence was first admitted.
    num_cached_tokens: int = 0
    was_admitted: bool = False
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def hashes(self) -> list[BlockHash]:
        """Hashes of all full blocks; computed once per block."""
        if len(self.block_hashes) < self.num_tokens // self.block_size:
            self.block_hashes = hash_blocks(self.token_ids, self.block_size, self.block_hashes)
        return self.block_hashes
