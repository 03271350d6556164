"""Images as the model sees them are those that transformers shows it, and what it sees is the same."""

import json
from dataclasses import replace
from shutil import copytree
from typing import Any
from weakref import finalize

import pytest
import torch
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, weight_bytes
from headrace.engine.checkpoints.vision_size import encode_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.models import load_model
from headrace.engine.vision.image_files import decode, image_size
from headrace.engine.vision.image_size import MAX_IMAGE_PIXELS, token_grid
from headrace.engine.vision.tower import VisionTower

from .seeing import picture, png

# Height and width: smaller than allowed, whole windows, ragged ones, larger than allowed, one token high.
SIZES = [(20, 30), (112, 112), (130, 200), (700, 500), (31, 400)]


@pytest.fixture(scope="module")
def model(oracle):
    return load_model(oracle.config, EngineConfig(), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_patches_and_features_are_those_of_transformers(oracle, model, height, width):
    image = picture(height, width)
    expected = oracle.processed([image])
    pixels = torch.from_numpy(decode(png(image), oracle.vision))
    torch.testing.assert_close(model.vision.patches(pixels), expected["pixel_values"], atol=1e-5, rtol=0)
    grid = token_grid(*image_size(png(image)), oracle.vision)
    assert expected["image_grid_thw"].tolist() == [[1, 2 * grid.rows, 2 * grid.columns]]
    with torch.inference_mode():
        torch.testing.assert_close(model.vision.encode(pixels), oracle.features(image), atol=1e-4, rtol=1e-4)


def test_a_photo_is_turned_as_its_exif_says(oracle):
    upright = picture(60, 120)
    exif = Image.Exif()
    exif[0x0112] = 6
    upright.transpose(Image.Transpose.ROTATE_90).save(file := oracle.folder / "turned.png", exif=exif)
    data = file.read_bytes()
    assert image_size(data) == (60, 120)
    assert (decode(data, oracle.vision) == decode(png(upright), oracle.vision)).all()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "I;16", "1"])
def test_all_kinds_of_pixels_become_colours(oracle, mode):
    image = picture(56, 84).convert("RGB" if mode == "I;16" else mode)
    image = image.convert("L").convert("I").convert("I;16") if mode == "I;16" else image
    assert decode(png(image), oracle.vision).shape == (56, 84, 3)


def test_what_is_no_image_or_too_large_is_refused(oracle):
    whole = png(picture(60, 60))
    for data, message in [
        (b"GIF89a?", "no image that can be read"),
        (b"", "no image that can be read"),
        (whole[:-400], "no image that can be read"),
        (png(Image.new("L", (900, 4))), "at most 200 times the other"),
        (png(Image.new("1", (2**13, 2**13 + 1))), f"more than {MAX_IMAGE_PIXELS}"),
        # Before anything of it is decoded.
        (png(Image.new("1", (2**13, 2**13 + 1)))[:60], f"more than {MAX_IMAGE_PIXELS}"),
    ]:
        with pytest.raises(InvalidRequestError, match=message):
            decode(data, oracle.vision)
    # The size stands in the first bytes.
    assert image_size(whole[:-400]) == (60, 60)
    for size, message in [((2**13, 2**13 + 1), f"more than {MAX_IMAGE_PIXELS}"), ((900, 4), "at most 200 times")]:
        with pytest.raises(InvalidRequestError, match=message):
            token_grid(*size, oracle.vision)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"size": [1, 2]}, r"size must be a JSON object, not \[1, 2\]"),
        ({"max_pixels": "9"}, "max_pixels must be a whole number, not '9'"),
        ({"min_pixels": 9, "max_pixels": 8}, "min_pixels 9 and max_pixels 8 must be in this order"),
    ],
)
def test_what_is_wrong_with_the_processor_is_not_said_of_the_config(oracle, tmp_path, fields, message):
    file = copytree(oracle.folder, tmp_path / "odd") / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    with pytest.raises(ModelError, match=f"^{file}: {message}"):
        ModelConfig.from_pretrained(file.parent)


def test_an_older_config_has_its_fields_side_by_side(oracle, tmp_path):
    """As those are on the Hub that transformers 4 wrote."""
    folder = copytree(oracle.folder, tmp_path / "old")
    raw = json.loads((folder / "config.json").read_text())
    rope = raw["text_config"].pop("rope_parameters")
    old = raw | raw.pop("text_config") | {"model_type": "qwen2_5_vl", "rope_theta": rope["rope_theta"]}
    old["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    (folder / "config.json").write_text(json.dumps(old))
    images = json.loads((folder / "preprocessor_config.json").read_text())
    size = images.pop("size")
    images |= {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    read = ModelConfig.from_pretrained(folder)
    assert read.vision == oracle.vision
    assert (read.ropes, read.mrope_axes, read.eos_token_ids) == (
        oracle.config.ropes,
        oracle.config.mrope_axes,
        oracle.config.eos_token_ids,
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("out_hidden_size", 32, "out_hidden_size 32 is not hidden_size 64"),
        ("hidden_act", "gelu", "vision_config.hidden_act is"),
        ("num_heads", 3, "multiple of 4 times num_heads"),
        ("window_size", 20, "less than a token's 28 pixels"),
    ],
)
def test_a_tower_that_cannot_be_is_refused(oracle, tmp_path, field, value, message):
    folder = copytree(oracle.folder, tmp_path / "odd")
    raw = json.loads((folder / "config.json").read_text())
    raw["vision_config"][field] = value
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(folder)


def test_the_size_by_the_description_is_that_of_what_is_loaded(oracle, model):
    loaded = sum(slot.destination.numel() for slot in model.weight_slots())
    assert num_parameters(oracle.config) == loaded == sum(each.numel() for each in oracle.model.parameters())
    assert weight_bytes(oracle.config, 4) == 4 * loaded


def test_the_largest_image_is_as_large_as_it_may_be(oracle, model):
    # 48 tokens by max_pixels, of which a square has 36.
    assert model.vision.encode_largest(500).shape == (1, 36, 64)
    assert model.vision.encode_largest(10).shape == (1, 9, 64)


@pytest.mark.parametrize("inner", [512, 2048], ids=["attention", "the MLP"])
def test_what_the_largest_image_takes_is_about_what_the_description_says(oracle, inner):
    sizes = {"depth": 1, "hidden_size": 512, "num_heads": 8, "intermediate_size": inner, "max_pixels": 256 * 28 * 28}
    vision = replace(oracle.vision, **sizes)
    tower = VisionTower(vision, torch.float32, torch.device("cpu"))
    for slot in tower.weight_slots():
        slot.destination.fill_(0.01)
    with MostMemory() as memory:
        assert tower.encode_largest(10_000).shape == (1, 256, 64)
    assert 0.9 < encode_bytes(vision, 256, 4) / memory.most < 1.3
    assert tower.room(10, 100).shape == (110, 64)


class MostMemory(TorchDispatchMode):
    """How many bytes of tensors there were at most at a time, of those made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {each.untyped_storage()._cdata for each in tree_leaves(args) if isinstance(each, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            storage = each.untyped_storage() if isinstance(each, torch.Tensor) else None
            if storage is not None and storage._cdata not in known and storage._cdata not in self._sizes:
                self._sizes[storage._cdata] = storage.nbytes()
                finalize(storage, self._sizes.pop, storage._cdata, None)
        self.most = max(self.most, sum(self._sizes.values()))
        return made


def test_random_weights_give_numbers(oracle):
    model = load_model(oracle.config, EngineConfig(load_format="dummy"), torch.float32, torch.device("cpu"))
    assert model.vision.encode_largest(9).isfinite().all()
