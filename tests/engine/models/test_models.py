"""Every family in half precision, where no oracle's tokens can be compared: it stays close to itself in float32."""

import pytest
import torch
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.kv_cache.kv_memory import kv_shapes
from headrace.engine.models import load_model
from headrace.kernels.paged_attention import AttentionMetadata

from ..families import FAMILIES, FURTHER

BLOCK_SIZE, NUM_TOKENS = 16, 70
BLOCKS = list(range(-(-NUM_TOKENS // BLOCK_SIZE)))


@torch.inference_mode()
def logits(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Of one prompt in one go: [NUM_TOKENS, vocab_size] float32."""
    model = load_model(config, EngineConfig(load_format="dummy"), dtype, torch.device("cpu"))
    for slot in model.weight_slots():
        # As training would have made them: nothing else scales the scores, and large ones have large roundings.
        if config.attention_scale == 1 and slot.name.endswith("q_norm.weight"):
            slot.destination.mul_(config.head_dim**-0.5)
    model.prepack()
    caches = [torch.zeros(shape, dtype=dtype) for shape in kv_shapes(config, len(BLOCKS), BLOCK_SIZE)]
    positions = torch.arange(NUM_TOKENS)
    metadata = AttentionMetadata([NUM_TOKENS], [NUM_TOKENS], [BLOCKS], BLOCK_SIZE)
    token_ids = positions * 3 % config.vocab_size
    hidden = model.forward(token_ids, positions, caches, positions, metadata)
    return model.logits(hidden).float()


@pytest.mark.parametrize("name", [*FAMILIES, *FURTHER])
def test_bfloat16_stays_close_to_float32(checkpoint, name):
    config = ModelConfig.from_pretrained(checkpoint(name).folder)
    exact, rounded = logits(config, torch.float32), logits(config, torch.bfloat16)
    # The median: a rounding may send a few tokens to other experts.
    errors = (rounded - exact).norm(dim=-1) / exact.norm(dim=-1)
    assert errors.median() < 0.04
