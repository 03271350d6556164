"""Gemma 4 sees and answers as transformers' does.

The large ones' layers with a window let an image's tokens see all of it. The small ones' layers have an input of their
own for each token, and of an image's one that stands for none.
"""

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ModelError
from headrace.engine.llm import LLM
from headrace.engine.models import load_model
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.vision.image_files import decode
from headrace.engine.vision.image_size import token_grid

from .seeing import Gemma4Oracle, picture, png, save_gemma4
from .test_images_in_prompts import DOG, PROMPTS, answers, new_engine, num_encoded
from .test_mistral3 import changed

LARGE = {
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "hidden_size_per_layer_input": 0,
    "use_bidirectional_attention": "vision",
}
SMALL = {
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 10,
    "vocab_size_per_layer_input": 272,
}


@pytest.fixture(scope="module", params=["large", "small"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma4Oracle:
    folder = tmp_path_factory.mktemp("gemma4")
    is_large = request.param == "large"
    tower = {"standardize": True} if is_large else {"use_clipped_linears": True}
    return Gemma4Oracle(folder, save_gemma4(folder, tower, **(LARGE if is_large else SMALL)))


@pytest.fixture(scope="module")
def expected(gemma) -> dict[str, list[int]]:
    return {name: gemma.answer(gemma.request(name, *parts), *parts) for name, parts in PROMPTS.items()}


def test_what_it_sees_is_what_transformers_shows_it(gemma):
    model = load_model(gemma.config, EngineConfig(), torch.float32, torch.device("cpu"))
    # Smaller than may be, larger, and so thin that a side would be nothing.
    for height, width in ((5, 33), (130, 168), (700, 500), (4, 700), (700, 5)):
        image = picture(height, width)
        grid = token_grid(height, width, gemma.vision)
        pixels = torch.from_numpy(decode(png(image), gemma.vision))
        assert pixels.shape[:2] == (12 * grid.rows, 12 * grid.columns)
        with torch.inference_mode():
            torch.testing.assert_close(model.vision.encode(pixels), gemma.features(image), atol=1e-4, rtol=1e-4)
    loaded = sum(slot.destination.numel() for slot in model.weight_slots())
    tower = gemma.model.model.vision_tower
    buffers = sum(
        each.numel() for name, each in tower.named_buffers() if name.endswith(("_min", "_max", "_bias", "_scale"))
    )
    # A layer's one number is a buffer too.
    scalars = gemma.config.num_hidden_layers
    assert loaded == num_parameters(gemma.config)
    assert loaded == sum(each.numel() for each in gemma.model.parameters()) + buffers + scalars


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [
        ({}, False),
        # Less than an image.
        ({"max_num_batched_tokens": 13}, False),
        ({"num_gpu_blocks_override": 38}, True),
        ({"async_scheduling": True, "max_num_batched_tokens": 40}, False),
    ],
    ids=["together", "chunked", "preempted", "async"],
)
def test_together(gemma, expected, options, is_preempted):
    assert all(len(set(answer)) > 5 for answer in expected.values())
    engine = new_engine(gemma, **options)
    assert answers(engine, [gemma.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    assert (engine.stats.num_preemptions > 0) == is_preempted
    assert num_encoded(engine) == 2


def test_chats(gemma):
    llm = LLM(gemma.folder, num_gpu_blocks_override=64, max_num_batched_tokens=32)
    parts = [{"type": "text", "text": "And this:\n"}, {"type": "image_pil", "image_pil": DOG}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.chat([[{"role": "user", "content": parts}]], params)
    places = gemma.places(token_grid(DOG.height, DOG.width, gemma.vision))
    text = llm.get_tokenizer().encode
    assert output.prompt_token_ids == [*text("user:And this:\n"), *places, 259, *text("assistant:")]
    asked = gemma.request("", max_tokens=12).of_row("", output.prompt_token_ids, params)
    assert list(output.outputs[0].token_ids) == gemma.answer(asked, DOG)


@pytest.mark.parametrize("gemma", ["small"], indirect=True)
@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("config.json", {"vision_config": {"model_type": "siglip"}}, "vision_config.model_type is 'siglip'"),
        (
            "config.json",
            {"vision_config": {"hidden_activation": "gelu"}},
            "vision_config.hidden_activation is",
        ),
        ("config.json", {"vision_config": {"num_key_value_heads": 1}}, "num_key_value_heads 1 and head_dim 16 must be"),
        ("config.json", {"vision_config": {"head_dim": 8}}, "num_key_value_heads 2 and head_dim 8 must be"),
        ("config.json", {"vision_config": {"position_embedding_size": 209}}, "209 is less than the 210 patches"),
        ("preprocessor_config.json", {"patch_size": 16}, "patch_size is 16, and must be the tower's: 4"),
        (
            "preprocessor_config.json",
            {"pooling_kernel_size": 2},
            "pooling_kernel_size is 2, and must be the tower's: 3",
        ),
        ("preprocessor_config.json", {"do_normalize": True}, "do_normalize is set: the tower does that itself"),
        ("preprocessor_config.json", {"max_soft_tokens": "many"}, "max_soft_tokens must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused(gemma, tmp_path, file, fields, message):
    folder = changed(gemma.folder, tmp_path / "odd", file, **fields)
    with pytest.raises(ModelError, match=f"^{folder / file}: .*{message}"):
        ModelConfig.from_pretrained(folder)
