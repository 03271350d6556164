"""What a decoder is made of, with the families' differences resolved into plain fields. Free of torch."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple, Self

from .other_names import SAME_NAMES, OtherNames
from .quantization_schemes import QuantizationConfig
from .rope_config import RopeConfig
from .stage import WHOLE_MODEL, Stage
from .state_layers import StateLayersConfig
from .vision_config import VisionConfig


@dataclass(frozen=True)
class MlpNames:
    """What a checkpoint calls the parts of an MLP.

    `gate_up`: gate and up, or one name where they are one matrix, or where there is no gate.
    """

    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    down: str = "down_proj"
    module: str = "mlp"


@dataclass(frozen=True)
class MoeNames:
    """What a checkpoint calls a mixture, below its layer, and its parts.

    `expert`: the parts of each expert, where they are listed one by one; `stacked`: both projections of all of them,
    where each is one tensor; `latents`: what makes latents of tokens, and tokens of latents. `layout`: whether they are
    listed or stacked; "either" where quantisers, and some versions of transformers, list what is published stacked.
    `has_outputs_first`: of what is stacked outputs come before inputs, as in any matrix.
    """

    mixture: str = "mlp"
    expert: MlpNames = MlpNames()
    shared: str = "shared_expert"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    stacked: tuple[str, str] = ("experts.gate_up_proj", "experts.down_proj")
    latents: tuple[str, str] = ("fc1_latent_proj", "fc2_latent_proj")
    layout: Literal["listed", "stacked", "either"] = "listed"
    has_outputs_first: bool = False


_MIXTRAL = MoeNames("block_sparse_moe", MlpNames(("w1", "w3"), "w2"))
MoeNaming = Literal[
    "mixtral",
    "qwen",
    "qwen-stacked",
    "glm",
    "mistral4",
    "exaone",
    "hy3",
    "ernie",
    "minimax",
    "granite",
    "granite4",
    "hunyuan",
    "gpt-oss",
    "gemma4",
    "nemotron_h",
    "lfm2",
]
_MOE_NAMES: dict[MoeNaming, MoeNames] = {
    "mixtral": _MIXTRAL,
    "qwen": MoeNames(),
    "qwen-stacked": MoeNames(layout="either"),
    "glm": MoeNames(shared="shared_experts"),
    "mistral4": MoeNames(shared="shared_experts", layout="either", has_outputs_first=True),
    "exaone": MoeNames(shared="shared_experts", correction="e_score_correction_bias"),
    "hy3": MoeNames(shared="shared_mlp", router="router.gate", correction="expert_bias"),
    "ernie": MoeNames(shared="shared_experts", correction="moe_statics.e_score_correction_bias"),
    "minimax": replace(_MIXTRAL, correction="e_score_correction_bias"),
    "granite": MoeNames(
        "block_sparse_moe",
        router="router.layer",
        stacked=("input_linear.weight", "output_linear.weight"),
        layout="stacked",
        has_outputs_first=True,
    ),
    "hunyuan": MoeNames(shared="shared_mlp", router="gate.wg"),
    "gpt-oss": MoeNames(router="router", layout="stacked"),
    # Beside an MLP that all tokens have, and not around it.
    "granite4": MoeNames(
        "",
        MlpNames(("input_linear",), "output_linear"),
        shared="shared_mlp",
        router="block_sparse_moe.router.layer",
        stacked=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
        layout="stacked",
        has_outputs_first=True,
    ),
    "nemotron_h": MoeNames("mixer", MlpNames(("up_proj",)), shared="shared_experts"),
    # Beside an MLP, and not within it.
    "gemma4": MoeNames("", router="router.proj", layout="either", has_outputs_first=True),
    "lfm2": MoeNames("feed_forward", MlpNames(("w1", "w3"), "w2"), correction="expert_bias"),
}


@dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts: each token's MLP is the `num_experts_per_tok` that a router chooses.

    `norm_topk_prob`: the chosen experts' shares sum to one, which `routed_scaling_factor` multiplies.
    `shared_expert_intermediate_size`: one more expert that every token has, weighed by a gate of its own where
    `has_shared_gate`. `sparse_layers`: one entry a layer, false where it has an ordinary MLP. `naming`: whose names the
    checkpoint's tensors have. `has_correction`: scores are sigmoids, to which something is added where experts are
    chosen, or, where they are not `are_sigmoids`, probabilities; without `stores_correction` it is nothing, and groups
    are weighed as if there were one. `num_groups`, `num_chosen_groups`: see `ExpertGroups` of `headrace.kernels.moe`.
    `has_wide_router`: who is chosen is computed in float32, whatever the weights have. `shared_scaling_factor`: what
    multiplies the output of the expert that all have. `has_mlp_beside`: layers with experts have an ordinary MLP too.
    `latent_size`: experts are given so many numbers that one matrix makes of a token, and of what they give another
    makes the token's; None: the token.
    """

    num_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    norm_topk_prob: bool
    sparse_layers: tuple[bool, ...]
    naming: MoeNaming
    shared_expert_intermediate_size: int | None = None
    has_shared_gate: bool = True
    has_correction: bool = False
    stores_correction: bool = True
    are_sigmoids: bool = True
    routed_scaling_factor: float = 1.0
    shared_scaling_factor: float = 1.0
    num_groups: int = 1
    num_chosen_groups: int = 1
    has_wide_router: bool = False
    has_mlp_beside: bool = False
    latent_size: int | None = None

    @property
    def names(self) -> MoeNames:
        return _MOE_NAMES[self.naming]


@dataclass(frozen=True)
class FalconConfig:
    """How a Falcon's layer is built: `is_parallel` where attention and MLP have the same input, not one the other's.

    `attention_norm`, `mlp_norm`: what a checkpoint calls the norms; None: the MLP has attention's.
    """

    is_parallel: bool
    attention_norm: str
    mlp_norm: str | None


@dataclass(frozen=True)
class GptOssConfig:
    """How an expert of gpt-oss gates: (up + 1) · gate · sigmoid(alpha · gate), of both cut off at `limit`."""

    limit: float
    alpha: float


@dataclass(frozen=True)
class FalconH1Config:
    """Each layer attends and has a state, side by side. What its parts' outputs are multiplied by."""

    attention_out_scale: float
    state_out_scale: float
    mlp_out_scale: float


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention: a token's keys and values are made of one latent of `rank` numbers.

    A head's query and key have `plain_dim` numbers without a position and `rotary_dim` that are rotated, of the key the
    same for all heads; its value has `value_dim`. `query_rank`: queries too are made of a latent, of so many numbers.
    """

    rank: int
    query_rank: int | None
    plain_dim: int
    rotary_dim: int
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Of a head."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True)
class LayerSizes:
    """What a layer has of its own, of a model whose layers are not all alike: see the fields of `ModelShape`."""

    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    keys_are_values: bool = False
    kv_source: int | None = None


@dataclass(frozen=True)
class LayerInputsConfig:
    """Beside the residual stream each layer has an input of its own for a token, of `size` numbers.

    `vocab_size`: for how many tokens there are embeddings for it.
    """

    size: int
    vocab_size: int


class KVHeads(NamedTuple):
    """What a token has in a layer's cache: so many heads of so many numbers, as a key and as a value."""

    number: int
    head_dim: int


@dataclass(frozen=True)
class QueryGrowth:
    """Queries grow with the position: times 1 + beta · ln(1 + ⌊position / period⌋) (as in Llama 4)."""

    beta: float
    period: int


@dataclass(frozen=True)
class DecoderNames:
    """What a checkpoint calls the parts of a decoder; the last three are below `attention`.

    `layer_norms`: a layer's, in the order in which they come.
    """

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    layer_norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    mlp: MlpNames = MlpNames()
    attention: str = "self_attn"
    query_norm: str = "q_norm"
    key_norm: str = "k_norm"
    attention_output: str = "o_proj"


@dataclass(frozen=True)
class ModelShape:
    """A decoder's shape.

    `decoder_layer` says how a layer's norms stand, as the families do that had it first; the fields from `qkv_bias`
    on are what families add to a plain Llama. `num_key_value_heads` and `head_dim` are those of the keys in the cache:
    with `latent_attention` it is one, a latent with the rotated key behind it. Where layers differ, `layers` has their
    sizes, one entry a layer; see `of_layer`.
    """

    path: Path
    decoder_layer: Literal[
        "llama", "gemma", "gemma4", "falcon", "olmo", "olmo_hybrid", "parallel", "gpt-oss", "nemotron_h", "falcon_h1"
    ]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    # What attention scores are multiplied by.
    attention_scale: float
    # One entry a layer: how its positions are rotated, and how many of the latest tokens it attends to (None: all).
    ropes: tuple[RopeConfig, ...]
    sliding_windows: tuple[int | None, ...]
    # How many of each head's dimensions are rotated; the others carry no position.
    rotary_dim: int
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    # Whether queries and keys have norms: of each head, before it is rotated or after that, or of all heads together.
    qk_norm: Literal["heads", "rotated", "all"] | None = None
    activation: Literal["silu", "gelu_tanh", "gelu", "relu2", "xielu"] = "silu"
    # What an MLP has activated is multiplied by what a second matrix makes of the same.
    is_gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    # The checkpoint has q, k, v as one matrix.
    has_fused_qkv: bool = False
    # Turned against each other are a head's neighbours, first and second, third and fourth, not its two halves.
    has_rotary_pairs: bool = False
    # A score or logit x becomes cap · tanh(x / cap).
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    # What a layer adds to the residual stream is multiplied by one, logits are divided by the other.
    residual_scale: float = 1.0
    logits_scaling: float = 1.0
    # What keys are multiplied by before they are rotated, and an MLP's gates before they are activated.
    key_scale: float = 1.0
    gate_scale: float = 1.0
    # What is added to the weights of norms.
    norm_offset: float = 0.0
    query_growth: QueryGrowth | None = None
    # Values are what keys are made of, before these are normed and rotated.
    keys_are_values: bool = False
    # The layer whose keys and values this one attends to, having none; None: it has its own.
    kv_source: int | None = None
    layer_inputs: LayerInputsConfig | None = None
    # What attention gives is multiplied by the sigmoid of what a second part of the queries' matrix makes of its input.
    has_output_gate: bool = False
    # The same with a number a head, of a matrix of its own.
    has_head_gates: bool = False
    # Each head has a score beside those of the keys, of nothing.
    has_sinks: bool = False
    # Layers that have a state in the place of keys and values, or beside them.
    state_layers: StateLayersConfig | None = None
    # One entry a layer, true where it is an MLP and nothing else, of models whose other layers have none.
    feed_forward_layers: tuple[bool, ...] = ()
    latent_attention: LatentAttentionConfig | None = None
    moe: MoeConfig | None = None
    falcon: FalconConfig | None = None
    gpt_oss: GptOssConfig | None = None
    falcon_h1: FalconH1Config | None = None
    names: DecoderNames = DecoderNames()
    # What tensors' names begin with that are not read: of a model that reads images too, what it sees them with.
    unread_parts: tuple[str, ...] = ()
    # What tensors, and modules in lists of them, are called in some files.
    other_names: OtherNames = SAME_NAMES
    # Of a model that reads images: its eyes, and by which axis each of a head's frequencies turns: by time (0), height
    # (1) or width (2).
    vision: VisionConfig | None = None
    mrope_axes: tuple[int, ...] = ()
    # Which of the checkpoint's weights are quantised, and how.
    quantization: QuantizationConfig | None = None
    layers: tuple[LayerSizes, ...] = ()
    # Which of the layers these are, where other processes have the others.
    stage: Stage = WHOLE_MODEL

    def has_state(self, index: int) -> bool:
        """Whether that layer has a state, in the place of keys and values or beside them."""
        return self.state_layers is not None and self.state_layers.layers[index]

    def attends(self, index: int) -> bool:
        """Whether that layer has attention, alone or beside a state."""
        return self.has_mixer(index) and (self.falcon_h1 is not None or not self.has_state(index))

    def has_mixer(self, index: int) -> bool:
        """Whether that layer attends, or has a state."""
        return not self.feed_forward_layers or not self.feed_forward_layers[index]

    def has_mlp(self, index: int) -> bool:
        return not self.feed_forward_layers or self.feed_forward_layers[index]

    @property
    def num_kv_rows(self) -> int:
        """How many rows of heads a token has in a layer's cache: a latent is key and value in one."""
        return 2 if self.latent_attention is None else 1

    @property
    def value_dim(self) -> int:
        """How many numbers of a row of the cache a head's values have: all of them, or the latent's."""
        return self.head_dim if self.latent_attention is None else self.latent_attention.rank

    def of_layer(self, index: int) -> Self:
        """A model all of whose layers have this one's sizes; where layers differ, their heads are rotated whole."""
        if not self.layers:
            return self
        sizes = self.layers[index]
        return replace(self, layers=(), rotary_dim=sizes.head_dim, **vars(sizes))

    @property
    def num_qkv_parts(self) -> int:
        """How many projections are made of a layer's input: of queries, mostly of keys, and mostly of values."""
        return 1 if self.kv_source is not None else 2 if self.keys_are_values else 3

    @property
    def kv_places(self) -> list[tuple[int, int] | None]:
        """Where each layer's keys and values are: in which group's caches, and in which of these; None: nowhere."""
        places = {
            layer: (group, index)
            for group, layers in enumerate(self.kv_groups.values())
            for index, layer in enumerate(layers)
        }
        sources = [self.of_layer(layer).kv_source for layer in range(self.num_hidden_layers)]
        return [places.get(layer if source is None else source) for layer, source in enumerate(sources)]

    @property
    def kv_groups(self) -> dict[KVHeads, list[int]]:
        """The layers that have keys and values of their own, by what a token has in their caches."""
        groups: dict[KVHeads, list[int]] = {}
        for index in range(self.num_hidden_layers):
            layer = self.of_layer(index)
            if layer.kv_source is None and self.attends(index):
                groups.setdefault(KVHeads(layer.num_key_value_heads, layer.head_dim), []).append(index)
        return groups
