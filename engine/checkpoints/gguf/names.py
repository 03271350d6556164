"""GGUF's tensors under the names that Hugging Face checkpoints have for them. Free of torch."""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..scalars import few, whole
from . import gated_delta_net
from .file import GgufModel, TensorInfo
from .gated_delta_net import GatedDeltaNetTensors
from .mamba import MODULE_OF, is_of_mamba, mamba_tensor
from .sources import Source, in_halves

if TYPE_CHECKING:
    from torch import Tensor

_LAYER = re.compile(r"blk\.(?P<index>\d+)\.(?P<module>[\w.]+?)(\.(?P<kind>weight|bias))?")
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
_QWEN_NEXT = {**_MODULES, "post_attention_norm": "post_attention_layernorm"}
# Names with a kind are those of tensors that have none in a checkpoint, or another.
_LFM2 = {
    **_MODULES,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.{}.w1",
    "ffn_up_exps": "feed_forward.experts.{}.w3",
    "ffn_down_exps": "feed_forward.experts.{}.w2",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
}
_NEMOTRON_H = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_up_exps": "mixer.experts.{}.up_proj",
    "ffn_down_exps": "mixer.experts.{}.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
}
_FALCON_H1 = {
    **_MODULES,
    "ffn_norm": "pre_ff_layernorm",
    "ffn_gate": "feed_forward.gate_proj",
    "ffn_up": "feed_forward.up_proj",
    "ffn_down": "feed_forward.down_proj",
}
# Some files have two projections as one tensor, the outputs of one before the other's.
_HALVES = {"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
_MODULES_OF = {
    "falcon-h1": _FALCON_H1,
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "llama": _MIXTRAL,
    "olmo2": _OLMO,
    "phi3": {**_MODULES, "ffn_up": "mlp.gate_up_proj"},
    **dict.fromkeys(gated_delta_net.ARCHITECTURES, _QWEN_NEXT),
    **dict.fromkeys(("lfm2", "lfm2moe"), _LFM2),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_H),
}
_LFM2_ENDS = {**_ENDS, "token_embd_norm": "model.embedding_norm"}
_NEMOTRON_ENDS = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}
_ENDS_OF = {
    "falcon-h1": {**_ENDS, "output_norm": "model.final_layernorm"},
    **dict.fromkeys(("lfm2", "lfm2moe"), _LFM2_ENDS),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _NEMOTRON_ENDS),
}
# Those whose queries and keys are rotated as Llama's were at first, neighbour by neighbour.
_INTERLEAVED = ("llama", "granite", "granitemoe", "granitehybrid", "nemotron_h", "nemotron_h_moe", "smollm3")
# Read with the metadata: what positions' frequencies are divided by.
ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")


def checkpoint_tensors(model: GgufModel) -> dict[str, Source]:
    """Every tensor by the name that it would have in a checkpoint, or its own where that is not known.

    Raises `KeyError` naming a field of the metadata that is missing.
    """
    naming = _Naming(model.metadata)
    return {name: source for info in model.tensors.values() for name, source in naming.named(info)}


class _Naming:
    """How one model's tensors are called."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        self._metadata = metadata
        self._architecture = str(metadata.get("general.architecture"))
        self._modules = _MODULES_OF.get(self._architecture, _MODULES)
        self._ends = _ENDS_OF.get(self._architecture, _ENDS)
        self._layers = "backbone.layers" if self._ends is _NEMOTRON_ENDS else "model.layers"
        self._mamba = MODULE_OF.get(self._architecture)
        has_states = self._architecture in gated_delta_net.ARCHITECTURES
        self._states = GatedDeltaNetTensors.of(metadata, self._architecture) if has_states else None
        # Norms that add one to their weights: there it is added already.
        self._has_raised_norms = has_states or self._architecture.startswith("gemma")

    def named(self, info: TensorInfo) -> Iterator[tuple[str, Source]]:
        module, _, kind = info.name.rpartition(".")
        source = Source(info, restored=_lowered if self._has_raised_norms and module.endswith("norm") else None)
        match = _LAYER.fullmatch(info.name)
        if module in self._ends:
            yield f"{self._ends[module]}.{kind}", source
        elif match is not None:
            # One of Falcon-H1's norms has no kind.
            yield from self._of_layer(int(match["index"]), match["module"], match["kind"] or "weight", source)
        elif info.name not in ROPE_FACTORS:
            yield info.name, source

    def _of_layer(self, index: int, module: str, kind: str, source: Source) -> Iterator[tuple[str, Source]]:
        if index >= num_layers(self._metadata, self._architecture):
            return
        layer = f"{self._layers}.{index}."
        if self._states is not None and gated_delta_net.is_of_gated_delta_net(module):
            for name, part in self._states.named(module, replace(source, restored=None)):
                yield layer + name, part
            return
        if self._mamba is not None and is_of_mamba(module):
            name, part = mamba_tensor(module, kind, source)
            yield f"{layer}{self._mamba}.{name}", part
            return
        if module in _HALVES:
            for half, rows in zip(_HALVES[module], np.arange(source.info.shape[-2]).reshape(2, -1), strict=True):
                yield from self._of_layer(index, half, kind, replace(source, rows=rows))
            return
        if f"{module}.{kind}" in self._modules:
            yield layer + self._modules[f"{module}.{kind}"], source
            return
        if module not in self._modules:
            yield source.info.name, source
            return
        name = f"{layer}{self._modules[module]}.{kind}"
        if "{}" in name:
            for expert in range(source.info.shape[0]):
                yield name.format(expert), replace(source, expert=expert)
        elif module == "ffn_gate_inp_shexp":
            # Of one output, which some files leave out of its shape.
            yield name, replace(source, restored=lambda numbers: numbers.view(1, -1))
        elif module == "shortconv.conv" and kind == "weight":
            yield name, replace(source, restored=lambda numbers: numbers.unsqueeze(1))
        elif self._architecture in _INTERLEAVED and module in ("attn_q", "attn_k"):
            yield name, replace(source, rows=in_halves(source.info.shape[0], self._num_heads(module)))
        else:
            yield name, source

    def _num_heads(self, module: str) -> int:
        heads = self._metadata[f"{self._architecture}.attention.head_count"]
        if module == "attn_k":
            heads = self._metadata.get(f"{self._architecture}.attention.head_count_kv", heads)
        # Layers that do not attend are given as 0.
        return int(max(heads) if isinstance(heads, list) else heads)


def num_layers(metadata: dict[str, Any], architecture: str) -> int:
    """Without those that guess tokens ahead, which stand behind the others. Raises `KeyError` and `ModelError`."""
    all_layers = few(metadata, f"{architecture}.block_count")
    return all_layers - whole(metadata, f"{architecture}.nextn_predict_layers", 0)


def _lowered(numbers: "Tensor") -> "Tensor":
    return numbers - 1.0
