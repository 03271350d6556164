"""GGUF's tensors under the names that Hugging Face checkpoints have for them. Free of torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .file import GgufModel, TensorInfo

_LAYER = re.compile(r"blk\.(?P<index>\d+)\.(?P<module>\w+)\.(?P<kind>weight|bias)")
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_GEMMA = {
    **_MODULES,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTRAL = {
    **_MODULES,
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_OLMO = {
    **_MODULES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MODULES_OF = {
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "llama": _MIXTRAL,
    "olmo2": _OLMO,
    "phi3": {**_MODULES, "ffn_up": "mlp.gate_up_proj"},
}
# Those whose queries and keys are rotated as Llama's were at first, neighbour by neighbour.
_INTERLEAVED = ("llama", "granite", "smollm3")
# Read with the metadata: what positions' frequencies are divided by.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


@dataclass(frozen=True)
class Source:
    """What of a GGUF tensor is a checkpoint's tensor, and what was done to it.

    `expert`: the first index, where one tensor has all experts. `interleaved_heads`: so many heads have their rows in
    the order in which neighbours are rotated, instead of halves. `offset`: what was added to it.
    """

    info: TensorInfo
    expert: int | None = None
    interleaved_heads: int | None = None
    offset: float = 0.0


def checkpoint_tensors(model: GgufModel) -> dict[str, Source]:
    """Every tensor by the name that it would have in a checkpoint, or its own where that is not known."""
    return {name: source for info in model.tensors.values() for name, source in _named(model, info)}


def _named(model: GgufModel, info: TensorInfo) -> Iterator[tuple[str, Source]]:
    architecture = str(model.metadata.get("general.architecture"))
    module, _, kind = info.name.rpartition(".")
    # Gemma's norms are stored with the one that is added to them.
    is_raised = architecture.startswith("gemma") and module.endswith("norm")
    source = Source(info, offset=1.0 if is_raised else 0.0)
    if info.name in ROPE_FACTORS:
        return
    if module in _ENDS:
        yield f"{_ENDS[module]}.{kind}", source
        return
    match = _LAYER.fullmatch(info.name)
    modules = _MODULES_OF.get(architecture, _MODULES)
    if match is None or match["module"] not in modules:
        yield info.name, source
        return
    name = f"model.layers.{match['index']}.{modules[match['module']]}.{kind}"
    if "{}" in name:
        for expert in range(info.shape[0]):
            yield name.format(expert), replace(source, expert=expert)
    elif architecture in _INTERLEAVED and match["module"] in ("attn_q", "attn_k"):
        yield name, replace(source, interleaved_heads=_num_heads(model, architecture, match["module"]))
    else:
        yield name, source


def _num_heads(model: GgufModel, architecture: str, module: str) -> int:
    heads = model.metadata[f"{architecture}.attention.head_count"]
    return int(heads if module == "attn_q" else model.metadata.get(f"{architecture}.attention.head_count_kv", heads))
