"""The least time that a GPU's bytes and products allow for prompts with a prefix in common."""

from dataclasses import dataclass
from typing import Any

from gpu_kernels import Limits

# Of a weight, and of a number in the KV cache: bfloat16's.
_NUMBER_BYTES = 2


@dataclass(frozen=True)
class ModelSize:
    """What of a model its time depends on.

    `layers`, `head`: numbers in the layers' matrices, and in the head's. `pair_flops`: products, counted as two, of a
    query with a key and its value. `kv_bytes`: of a token.
    """

    layers: int
    head: int
    pair_flops: int
    kv_bytes: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> "ModelSize":
        """From a `config.json`'s content."""
        hidden, depth, heads = (config[name] for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        head_dim = config.get("head_dim", hidden // heads)
        kv_heads = config["num_key_value_heads"]
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        return cls(
            layers=depth * (attention + 3 * hidden * config["intermediate_size"]),
            head=hidden * config["vocab_size"],
            pair_flops=4 * depth * heads * head_dim,
            kv_bytes=2 * _NUMBER_BYTES * depth * kv_heads * head_dim,
        )


def least_seconds(
    config: dict[str, Any], requests: int, shared: int, own: int, max_tokens: int, limits: Limits
) -> float:
    """For `requests` prompts of `shared` tokens in common, which are there already, and `own` ones, all at once.

    Every weight is read once a step, the shared keys too, and nothing but products and bytes takes time.
    """
    model = ModelSize.of(config)
    flops, rate = limits.flops_per_second, limits.bytes_per_second
    num_prefilled = requests * own
    prefill = num_prefilled * (2 * model.layers + model.pair_flops * (shared + own / 2)) / flops
    weights = model.layers + model.head
    context = own + max_tokens / 2
    products = max(_NUMBER_BYTES * weights / rate, 2 * weights * requests / flops)
    attention = max(
        model.kv_bytes * (shared + requests * context) / rate,
        model.pair_flops * requests * (shared + context) / flops,
    )
    # The first token comes from the prefill.
    least: float = prefill + (max_tokens - 1) * (products + attention)
    return least
