"""The largest step there can be, by which a GPU's memory is measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...kernels.kv_cache import PADDING_SLOT
from ...kernels.paged_attention import AttentionMetadata, Span
from ...kernels.recurrent_states import StateSlots
from ...kernels.sampling import likeliest_tokens, sample_tokens
from ..config import EngineConfig
from ..kv_cache.block_pool import NULL_BLOCK
from ..kv_cache.state_memory import StateMemory
from ..kv_cache.state_pool import NULL_STATE
from ..models import Decoder


@dataclass(frozen=True)
class LargestStep:
    """The tokens of a step that is as large as the limits allow, of sequences as long as they may get.

    All sequences have one and the same block over and over, so that a cache of two blocks is enough. No two tokens are
    written to one place: those that it has no room for are not kept.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionMetadata
    num_logits: int

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int, device: torch.device, num_beyond: int = 0) -> "LargestStep":
        """`num_beyond`: how many tokens a step may have beyond what the limits allow."""
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        num_tokens = min(config.max_num_batched_tokens + num_beyond, num_seqs * max_model_len)
        share, rest = divmod(num_tokens, num_seqs)
        lens = [share + (index < rest) for index in range(num_seqs)]
        table = [NULL_BLOCK + 1] * -(-max_model_len // config.block_size)
        positions = torch.cat([torch.arange(max_model_len - length, max_model_len) for length in lens])
        slots = torch.full((num_tokens,), PADDING_SLOT)
        num_kept = min(num_tokens, config.block_size)
        slots[:num_kept] = (NULL_BLOCK + 1) * config.block_size + torch.arange(num_kept)
        return cls(
            token_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=positions.to(device),
            slots=slots.to(device),
            attention=AttentionMetadata(
                lens, [max_model_len] * num_seqs, [table] * num_seqs, config.block_size, device
            ),
            num_logits=min(config.max_num_logits, num_tokens),
        )

    def with_span(self, length: int, in_windows: bool) -> "LargestStep":
        """The same where so many tokens see each other, with as many keys as a sequence may have."""
        context, table = self.attention.context_lens[0], self.attention.block_tables[0]
        # They may be several sequences', as which they take no more memory.
        span = Span(0, min(length, context, len(self.token_ids)), context, table, in_windows)
        return replace(self, attention=replace(self.attention, spans=[span]))

    @torch.inference_mode()
    def forward(self, model: Decoder, kv_caches: Sequence[Tensor], states: StateMemory | None = None) -> Tensor:
        """What a graph would compute of it: [num_tokens, hidden_size].

        Layers with states have all tokens for one sequence's: it takes one state, and the memory that a prompt takes.
        """
        layer_states = None
        if states is not None:
            one = StateSlots([len(self.token_ids)], [NULL_STATE], [NULL_STATE + 1], self.token_ids.device)
            layer_states = states.of(one)
        return model.forward(self.token_ids, self.positions, kv_caches, self.slots, self.attention, states=layer_states)

    @torch.inference_mode()
    def draw(self, model: Decoder, hidden: Tensor) -> Tensor:
        """A token of each sequence and of each guess, as a step draws it where every sequence has wishes.

        A stage but the last gives what it hands on.
        """
        if not model.stage.is_last:
            return hidden
        logits = model.logits(hidden[: self.num_logits])
        likeliest_tokens(logits, with_log_sum_exp=True)
        ones = torch.ones(len(logits), dtype=torch.float64, device=logits.device)
        return sample_tokens(logits.float(), ones, ones.long(), ones, ones, ones / 2)
