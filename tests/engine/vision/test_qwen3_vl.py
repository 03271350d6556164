"""Qwen3-VL sees and answers as transformers' does, however its prompts are cut, shared or preempted."""

import json
import re
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
from headrace.engine.errors import ModelError
from headrace.engine.lora_request import LoRARequest
from headrace.engine.models import load_model
from headrace.engine.vision.image_files import decode
from headrace.engine.vision.prompt_images import PromptImage
from headrace.kernels.native import native_library

from ..lora.adapters import merged, save_adapter
from ..quantization.quantization_configs import BYTE, compressed
from ..quantization.quantized_formats import FP8, scaled
from ..running import run_all, token_ids
from .seeing import Oracle, picture, png, save_qwen3_vl
from .test_images_in_prompts import CAT, DOG, PROMPTS, answers, new_engine, num_encoded
from .test_tower import SIZES


@pytest.fixture(scope="module")
def model(qwen3):
    return load_model(qwen3.config, EngineConfig(), torch.float32, torch.device("cpu"))


@pytest.fixture(scope="module")
def expected(qwen3) -> dict[str, list[int]]:
    return {name: qwen3.answer(qwen3.request(name, *parts), *parts) for name, parts in PROMPTS.items()}


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_what_it_sees_is_what_transformers_shows_it(qwen3, model, height, width):
    image = picture(height, width)
    shown = qwen3.processed([image])
    pixels = torch.from_numpy(decode(png(image), qwen3.vision))
    torch.testing.assert_close(model.vision.patches(pixels), shown["pixel_values"], atol=1e-5, rtol=0)
    with torch.inference_mode():
        torch.testing.assert_close(model.vision.encode(pixels), qwen3.features(image), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PROMPTS)
def test_alone(qwen3, expected, name):
    assert len(set(expected[name])) > 5
    assert answers(new_engine(qwen3), [qwen3.request(name, *PROMPTS[name])]) == {name: expected[name]}


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [
        ({}, False),
        # Chunks cut images, and what they add to the first layers.
        ({"max_num_batched_tokens": 13}, False),
        ({"num_gpu_blocks_override": 16}, True),
        ({"num_gpu_blocks_override": 16, "swap_space_bytes": 2**22}, True),
        ({"async_scheduling": True, "max_num_batched_tokens": 40}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
    ids=["together", "chunked", "preempted", "swapped", "async", "ngram"],
)
def test_together(qwen3, expected, options, is_preempted):
    engine = new_engine(qwen3, **options)
    assert answers(engine, [qwen3.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    assert (engine.stats.num_preemptions > 0) == is_preempted
    assert num_encoded(engine) == 2


@pytest.mark.parametrize(("before", "num_cached"), [("This is a dog: ", 40), ("", 24), ("abc", 24)])
def test_rows_with_the_same_image_share_what_it_added(qwen3, before, num_cached):
    """What the first layers were given is in the keys and values of those after them.

    Blocks of eight tokens end behind the image, before its last token, and before its last four.
    """
    engine = new_engine(qwen3)
    run_all(engine, [qwen3.request("first", before, DOG, "What is it?")])
    second = (before, DOG, "And this? ", CAT)
    request = qwen3.request("second", *second)
    events = run_all(engine, [request])["second"]
    assert events[-1].num_cached_tokens == num_cached
    assert token_ids(events) == qwen3.answer(request, *second)


def test_the_size_by_the_description_is_that_of_what_is_loaded(qwen3, model):
    loaded = sum(slot.destination.numel() for slot in model.weight_slots())
    assert num_parameters(qwen3.config) == loaded == sum(each.numel() for each in qwen3.model.parameters())
    assert weight_bytes(qwen3.config, 4) == 4 * loaded


def changed(folder: Path, copy: Path, **fields: Any) -> Path:
    """A copy with other fields; those of the two configs within are put beside theirs."""
    raw = json.loads((Path(copytree(folder, copy)) / "config.json").read_text())
    for name, value in fields.items():
        raw[name] = {**raw[name], **value} if isinstance(raw.get(name), dict) else value
    (copy / "config.json").write_text(json.dumps(raw))
    return copy


def test_a_config_as_it_is_published(qwen3, tmp_path):
    """transformers 4 wrote those on the Hub."""
    folder = changed(qwen3.folder, tmp_path / "old")
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["text_config"].pop("rope_parameters")
    raw["text_config"] |= {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": rope["mrope_section"], "rope_type": "default"},
        "tie_word_embeddings": True,
    }
    (folder / "config.json").write_text(json.dumps(raw))
    assert replace(ModelConfig.from_pretrained(folder), path=qwen3.folder) == qwen3.config
    (folder / "preprocessor_config.json").unlink()
    vision = ModelConfig.from_pretrained(folder).vision
    assert vision is not None
    assert (vision.min_pixels, vision.max_pixels, vision.image_mean) == (65536, 16777216, (0.5, 0.5, 0.5))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_position_embeddings", 24, "num_position_embeddings 24 is no square"),
        ("deepstack_visual_indexes", [2, 0], r"deepstack_visual_indexes \[2, 0\] must be in ascending order"),
        ("deepstack_visual_indexes", [1, 3], "some of its 3 layers"),
        ("deepstack_visual_indexes", [0, 1, 2], "has 3 entries, which must be fewer than num_hidden_layers 3"),
        ("hidden_act", "silu", "vision_config.hidden_act is 'silu'; supported: gelu_pytorch_tanh"),
    ],
)
def test_a_tower_that_cannot_be_is_refused(qwen3, tmp_path, field, value, message):
    folder = changed(qwen3.folder, tmp_path / "odd", vision_config={field: value})
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(folder)


def test_sections_of_positions_that_are_no_numbers(qwen3, tmp_path):
    folder = changed(qwen3.folder, tmp_path / "odd", text_config={"rope_parameters": {"mrope_section": "x"}})
    with pytest.raises(ModelError, match=r"text_config\.rope_parameters\.mrope_section must be a list of numbers"):
        ModelConfig.from_pretrained(folder)


def test_adapters_of_its_decoder(qwen3, tmp_path):
    adapter = save_adapter(qwen3.folder, tmp_path / "adapter")
    request = replace(qwen3.request("two", *PROMPTS["two"]), lora_request=LoRARequest("a", 1, str(adapter)))
    adapted = Oracle(qwen3.folder, merged(qwen3.model, adapter))
    answer = adapted.answer(request, *PROMPTS["two"])
    assert answer != qwen3.answer(request, *PROMPTS["two"])
    assert answers(new_engine(qwen3, enable_lora=True), [request]) == {"two": answer}


def test_a_decoder_in_fp8(qwen3, tmp_path):
    """As published: what the tower is made of is as it was."""
    left_out = "model.language_model.layers.1.mlp.down_proj"
    scheme = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.visual", left_out],
    }
    folders = (
        changed(qwen3.folder, tmp_path / "fp8", quantization_config=scheme),
        changed(qwen3.folder, tmp_path / "plain"),
    )
    quantized, plain, write = {}, {}, scaled(FP8, "block", "weight_scale_inv")
    for name, tensor in load_file(qwen3.folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        plain[name] = quantized[name] = tensor
        if re.match(r"model\.language_model\.layers\..*proj$", module) and module != left_out:
            parts, plain[name] = write(tensor)
            quantized |= {f"{module}.{suffix}": part for suffix, part in parts.items()}
    for folder, tensors in zip(folders, (quantized, plain), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fp8, exact = (Oracle(folder, qwen3.model) for folder in folders)
    requests = [qwen3.request(name, *parts) for name, parts in PROMPTS.items()]
    assert answers(new_engine(fp8), requests) == answers(new_engine(exact), requests)
    saved = 2 * sum(tensor.numel() for tensor in quantized.values() if tensor.dtype == FP8)
    scales = 4 * sum(tensor.numel() for name, tensor in quantized.items() if name.endswith("scale_inv"))
    assert weight_bytes(fp8.config, 2) == weight_bytes(exact.config, 2) - saved // 2 + scales


def test_in_int8(qwen3, expected):
    """Answers are not those of float32, but the same whatever they are batched with."""
    if native_library() is None:
        pytest.skip("needs the compiled kernels")
    requests = [qwen3.request(name, *parts) for name, parts in PROMPTS.items()]
    whole = answers(new_engine(qwen3, quantization="int8"), requests)
    assert whole != expected
    assert answers(new_engine(qwen3, quantization="int8", max_num_batched_tokens=13), requests) == whole


def test_a_broken_image_fails_alone(qwen3, expected):
    broken = PromptImage.of(png(DOG)[:-2000], qwen3.vision)
    bad = replace(qwen3.request("bad", *PROMPTS["at the end"]), images=[broken])
    good = [qwen3.request(name, *parts) for name, parts in PROMPTS.items()]
    events = run_all(new_engine(qwen3, max_num_batched_tokens=30), [bad, *good])
    assert "image 1 of the prompt is no image that can be read" in (events["bad"][-1].error or "")
    assert {name: token_ids(events[name]) for name in PROMPTS} == expected


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "mlp_only_layers": [0]}
_LISTED = ("re:.*self_attn.*", "re:.*mlp.gate$", "re:.*layers.0.mlp.*", "lm_head", "re:.*visual.*")


def test_a_mixture(tmp_path):
    """Its experts are stacked on disk, as published with inputs before outputs; the first layer has none."""
    mixture = Oracle(tmp_path, save_qwen3_vl(tmp_path, **EXPERTS))
    asked = {name: mixture.request(name, *PROMPTS[name]) for name in ("two", "text only")}
    expected = {name: mixture.answer(request, *PROMPTS[name]) for name, request in asked.items()}
    assert answers(new_engine(mixture, max_num_batched_tokens=13), list(asked.values())) == expected
    loaded = sum(each.numel() for each in mixture.model.parameters())
    assert num_parameters(mixture.config) == loaded == weight_bytes(mixture.config, 4) // 4
    tensors = load_file(tmp_path / "model.safetensors")
    published = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    assert published["model.language_model.layers.1.mlp.experts.gate_up_proj"].shape == (6, 64, 80)
    save_file(published, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert answers(new_engine(mixture), list(asked.values())) == expected


def test_experts_in_fp8(tmp_path):
    """Who quantises them writes each for itself."""
    mixture = Oracle(tmp_path / "base", save_qwen3_vl(tmp_path / "base", **EXPERTS))
    scheme = compressed("float-quantized", BYTE, list(_LISTED))
    quantized = load_file(mixture.folder / "model.safetensors")
    plain, write = {name: tensor.clone() for name, tensor in quantized.items()}, scaled(FP8, "channel")
    for name in [name for name in plain if ".experts." in name]:
        del quantized[name]
        prefix, _, kind = name.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for expert, matrices in enumerate(plain[name]):
            for part, matrix in zip(parts, matrices.chunk(len(parts)), strict=True):
                stored, stands_for = write(matrix.clone())
                quantized |= {f"{prefix}.{expert}.{part}.{suffix}": each for suffix, each in stored.items()}
                matrix.copy_(stands_for)
    folders = (
        changed(mixture.folder, tmp_path / "fp8", quantization_config=scheme),
        changed(mixture.folder, tmp_path / "plain"),
    )
    for folder, tensors in zip(folders, (quantized, plain), strict=True):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    fp8, exact = (Oracle(folder, mixture.model) for folder in folders)
    requests = [mixture.request("two", *PROMPTS["two"])]
    assert answers(new_engine(fp8), requests) == answers(new_engine(exact), requests)
