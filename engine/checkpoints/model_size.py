"""How large a model is by its `config.json` alone: its weights, and its KV cache a token. Free of torch."""

from collections.abc import Iterator

from .model_config import LatentAttentionConfig, MlpNames, ModelConfig, MoeConfig
from .projection import FLOAT_BYTES, Projection
from .quantization_schemes import WeightScheme
from .vision_size import num_vision_weights

# How many prefixes may keep a state beside those of the sequences that run.
KEPT_STATES = 32


def kv_token_bytes(model: ModelConfig, item_bytes: int) -> int:
    """Bytes that a token's keys and values, or latents, take over all layers."""
    numbers = sum(heads.number * heads.head_dim * len(layers) for heads, layers in model.kv_groups.items())
    return model.num_kv_rows * numbers * item_bytes


def state_bytes(model: ModelConfig, item_bytes: int) -> int:
    """Bytes that a sequence's states take over all layers that have some, whatever its length."""
    states = model.state_layers
    if states is None:
        return 0
    convolved = (states.conv_width - 1) * states.mixed_size * item_bytes
    return sum(states.layers) * (convolved + states.recurrent.numbers * FLOAT_BYTES)


def num_parameters(model: ModelConfig) -> int:
    """Of the whole model, before it was quantised."""
    projections = [each for index in range(model.num_hidden_layers) for each in layer_projections(model, index)]
    matrices = sum(each.num_weights + each.num_biases for each in (*_ends(model), *projections))
    of_states = sum(_num_other_state_weights(model))
    return matrices + _num_norm_weights(model) + of_states + _num_sinks(model) + _num_vision_weights(model)


def weight_bytes(model: ModelConfig, item_bytes: int, quantization: str | None = None) -> int:
    """About what the weights take in memory. `quantization`: as `EngineConfig` has it."""
    is_wide = model.norm_offset and model.norm == "rms"
    total = _num_norm_weights(model) * (FLOAT_BYTES if is_wide else item_bytes)
    total += (_num_sinks(model) + _num_vision_weights(model)) * item_bytes
    plain, wide = _num_other_state_weights(model)
    total += plain * item_bytes + wide * FLOAT_BYTES
    for index in range(model.num_hidden_layers):
        for each in layer_projections(model, index):
            total += each.num_bias_bytes(item_bytes)
            if quantization == "int8" and each.is_quantizable:
                total += each.num_weights + each.copies * each.num_outputs * FLOAT_BYTES
            else:
                total += each.num_bytes(_scheme(model, each), item_bytes)
    return total + sum(each.num_bytes(_scheme(model, each), item_bytes) for each in _ends(model))


def _scheme(model: ModelConfig, projection: Projection) -> WeightScheme | None:
    return None if model.quantization is None else model.quantization.scheme([projection.name])


def _ends(model: ModelConfig) -> Iterator[Projection]:
    """The embedding, and the head where it is another matrix; of a stage, what it has of them."""
    stage, is_tied = model.stage, model.tie_word_embeddings
    if stage.is_first or (stage.is_last and is_tied):
        yield Projection(model.names.embedding, model.vocab_size, model.hidden_size, is_quantizable=False)
    if (inputs := model.layer_inputs) is not None:
        total = model.num_hidden_layers * inputs.size
        prefix = model.names.layers.removesuffix("layers")
        yield Projection(f"{prefix}embed_tokens_per_layer", inputs.vocab_size, total, is_quantizable=False)
        yield Projection(f"{prefix}per_layer_model_projection", total, model.hidden_size)
    if stage.is_last and not is_tied:
        yield Projection(model.names.head, model.vocab_size, model.hidden_size)


def layer_projections(model: ModelConfig, index: int) -> Iterator[Projection]:
    """What the layer of this index multiplies by."""
    prefix, hidden = f"{model.names.layers}.{model.stage.first_layer + index}", model.hidden_size
    if model.has_mixer(index):
        yield from _mixer(model, index, prefix)
    if model.has_mlp(index):
        yield from _feed_forward(model, index, prefix)
    if model.layer_inputs is not None:
        yield Projection(f"{prefix}.per_layer_input_gate", model.layer_inputs.size, hidden)
        yield Projection(f"{prefix}.per_layer_projection", hidden, model.layer_inputs.size)


def _mixer(model: ModelConfig, index: int, prefix: str) -> Iterator[Projection]:
    """prefix: of the layer."""
    states, attention = model.state_layers, f"{prefix}.{model.names.attention}"
    if states is not None and states.layers[index]:
        yield from states.projections(f"{prefix}.{states.module}", model.hidden_size)
    if model.attends(index) and model.latent_attention is not None:
        yield from _latent_attention(model, model.latent_attention, attention)
    elif model.attends(index):
        yield from _attention(model.of_layer(index), attention)


def _feed_forward(model: ModelConfig, index: int, prefix: str) -> Iterator[Projection]:
    """prefix: of the layer."""
    hidden = model.hidden_size
    moe = model.moe if model.moe is not None and model.moe.sparse_layers[index] else None
    if moe is not None:
        parts = f"{prefix}.{name}" if (name := moe.names.mixture) else prefix
        yield from _mixture(moe, parts, hidden, is_gated=model.is_gated)
    if moe is None or moe.has_mlp_beside:
        names, inner = model.names.mlp, model.of_layer(index).intermediate_size
        parts = f"{prefix}.{names.module}"
        yield from _mlp(names, parts, hidden, inner, has_bias=model.mlp_bias, is_gated=model.is_gated)


def _attention(model: ModelConfig, prefix: str) -> Iterator[Projection]:
    queries, keys = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    gates = queries if model.has_output_gate else 0
    if model.has_head_gates:
        yield Projection(f"{prefix}.gate_proj", model.num_attention_heads, model.hidden_size)
    if model.has_fused_qkv:
        yield Projection(f"{prefix}.qkv_proj", queries + 2 * keys, model.hidden_size, model.qkv_bias)
    else:
        parts = (("q_proj", queries + gates), ("k_proj", keys), ("v_proj", keys))
        for name, size in parts[: model.num_qkv_parts]:
            yield Projection(f"{prefix}.{name}", size, model.hidden_size, model.qkv_bias)
    yield Projection(f"{prefix}.{model.names.attention_output}", model.hidden_size, queries, model.output_bias)


def _latent_attention(model: ModelConfig, latent: LatentAttentionConfig, prefix: str) -> Iterator[Projection]:
    hidden, heads, bias = model.hidden_size, model.num_attention_heads, model.qkv_bias
    if latent.query_rank is None:
        yield Projection(f"{prefix}.q_proj", heads * latent.query_dim, hidden)
    else:
        yield Projection(f"{prefix}.q_a_proj", latent.query_rank, hidden, bias)
        yield Projection(f"{prefix}.q_b_proj", heads * latent.query_dim, latent.query_rank)
    yield Projection(f"{prefix}.kv_a_proj_with_mqa", model.head_dim, hidden, bias)
    # Multiplied by in two parts, which takes plain numbers.
    expanded = heads * (latent.plain_dim + latent.value_dim)
    yield Projection(f"{prefix}.kv_b_proj", expanded, latent.rank, is_quantizable=False)
    yield Projection(f"{prefix}.{model.names.attention_output}", hidden, heads * latent.value_dim, model.output_bias)


def _num_other_state_weights(model: ModelConfig) -> tuple[int, int]:
    """Of layers with states, beside the matrices: those of the model's dtype, and those in float32."""
    states = model.state_layers
    if states is None:
        return 0, 0
    plain, wide = states.num_other_weights
    return sum(states.layers) * plain, sum(states.layers) * wide


def _mlp(
    names: MlpNames,
    prefix: str,
    hidden: int,
    inner: int,
    *,
    has_bias: bool = False,
    is_gated: bool = True,
    copies: int = 1,
) -> Iterator[Projection]:
    size = (2 if is_gated else 1) * inner // len(names.gate_up)
    for name in names.gate_up:
        yield Projection(f"{prefix}.{name}", size, hidden, has_bias, copies)
    yield Projection(f"{prefix}.{names.down}", hidden, inner, has_bias, copies)


def _mixture(moe: MoeConfig, prefix: str, hidden: int, *, is_gated: bool) -> Iterator[Projection]:
    names, inner, is_gpt_oss = moe.names, moe.intermediate_size, moe.naming == "gpt-oss"
    # What corrects the router's scores, or multiplies its shares, is as large as a bias.
    has_correction, is_wide = moe.has_correction and moe.stores_correction, moe.has_wide_router
    has_numbers = has_correction or is_gpt_oss or moe.naming == "gemma4"
    router = f"{prefix}.{names.router}"
    yield Projection(router, moe.num_experts, hidden, has_numbers, is_quantizable=False, is_wide=is_wide)
    if is_gpt_oss:
        gate_up, down = names.stacked
        stacked = MlpNames((gate_up,), down)
        yield from _mlp(stacked, prefix, hidden, inner, has_bias=True, copies=moe.num_experts)
    else:
        experts, outer = f"{prefix}.experts.0", moe.latent_size or hidden
        yield from _mlp(names.expert, experts, outer, inner, is_gated=is_gated, copies=moe.num_experts)
    if moe.latent_size is not None:
        into, out = names.latents
        yield Projection(f"{prefix}.{into}", moe.latent_size, hidden)
        yield Projection(f"{prefix}.{out}", hidden, moe.latent_size)
    if moe.shared_expert_intermediate_size is not None:
        shared, size = f"{prefix}.{names.shared}", moe.shared_expert_intermediate_size
        yield from _mlp(names.expert, shared, hidden, size, is_gated=is_gated)
        if moe.has_shared_gate:
            yield Projection(f"{prefix}.{names.shared}_gate", 1, hidden, is_quantizable=False)


def _num_norm_weights(model: ModelConfig) -> int:
    around = len(model.names.layer_norms)
    if model.falcon is not None:
        around = 2 if model.falcon.mlp_norm else 1
    # What its router reads is multiplied by as many numbers as a norm has.
    around += model.moe is not None and model.moe.naming == "gemma4"
    norms = model.num_hidden_layers * around + model.stage.is_last
    num_heads = model.num_attention_heads + model.num_key_value_heads if model.qk_norm == "all" else 2
    of_heads = sum(num_heads * heads.head_dim * len(layers) for heads, layers in model.kv_groups.items())
    # An activation that is learnt has a few numbers too.
    in_layer = 4 if model.activation == "xielu" else 0
    if (latent := model.latent_attention) is not None:
        in_layer += latent.rank + (latent.query_rank or 0)
    total = norms * model.hidden_size * (2 if model.norm_bias else 1) + model.num_hidden_layers * in_layer
    # Gemma 4's layers have a number for all of a layer, and where keys are others' a norm for queries alone.
    if model.decoder_layer == "gemma4":
        layers = [model.of_layer(index) for index in range(model.num_hidden_layers)]
        total += len(layers) + sum(layer.head_dim for layer in layers if layer.kv_source is not None)
    total += 0 if model.layer_inputs is None else model.layer_inputs.size
    return total + (of_heads if model.qk_norm else 0)


def _num_sinks(model: ModelConfig) -> int:
    return model.num_hidden_layers * model.num_attention_heads if model.has_sinks else 0


def _num_vision_weights(model: ModelConfig) -> int:
    return 0 if model.vision is None else num_vision_weights(model.vision)
