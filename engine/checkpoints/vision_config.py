"""What a model's eyes are: the vision tower's shape, and how images are made ready for it. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import ModelError, shown
from .model_folder import Raw, at_fault, read_json_object
from .scalars import Section, numbers, whole_or_none

# Of the images that OpenAI's CLIP was trained with, by which many were published.
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True)
class VisionNames:
    """What a checkpoint calls a tower, and below it its blocks, their parts, and the norm and matrices of a merger.

    `norms`: those before attention and MLP, or, where there are more, those before and behind each. `qkv`: one name
    where queries, keys and values are one matrix. `mlp`: gate, up and down, or in and out where nothing gates;
    `mlp_module`: what they are below.
    """

    tower: str = "visual"
    patches: str = "patch_embed.proj"
    blocks: str = "blocks"
    norms: tuple[str, ...] = ("norm1", "norm2")
    qkv: tuple[str, ...] = ("attn.qkv",)
    output: str = "attn.proj"
    mlp_module: str = "mlp"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    merger: tuple[str, str, str] = ("ln_q", "mlp.0", "mlp.2")
    positions: str = "pos_embed"
    projector: str = "multi_modal_projector"


@dataclass(frozen=True)
class RowEnds:
    """The tokens that stand behind each row of an image's: of the last row another. `folder`: whose tokenizer has them.

    Positions in a prompt count tokens then, as without images.
    """

    folder: Path
    row: str
    image: str


@dataclass(frozen=True)
class ImageFrame:
    """The tokens around an image's, `start` and `end`. Positions in a prompt count tokens then, as without images.

    `newlines`: two newlines stand around these, in whose place `start` alone comes; this folder's tokenizer has as many
    as there are side by side as one token.
    """

    start: int
    end: int
    newlines: Path | None = None


@dataclass(frozen=True)
class ProjectorConfig:
    """What makes an image's tokens of Mistral's tower: a norm, a merger, and two matrices."""

    norm_eps: float
    has_biases: bool


@dataclass(frozen=True)
class PoolConfig:
    """What makes an image's tokens of Gemma 3's tower: the mean of their patches, a norm, and a matrix."""

    norm_eps: float


@dataclass(frozen=True)
class ScaledPoolConfig:
    """The same of Gemma 4's, where the mean is multiplied by the root of its size, and the norm has no weights.

    `is_standardized`: before the norm something is taken off each number, and what is left is multiplied.
    """

    is_standardized: bool


@dataclass(frozen=True)
class VisionConfig:
    """A tower of patches of `patch_size` pixels, of which `spatial_merge_size` squared become a token.

    Images are resized to between `min_pixels` and `max_pixels`, to `longest_edge` at most where that is given, or to a
    square of `image_side`, then brought to (x / 255 - `image_mean`) / `image_std`. `image_token_id` stands in a prompt
    for each token of an image. The fields from `activation` on are where families differ.
    """

    image_token_id: int
    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    num_channels: int
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    activation: Literal["silu", "gelu", "gelu_tanh", "quick_gelu"] = "silu"
    longest_edge: int | None = None
    image_side: int | None = None
    # All images are scaled to about `max_pixels`.
    fills_pixels: bool = False
    resampling: Literal["bicubic", "bilinear"] = "bicubic"
    row_ends: RowEnds | None = None
    frame: ImageFrame | None = None
    # The decoder's layers that let an image's tokens see all of it, not those before them alone.
    two_way_layers: Literal["all", "windows"] | None = None
    # The token whose inputs an image's tokens have in a decoder whose layers have inputs of their own.
    layer_input_token_id: int = 0
    # Layers attend within windows of so many pixels, but for some; None: all attend to the whole image.
    window_size: int | None = None
    full_attention_layers: frozenset[int] = frozenset()
    # Norms take a mean off and have biases, and so have the patches.
    has_layer_norms: bool = False
    has_patch_biases: bool = False
    norm_eps: float = 1e-6
    # Attention's and MLPs' matrices have biases.
    has_biases: bool = True
    # Inputs and outputs of the blocks' matrices are kept within limits that the checkpoint has.
    has_limits: bool = False
    # A patch's channels come last.
    has_channels_last: bool = False
    # Heads of queries and keys have norms, those of values too, without weights; nothing scales scores then.
    has_head_norms: bool = False
    # Patches have a norm before the first block, or behind the last one.
    has_patch_norm: bool = False
    has_final_norm: bool = False
    # None: nothing is rotated.
    rope_theta: float | None = 1e4
    # Frequencies turn by rows and columns in turns, not each by both.
    has_frequencies_in_turns: bool = False
    # Columns turn a head's first half, and rows its second, each half by itself.
    has_axes_apart: bool = False
    # None: a merger makes tokens.
    projector: ProjectorConfig | PoolConfig | ScaledPoolConfig | None = None
    # Patches' positions are learned as well, for a square with so many a side, or for so many columns and rows.
    position_side: int | None = None
    num_axis_positions: int | None = None
    # What comes out of these layers is merged too, and added to what comes out of as many of the decoder's first ones.
    deepstack_layers: tuple[int, ...] = ()
    names: VisionNames = VisionNames()

    @property
    def factor(self) -> int:
        """How many pixels a token's side has."""
        return self.patch_size * self.spatial_merge_size

    @property
    def patch_values(self) -> int:
        """How many numbers a patch is."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """How many numbers the patches of a token are."""
        return self.hidden_size * self.spatial_merge_size**2

    @property
    def place_token_id(self) -> int:
        """The token of a prompt that an image's tokens are to be put in the place of."""
        return self.frame.start if self.frame is not None and self.frame.newlines is not None else self.image_token_id

    @property
    def is_two_way(self) -> bool:
        """Whether an image's tokens see each other in both directions, in some layers at least."""
        return self.two_way_layers is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether positions in a prompt are as without images; else an image's follow its rows and columns."""
        return self.row_ends is not None or self.frame is not None

    @property
    def max_tokens(self) -> int:
        """How many an image has at most."""
        return self.max_pixels // self.factor**2

    @property
    def max_uncut_tokens(self) -> int:
        """How many of an image's tokens have to be computed in one step, at most."""
        return self.max_tokens if self.is_two_way else 1

    @property
    def num_levels(self) -> int:
        """How many vectors an image's token is: one in place of its embedding, and those of `deepstack_layers`."""
        return 1 + len(self.deepstack_layers)

    def check(self, folder: Path) -> None:
        """Raises `ModelError` for sizes that contradict each other, of which each was checked when it was read."""
        unit = 1 if self.rope_theta is None else 4
        if self.hidden_size % (unit * self.num_heads):
            times = "" if unit == 1 else f"{unit} times "
            raise ModelError(
                f"vision_config.hidden_size {self.hidden_size} must be a multiple of {times}num_heads {self.num_heads}"
            )
        if self.window_size is not None and self.window_size < self.factor:
            raise ModelError(
                f"vision_config.window_size {self.window_size} is less than a token's {self.factor} pixels"
            )
        layers = list(self.deepstack_layers)
        if layers != sorted(set(layers) & set(range(self.depth))):
            raise ModelError(
                f"vision_config.deepstack_visual_indexes {layers} must be in ascending order, and some of its "
                f"{self.depth} layers"
            )
        with at_fault(image_file(folder)):
            self._check_images()

    def _check_images(self) -> None:
        if not self.factor**2 <= self.min_pixels <= self.max_pixels:
            raise ModelError(
                f"min_pixels {self.min_pixels} and max_pixels {self.max_pixels} must be in this order, from "
                f"{self.factor**2} on"
            )
        if len(self.image_mean) != self.num_channels or len(self.image_std) != self.num_channels:
            raise ModelError(f"image_mean and image_std must have {self.num_channels} numbers each")


@dataclass(frozen=True)
class ImageScale:
    """How images are made ready, as `VisionConfig` has it: what a family was published with, for folders without."""

    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]


def read_scale(folder: Path, published: ImageScale) -> ImageScale:
    """What the folder says of images, in the file of its own or in the one for all kinds of input."""
    with at_fault(image_file(folder)):
        images = image_processor(folder)
        if not isinstance(size := images.get("size") or {}, Mapping):
            raise ModelError(f"size must be a JSON object, not {shown(size)}")
        return ImageScale(
            min_pixels=_pixels(images, "min_pixels", size, "shortest_edge") or published.min_pixels,
            max_pixels=_pixels(images, "max_pixels", size, "longest_edge") or published.max_pixels,
            image_mean=numbers(images, "image_mean", published.image_mean),
            image_std=numbers(images, "image_std", published.image_std),
        )


def _pixels(images: Raw, name: str, size: Mapping[str, Any], edge: str) -> int | None:
    return whole_or_none(images, name) or whole_or_none(size, edge, within="size.")


def tower_of(raw: Raw) -> Section:
    """What a `config.json` says of the tower."""
    return Section(raw["vision_config"], "vision_config.")


def image_file(folder: Path) -> Path:
    """The file that says how images are made ready; where there is none, what they follow from."""
    files = [folder / name for name in ("preprocessor_config.json", "processor_config.json", "config.json")]
    return next((file for file in files if file.is_file()), files[-1])


def image_processor(folder: Path) -> Raw:
    """What that file says of them, without nulls; nothing where there is none. Raises `ModelError`."""
    file = image_file(folder)
    if file.name == "config.json":
        return {}
    content = read_json_object(file)
    images = content if file.name == "preprocessor_config.json" else content.get("image_processor") or {}
    if not isinstance(images, dict):
        raise ModelError(f"image_processor must be a JSON object, not {shown(images)}")
    return {name: value for name, value in images.items() if value}
