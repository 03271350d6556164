"""Tiny models that read images, with random weights, as transformers writes them, and what transformers answers."""

from collections.abc import Sequence
from functools import cached_property
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.vision_config import VisionConfig
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.vision.image_size import Grid
from headrace.engine.vision.prompt_images import PromptImage

IMAGE, VISION_START, VISION_END, END = "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_end|>"
IMAGE_TOKEN, VISION_START_TOKEN, VISION_END_TOKEN, END_TOKEN = range(256, 260)
# By Mistral's names, in the same places.
MISTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]", "</s>")
ROW_END_TOKEN, IMAGE_END_TOKEN = 257, 258
# By Gemma's, and newlines, each of which is one token as long as it is.
GEMMA_TOKENS = ("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<end_of_turn>")
NEWLINES = ("\n", "\n\n", "\n\n\n")
VOCAB_SIZE = 272
NUM_NEW_TOKENS = 20
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>{% endfor %}assistant:"
)


_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    "bos_token_id": None,
    "eos_token_id": END_TOKEN,
}
_TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_heads": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.3,
}
_TOKENS: dict[str, Any] = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": VOCAB_SIZE - 1,
    "vision_start_token_id": VISION_START_TOKEN,
    "vision_end_token_id": VISION_END_TOKEN,
}


def save_seeing_model(folder: Path) -> Any:
    """A Qwen2.5-VL with full attention and windows both."""
    windows = {"window_size": 112, "fullatt_block_indexes": [1]}
    config = Qwen2_5_VLConfig(
        text_config={**_TEXT, "num_hidden_layers": 2}, vision_config={**_TOWER, **windows}, **_TOKENS
    )
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 48})
    return _saved(folder, Qwen2_5_VLForConditionalGeneration(_seeded(config)), processor)


def save_qwen2_vl(folder: Path) -> Any:
    shape = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 3, "initializer_range": 0.3}
    config = Qwen2VLConfig(text_config={**_TEXT, "num_hidden_layers": 2}, vision_config=shape, **_TOKENS)
    processor = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 48})
    return _saved(folder, Qwen2VLForConditionalGeneration(_seeded(config)), processor)


def save_qwen3_vl(folder: Path, **text: Any) -> Any:
    """A Qwen3-VL with positions for five patches a side: fewer than some images have, and more than others.

    `text`: further fields of its decoder; one with experts is a mixture.
    """
    kinds: tuple[Any, Any] = (Qwen3VLConfig, Qwen3VLForConditionalGeneration)
    if "num_experts" in text:
        kinds = (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration)
    learned = {"num_position_embeddings": 25, "deepstack_visual_indexes": [0, 2]}
    config = kinds[0](
        text_config={**_TEXT, "num_hidden_layers": 3, "head_dim": 16, **text},
        vision_config={**_TOWER, **learned},
        **_TOKENS,
    )
    size = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 48}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return _saved(folder, kinds[1](_seeded(config)), processor)


def save_qwen3_5(folder: Path, **text: Any) -> Any:
    """A Qwen3.5 of whose decoder's layers all but the last have a state. `text`: as of `save_qwen3_vl`."""
    kinds: tuple[Any, Any] = (Qwen3_5Config, Qwen3_5ForConditionalGeneration)
    if "num_experts" in text:
        kinds = (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration)
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    dims = {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 24}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    config = kinds[0](
        text_config={**_TEXT, "num_hidden_layers": 4, **heads, **dims, "rope_parameters": rope, **text},
        vision_config={**_TOWER, "num_position_embeddings": 25},
        **_TOKENS,
    )
    size = {"shortest_edge": 64 * 64, "longest_edge": 32 * 32 * 48}
    processor = Qwen2VLImageProcessorPil(size=size, patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return _saved(folder, kinds[1](_seeded(config)), processor)


def save_mistral3(folder: Path, **text: Any) -> Any:
    """A Mistral Small that reads images. `text`: as of `save_qwen3_vl`."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 44, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = Mistral3Config(
        text_config={
            **_TEXT,
            "model_type": "mistral",
            "num_hidden_layers": 2,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": rope,
            **text,
        },
        vision_config={"model_type": "pixtral", **shape, "patch_size": 14, "image_size": 280, "hidden_act": "silu"},
        image_token_index=IMAGE_TOKEN,
        spatial_merge_size=2,
        multimodal_projector_bias=True,
        tie_word_embeddings=False,
    )
    model = Mistral3ForConditionalGeneration(_seeded(config))
    _saved(folder, model, PixtralImageProcessorPil(size={"longest_edge": 170}, patch_size=14))
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "[IMG]").replace(END, "</s>")
    tokenizer(MISTRAL_TOKENS, template).save_pretrained(folder)
    return model


def save_gemma3(folder: Path, **text: Any) -> Any:
    """A Gemma 3 whose images are 16 tokens, more than its window. `text`: as of `save_qwen3_vl`."""
    shape = {"num_hidden_layers": 2, "hidden_size": 36, "intermediate_size": 44, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config={
            **{name: value for name, value in _TEXT.items() if name != "rope_parameters"},
            "num_hidden_layers": 3,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            **text,
        },
        vision_config={**shape, "image_size": 112, "patch_size": 14, "vision_use_head": False},
        mm_tokens_per_image=16,
        image_token_index=IMAGE_TOKEN,
        boi_token_index=IMAGE_TOKEN + 1,
        eoi_token_index=IMAGE_TOKEN + 2,
        eos_token_id=END_TOKEN,
    )
    model = Gemma3ForConditionalGeneration(_seeded(config))
    with torch.no_grad():
        # Zeros until it is trained.
        model.model.multi_modal_projector.mm_input_projection_weight.normal_(std=0.5)
        # Against the head's being the embedding: it would say what it has read.
        for layer in model.model.language_model.layers:
            layer.post_attention_layernorm.weight.fill_(12.0)
            layer.post_feedforward_layernorm.weight.fill_(12.0)
    _saved(folder, model, Gemma3ImageProcessorPil(size={"height": 112, "width": 112}))
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>")
    fast = tokenizer(GEMMA_TOKENS, template.replace(END, "<end_of_turn>"))
    fast.add_tokens([AddedToken(each, normalized=False) for each in NEWLINES])
    fast.save_pretrained(folder)
    return model


def save_gemma4(folder: Path, tower: dict[str, Any], **text: Any) -> Any:
    """A Gemma 4 whose images are up to 70 tokens of 12x12 pixels. `text`, `tower`: further fields of both."""
    shape = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 44}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    config = Gemma4Config(
        text_config={
            **{name: value for name, value in _TEXT.items() if name != "rope_parameters"},
            "num_hidden_layers": 4,
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "pad_token_id": 3,
            **text,
        },
        vision_config={**shape, **heads, "patch_size": 4, "position_embedding_size": 210, **tower},
        image_token_id=IMAGE_TOKEN,
        boi_token_id=IMAGE_TOKEN + 1,
        eoi_token_id=IMAGE_TOKEN + 2,
        eos_token_id=END_TOKEN,
        tie_word_embeddings=False,
    )
    model = Gemma4ForConditionalGeneration(_seeded(config))
    with torch.no_grad():
        for name, limit in model.model.vision_tower.named_buffers():
            if name.endswith(("_min", "_max")):
                limit.fill_((1 if name.endswith("max") else -1) * (1 + torch.rand(()).item()))
            elif name in ("std_bias", "std_scale"):
                limit.copy_(1 + torch.rand_like(limit))
    processor = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)
    _saved(folder, model, processor)
    template = CHAT_TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "<|image|>")
    names = ("<|image|>", "<|image>", "<image|>", "<turn|>")
    tokenizer(names, template.replace(END, "<turn|>")).save_pretrained(folder)
    return model


def _seeded(config: Any) -> Any:
    torch.manual_seed(1)
    return config


def _saved(folder: Path, model: Any, processor: Any) -> Any:
    """Its decoder's layers wander, so that a wrong position shows in the tokens."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.eval().save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model


def tokenizer(
    special: Sequence[str] = (IMAGE, VISION_START, VISION_END, END), chat_template: str = CHAT_TEMPLATE
) -> PreTrainedTokenizerFast:
    """A token a byte, and the special ones after them, of which the last one ends."""
    bytes_to_ids = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    fast = Tokenizer(models.BPE(bytes_to_ids, []))
    fast.pre_tokenizer, fast.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    fast.add_special_tokens([AddedToken(each, special=True) for each in special])
    return PreTrainedTokenizerFast(tokenizer_object=fast, eos_token=special[-1], chat_template=chat_template)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    noise = numpy.random.default_rng((height, width, seed)).integers(0, 256, (height, width, 3), dtype=numpy.uint8)
    return Image.fromarray(noise)


def png(image: Image.Image) -> bytes:
    data = BytesIO()
    image.save(data, "PNG")
    return data.getvalue()


class Oracle:
    """transformers' model and image processor."""

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        self.model = model

    @cached_property
    def config(self) -> ModelConfig:
        return ModelConfig.from_pretrained(self.folder)

    @property
    def vision(self) -> VisionConfig:
        assert self.config.vision is not None
        return self.config.vision

    @cached_property
    def processor(self) -> Any:
        return Qwen2VLImageProcessorPil.from_pretrained(self.folder)

    def processed(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Their patches, and the grids of these."""
        return dict(self.processor(images=list(images), return_tensors="pt"))

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        """[num_levels, num_tokens, hidden_size]."""
        patches = self.processed([image])
        output = self.model.model.visual(patches["pixel_values"], patches["image_grid_thw"])
        return torch.stack([output.pooler_output, *(output.get("deepstack_features") or ())])

    def places(self, grid: Grid) -> list[int]:
        """The tokens that stand for an image in a prompt."""
        return [VISION_START_TOKEN, *[IMAGE_TOKEN] * grid.num_tokens, VISION_END_TOKEN]

    def hints(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """What transformers wants to know of a prompt's tokens beside them."""
        return {"mm_token_type_ids": (ids == IMAGE_TOKEN).int()}

    def request(self, name: str, *parts: str | Image.Image, max_tokens: int = NUM_NEW_TOKENS) -> Request:
        """A prompt of texts and images."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, str):
                ids += part.encode()
            else:
                images.append(PromptImage.of(png(part), self.vision))
                ids += self.places(images[-1].grid)
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return Request(name, ids, params, images=images)

    @torch.inference_mode()
    def answer(self, request: Request, *parts: str | Image.Image) -> list[int]:
        """What transformers answers to the same, greedily."""
        ids = torch.tensor([list(request.prompt_token_ids)])
        images = [part for part in parts if not isinstance(part, str)]
        new = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.params.max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **self.hints(ids),
            **(self.processed(images) if images else {}),
        )
        return list(new[0, ids.shape[1] :].tolist())


class MistralOracle(Oracle):
    """The same of Mistral's, which says of a prompt's images how their rows end."""

    @cached_property
    def processor(self) -> Any:
        return PixtralImageProcessorPil.from_pretrained(self.folder)

    def processed(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """As its processor asks for them, which takes torchvision: of whole tokens."""
        return dict(self.processor(images=list(images), patch_size=self.vision.factor, return_tensors="pt"))

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        shown = self.processed([image])
        output = self.model.model.get_image_features(shown["pixel_values"], shown["image_sizes"])
        return torch.stack(list(output.pooler_output))

    def places(self, grid: Grid) -> list[int]:
        row = [IMAGE_TOKEN] * grid.columns
        return [*([*row, ROW_END_TOKEN] * (grid.rows - 1)), *row, IMAGE_END_TOKEN]

    def hints(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}


class GemmaOracle(Oracle):
    """The same of Gemma 3's, which is told whose tokens see each other."""

    @cached_property
    def processor(self) -> Any:
        return Gemma3ImageProcessorPil.from_pretrained(self.folder)

    def processed(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        return {"pixel_values": self.processor(images=list(images), return_tensors="pt")["pixel_values"]}

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        output: torch.Tensor = self.model.model.get_image_features(**self.processed([image])).pooler_output
        return output

    def places(self, grid: Grid) -> list[int]:
        """Between two newlines each."""
        two = END_TOKEN + 2
        return [two, IMAGE_TOKEN + 1, *[IMAGE_TOKEN] * grid.num_tokens, IMAGE_TOKEN + 2, two]

    def hints(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"token_type_ids": (ids == IMAGE_TOKEN).int()}


class Gemma4Oracle(Oracle):
    """The same of Gemma 4's."""

    @cached_property
    def processor(self) -> Any:
        return Gemma4ImageProcessorPil.from_pretrained(self.folder)

    def processed(self, images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        shown = self.processor(images=list(images), return_tensors="pt")
        return {name: shown[name] for name in ("pixel_values", "image_position_ids")}

    @torch.inference_mode()
    def features(self, image: Image.Image) -> torch.Tensor:
        return torch.stack(list(self.model.model.get_image_features(**self.processed([image])).pooler_output))

    def places(self, grid: Grid) -> list[int]:
        return [IMAGE_TOKEN + 1, *[IMAGE_TOKEN] * grid.num_tokens, IMAGE_TOKEN + 2]
