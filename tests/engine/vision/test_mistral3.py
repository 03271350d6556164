"""Mistrals with Pixtral's tower see and answer as transformers', however prompts are cut, shared or preempted."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, weight_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.llm import LLM
from headrace.engine.lora_request import LoRARequest
from headrace.engine.models import load_model
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.vision.image_files import decode
from headrace.engine.vision.image_size import Grid, token_grid
from headrace.engine.vision.reading import ImageReader

from ..lora.adapters import MLP, merged, save_adapter
from ..running import run_all, token_ids
from .seeing import IMAGE_END_TOKEN, IMAGE_TOKEN, ROW_END_TOKEN, MistralOracle, picture, png, save_mistral3
from .test_images_in_prompts import CAT, DOG, PROMPTS, answers, new_engine, num_encoded

GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 8.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LATENTS = {
    "model_type": "mistral4",
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 4,
    "v_head_dim": 14,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "rope_parameters": GROWING,
}
# Small (of a single token transformers makes an error), ragged, larger than allowed, one row, one column.
SIZES = [(5, 33), (31, 100), (130, 168), (700, 500), (8, 160), (400, 20)]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory: pytest.TempPathFactory) -> MistralOracle:
    folder = tmp_path_factory.mktemp("mistral3")
    return MistralOracle(folder, save_mistral3(folder))


@pytest.fixture(scope="module")
def model(mistral):
    return load_model(mistral.config, EngineConfig(), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(mistral) -> dict[str, list[int]]:
    return {name: mistral.answer(mistral.request(name, *parts), *parts) for name, parts in PROMPTS.items()}


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_what_it_sees_is_what_transformers_shows_it(mistral, model, height, width):
    image = picture(height, width)
    shown = mistral.processed([image])
    grid = token_grid(height, width, mistral.vision)
    assert shown["image_sizes"].tolist() == [[28 * grid.rows, 28 * grid.columns]]
    pixels = torch.from_numpy(decode(png(image), mistral.vision))
    with torch.inference_mode():
        torch.testing.assert_close(model.vision.encode(pixels), mistral.features(image), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [
        ({}, False),
        # Chunks cut images, their rows and what ends these.
        ({"max_num_batched_tokens": 13}, False),
        ({"num_gpu_blocks_override": 19}, True),
        ({"num_gpu_blocks_override": 19, "swap_space_bytes": 2**22}, True),
        ({"async_scheduling": True, "max_num_batched_tokens": 40}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
    ids=["together", "chunked", "preempted", "swapped", "async", "ngram"],
)
def test_together(mistral, expected, options, is_preempted):
    assert all(len(set(answer)) > 5 for answer in expected.values())
    engine = new_engine(mistral, **options)
    assert answers(engine, [mistral.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    assert (engine.stats.num_preemptions > 0) == is_preempted
    assert num_encoded(engine) == 2


@pytest.mark.parametrize("text", [{"model_type": "ministral3", "rope_parameters": GROWING}, LATENTS], ids=["3", "4"])
def test_decoders_whose_queries_grow(tmp_path, text):
    """Ministral 3 and Mistral Small 4: queries grow several times within an image."""
    oracle = MistralOracle(tmp_path, save_mistral3(tmp_path, **{**text, "rope_parameters": {**GROWING}}))
    asked = {name: oracle.request(name, *PROMPTS[name]) for name in ("two", "at the beginning", "text only")}
    expected = {name: oracle.answer(request, *PROMPTS[name]) for name, request in asked.items()}
    assert answers(new_engine(oracle, max_num_batched_tokens=13), list(asked.values())) == expected
    assert num_parameters(oracle.config) == sum(each.numel() for each in oracle.model.parameters())


@pytest.mark.parametrize("seed", [0, 1])
def test_rows_share_the_same_image_and_no_other(mistral, seed):
    """Text, sizes and tokens are the same, and what ends rows is in blocks of its own."""
    before = "Both prompts begin with these words: "
    engine = new_engine(mistral, block_size=1, num_gpu_blocks_override=300)
    first = mistral.request("first", before, picture(200, 130), "?")
    run_all(engine, [first])
    second = (before, picture(200, 130, seed), "!")
    request = mistral.request("second", *second)
    events = run_all(engine, [request])["second"]
    assert token_ids(events) == mistral.answer(request, *second)
    shared = len(before) if seed else len(request.prompt_token_ids) - 1
    assert events[-1].num_cached_tokens == shared


def test_places_are_those_of_its_processor(mistral):
    """As `PixtralProcessor.replace_image_token` writes them, which takes torchvision."""
    reader = ImageReader.of_model(mistral.folder)
    found = reader.expanded([65, IMAGE_TOKEN, 66, IMAGE_TOKEN], [Grid(2, 3), Grid(1, 1)])
    row, last = [IMAGE_TOKEN] * 3 + [ROW_END_TOKEN], [IMAGE_TOKEN] * 3 + [IMAGE_END_TOKEN]
    assert found.tolist() == [65, *row, *last, 66, IMAGE_TOKEN, IMAGE_END_TOKEN]
    lengths: list[int] = []
    assert len(reader.expanded([65, IMAGE_TOKEN], [Grid(2, 3)], lengths.append)) == lengths[0] == 9


def test_chats(mistral):
    llm = LLM(mistral.folder, num_gpu_blocks_override=64, max_num_batched_tokens=32)
    parts = [{"type": "text", "text": "And this: "}, {"type": "image_pil", "image_pil": DOG}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.chat([[{"role": "user", "content": parts}]], params)
    places = mistral.places(token_grid(DOG.height, DOG.width, mistral.vision))
    text = llm.get_tokenizer().encode
    assert output.prompt_token_ids == [*text("user:And this: "), *places, 259, *text("assistant:")]
    asked = mistral.request("", max_tokens=12).of_row("", output.prompt_token_ids, params)
    assert list(output.outputs[0].token_ids) == mistral.answer(asked, DOG)


def test_a_prompt_whose_rows_do_not_end_is_refused(mistral):
    request = mistral.request("x", "Look: ", CAT)
    joined = [token for token in request.prompt_token_ids if token != ROW_END_TOKEN]
    engine = new_engine(mistral)
    with pytest.raises(InvalidRequestError, match="the tokens of image 1 do not stand together"):
        engine.add(request.of_row("y", joined, request.params))


def test_the_size_by_the_description_is_that_of_what_is_loaded(mistral, model):
    loaded = sum(slot.destination.numel() for slot in model.weight_slots())
    assert num_parameters(mistral.config) == loaded == sum(each.numel() for each in mistral.model.parameters())
    assert weight_bytes(mistral.config, 4) == 4 * loaded


def test_adapters_of_its_decoder_by_either_of_its_names(mistral, expected, tmp_path):
    """transformers calls a decoder otherwise than checkpoints do, and PEFT as it is called there."""
    adapter, renamed = (save_adapter(mistral.folder, tmp_path / each, targets=MLP) for each in ("old", "today's"))
    saved = load_file(file := renamed / "adapter_model.safetensors")
    save_file({name.replace("language_model.model.", "model.language_model."): saved[name] for name in saved}, file)
    adapted = MistralOracle(mistral.folder, merged(mistral.model, renamed))
    for number, each in enumerate((adapter, renamed), 1):
        lora = LoRARequest(each.name, number, str(each))
        request = replace(mistral.request("two", *PROMPTS["two"]), lora_request=lora)
        answer = answers(new_engine(mistral, enable_lora=True), [request])["two"]
        assert answer == adapted.answer(request, *PROMPTS["two"]) != expected["two"]


def test_adapters_of_its_tower_are_refused(mistral, tmp_path):
    adapter = save_adapter(mistral.folder, tmp_path / "adapter", targets=MLP)
    saved = load_file(file := adapter / "adapter_model.safetensors")
    tower = {f"base_model.model.vision_tower.up_proj.lora_{side}.weight": torch.zeros(4, 4) for side in "AB"}
    save_file({**saved, **tower}, file)
    options = {"enable_lora": True, "lora_modules": [LoRARequest("x", 1, str(adapter))]}
    with pytest.raises(ModelError, match=r"holds a tensor base_model.model.vision_tower.* cannot be adapted by"):
        new_engine(mistral, **options)


def changed(folder: Path, copy: Path, file: str = "config.json", **fields: Any) -> Path:
    """A copy with other fields in one of its files; those of objects are put beside theirs."""
    raw = json.loads((Path(copytree(folder, copy)) / file).read_text())
    for name, value in fields.items():
        raw[name] = {**raw[name], **value} if isinstance(raw.get(name), dict) else value
    (copy / file).write_text(json.dumps(raw))
    return copy


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vision_config": {"model_type": "siglip"}}, "vision_config.model_type is 'siglip'; supported: pix"),
        ({"vision_config": {"hidden_act": "relu"}}, "vision_config.hidden_act is 'relu'; supported: gelu, s"),
        ({"vision_config": {"num_hidden_layers": 0}}, "vision_config.num_hidden_layers must be at least 1, not 0"),
        ({"vision_config": {"num_attention_heads": 3}}, "vision_config.head_dim 16 times 3 heads is not 32"),
        (
            {"vision_config": {"patch_size": [14, 14]}},
            r"vision_config.patch_size must be a whole number, not \[14, 14\]",
        ),
        ({"vision_config": {"rope_parameters": {"rope_type": "yarn"}}}, "vision_config.rope_parameters"),
        ({"projector_hidden_act": "silu"}, "projector_hidden_act is 'silu'; supported: gelu"),
        ({"vision_feature_layer": -2}, "vision_feature_layer is -2; supported: -1"),
        ({"vision_feature_layer": [-1]}, r"vision_feature_layer is \[-1\]; supported: -1"),
        ({"spatial_merge_size": 0}, "config.json: spatial_merge_size must be at least 1, not 0"),
    ],
)
def test_a_tower_that_cannot_be_is_refused(mistral, tmp_path, fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(changed(mistral.folder, tmp_path / "odd", **fields))


def test_sizes_of_images_that_are_not_its_processor_s(mistral, tmp_path):
    size = {"height": 100, "width": 100, "longest_edge": None}
    folder = changed(mistral.folder, tmp_path / "odd", "preprocessor_config.json", size=size)
    with pytest.raises(ModelError, match=r"odd/preprocessor_config.json: size is .*; supported: a longest_edge"):
        ModelConfig.from_pretrained(folder)
    (folder / "preprocessor_config.json").unlink()
    vision = ModelConfig.from_pretrained(folder).vision
    assert vision is not None
    assert (vision.longest_edge, vision.image_mean) == (280, (0.48145466, 0.4578275, 0.40821073))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": {"longest_edge": "large"}}, "size.longest_edge must be a whole number, not 'large'"),
        ({"image_mean": [0.5, "half", 0.5]}, r"image_mean\[1\] must be a number, not 'half'"),
        ({"image_std": [0.5]}, "image_mean and image_std must have 3 numbers each"),
    ],
)
def test_what_is_wrong_with_the_processor_is_not_said_of_the_config(mistral, tmp_path, fields, message):
    folder = changed(mistral.folder, tmp_path / "odd", "preprocessor_config.json", **fields)
    with pytest.raises(ModelError, match=f"^{folder / 'preprocessor_config.json'}: {message}"):
        ModelConfig.from_pretrained(folder)


def test_a_tokenizer_without_what_ends_rows(mistral, tmp_path):
    """The processor may call them otherwise."""
    folder = Path(copytree(mistral.folder, tmp_path / "odd"))
    (folder / "processor_config.json").write_text(json.dumps({"image_break_token": "[ROW]"}))
    with pytest.raises(InvalidRequestError, match=r"tokenizer.json has no token \[ROW\], which ends rows"):
        ImageReader.of_model(folder).expanded([IMAGE_TOKEN], [Grid(1, 1)])
