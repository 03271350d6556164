"""Qwen2-VL sees and answers as transformers' does."""

import json
import re
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters
from headrace.engine.config import EngineConfig
from headrace.engine.models import load_model
from headrace.engine.vision.image_files import decode

from .seeing import Oracle, picture, png, save_qwen2_vl
from .test_images_in_prompts import PROMPTS, answers, new_engine


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("qwen2_vl")
    return Oracle(folder, save_qwen2_vl(folder))


@torch.inference_mode()
def test_what_it_sees_is_what_transformers_shows_it(qwen2):
    model = load_model(qwen2.config, EngineConfig(), torch.float32, torch.device("cpu"))
    assert model.vision is not None
    for size in ((130, 200), (31, 400)):
        pixels = torch.from_numpy(decode(png(picture(*size)), qwen2.vision))
        torch.testing.assert_close(model.vision.encode(pixels), qwen2.features(picture(*size)), atol=1e-4, rtol=1e-4)
    assert num_parameters(qwen2.config) == sum(each.numel() for each in qwen2.model.parameters())


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 13}], ids=["together", "chunked"])
def test_answers(qwen2, options):
    asked = {name: qwen2.request(name, *parts) for name, parts in PROMPTS.items()}
    expected = {name: qwen2.answer(request, *PROMPTS[name]) for name, request in asked.items()}
    assert answers(new_engine(qwen2, **options), list(asked.values())) == expected


def test_tensors_with_the_names_of_modules(qwen2, tmp_path):
    folder = Path(copytree(qwen2.folder, tmp_path / "renamed"))
    tensors = load_file(file := folder / "model.safetensors")
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    save_file(
        {re.sub("^(model|visual).", lambda found: names[found[0]], name): tensors[name] for name in tensors}, file
    )
    request = qwen2.request("two", *PROMPTS["two"])
    expected = answers(new_engine(qwen2), [request])
    assert answers(new_engine(Oracle(folder, qwen2.model)), [request]) == expected


def test_a_config_as_it_is_published(qwen2):
    """transformers 4 wrote those on the Hub."""
    file = qwen2.folder / "config.json"
    written = file.read_text()
    raw = json.loads(written)
    rope = raw["text_config"].pop("rope_parameters")
    old = raw | raw.pop("text_config") | {"model_type": "qwen2_vl", "rope_theta": rope["rope_theta"]}
    old["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    del old["vision_config"]["hidden_act"]
    old["vision_config"]["in_chans"] = old["vision_config"].pop("in_channels")
    file.write_text(json.dumps(old))
    try:
        read = ModelConfig.from_pretrained(qwen2.folder)
    finally:
        file.write_text(written)
    assert replace(read, checkpoint_dtype=qwen2.config.checkpoint_dtype) == qwen2.config
