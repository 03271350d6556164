"""Gemma 3 sees and answers as transformers' does: an image's tokens see all of it, however it is cut or shared."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, weight_bytes
from headrace.engine.checkpoints.vision_config import ImageFrame
from headrace.engine.config import EngineConfig
from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.execution.image_batch import with_spans
from headrace.engine.execution.micro_batches import micro_batches
from headrace.engine.llm import LLM
from headrace.engine.lora_request import LoRARequest
from headrace.engine.models import load_model
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scheduling.token_budget import TokenBudget
from headrace.engine.vision.encoder import ImageTokens
from headrace.engine.vision.framed import framed
from headrace.engine.vision.image_files import decode
from headrace.engine.vision.image_size import Grid, token_grid
from headrace.engine.vision.prompt_images import Piece
from headrace.engine.vision.reading import ImageReader
from headrace.kernels import paged_attention
from headrace.kernels.native import native_library

from ..lora.adapters import merged, save_adapter
from ..parallel.batches import batch
from ..running import run_all, token_ids
from .seeing import GEMMA_TOKENS, GemmaOracle, picture, png, save_gemma3
from .test_images_in_prompts import CAT, DOG, PROMPTS, answers, new_engine, num_encoded
from .test_mistral3 import changed

TWO_NEWLINES, THREE_NEWLINES = 261, 262


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> GemmaOracle:
    folder = tmp_path_factory.mktemp("gemma3")
    return GemmaOracle(folder, save_gemma3(folder))


@pytest.fixture(scope="module")
def expected(gemma) -> dict[str, list[int]]:
    return {name: gemma.answer(gemma.request(name, *parts), *parts) for name, parts in PROMPTS.items()}


def test_what_it_sees_is_what_transformers_shows_it(gemma):
    model = load_model(gemma.config, EngineConfig(), torch.float32, torch.device("cpu"))
    for height, width in ((5, 33), (130, 168)):
        image = picture(height, width)
        assert token_grid(height, width, gemma.vision) == Grid(4, 4)
        pixels = torch.from_numpy(decode(png(image), gemma.vision))
        with torch.inference_mode():
            torch.testing.assert_close(model.vision.encode(pixels), gemma.features(image), atol=1e-4, rtol=1e-4)
    # However little room there is, the largest image is as large as all.
    assert model.vision.encode_largest(3).shape == (1, 16, 64)
    loaded = sum(slot.destination.numel() for slot in model.weight_slots())
    assert num_parameters(gemma.config) == loaded == sum(each.numel() for each in gemma.model.parameters())
    assert weight_bytes(gemma.config, 4) == 4 * loaded


@pytest.mark.parametrize(
    ("options", "is_preempted"),
    [
        ({}, False),
        # Less than an image.
        ({"max_num_batched_tokens": 13}, False),
        ({"num_gpu_blocks_override": 19}, True),
        ({"num_gpu_blocks_override": 19, "swap_space_bytes": 2**22}, True),
        ({"async_scheduling": True, "max_num_batched_tokens": 40}, False),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, False),
    ],
    ids=["together", "chunked", "preempted", "swapped", "async", "ngram"],
)
def test_together(gemma, expected, options, is_preempted):
    assert all(len(set(answer)) > 5 for answer in expected.values())
    engine = new_engine(gemma, **options)
    assert answers(engine, [gemma.request(name, *parts) for name, parts in PROMPTS.items()]) == expected
    assert (engine.stats.num_preemptions > 0) == is_preempted
    assert num_encoded(engine) == 2
    # None has failed and been tried again.
    assert engine.num_launched_steps == engine.stats.num_steps


def test_with_torch_alone(gemma, expected, monkeypatch):
    monkeypatch.setattr(paged_attention, "takes_native", lambda *_: False)
    assert answers(new_engine(gemma), [gemma.request("two", *PROMPTS["two"])])["two"] == expected["two"]


@pytest.mark.parametrize("together", [True, False])
def test_what_is_cached_may_end_within_an_image(gemma, together):
    """Blocks of eight tokens end before its last two."""
    engine = new_engine(gemma, max_num_batched_tokens=200 if together else 10)
    prompts = {"first": ("abcdefgh", DOG, "What is it?"), "second": ("abcdefgh", DOG, CAT)}
    asked = [gemma.request(name, *parts) for name, parts in prompts.items()]
    for some in [asked] if together else [[each] for each in asked]:
        for name, events in run_all(engine, some).items():
            assert token_ids(events) == gemma.answer(asked[name == "second"], *prompts[name])
            assert events[-1].num_cached_tokens == (24 if name == "second" else 0)


def test_parts_of_a_step_end_before_or_behind_an_image(gemma):
    """Two tokens of one who decodes, and 30 of a prompt, of which the image has those from the fifth on."""
    step = batch([2, 30], [20, 35])
    positions = numpy.broadcast_to(step.places[1], (3, 32))
    images = ImageTokens([Piece(6, gemma.request("", DOG).images[0], 0, 16)], positions)
    parts = list(micro_batches(replace(step, images=images), 4))
    assert [part.attention.query_lens for part in parts] == [[2, 20], [2], [8]]
    [span] = with_spans(step.attention, images).spans
    assert (span.start, span.length, span.end) == (6, 16, 5 + 4 + 16)
    assert span.block_table == step.attention.block_tables[1]


def test_out_of_memory_is_an_image_s_own_error_where_fewer_tokens_cannot_be(gemma, expected, monkeypatch):
    for fits, failing in ((30, set()), (12, set(PROMPTS) - {"text only"})):
        engine = new_engine(gemma)
        execute = engine._runner.execute
        sizes: list[int] = []

        def within_memory(step, fits=fits, execute=execute, sizes=sizes):
            sizes.append(len(step.token_ids))
            if sizes[-1] > fits:
                raise torch.OutOfMemoryError
            return execute(step)

        monkeypatch.setattr(engine._runner, "execute", within_memory)
        events = run_all(engine, [gemma.request(name, *parts) for name, parts in PROMPTS.items()])
        assert {name for name in PROMPTS if events[name][-1].error} == failing
        assert all(token_ids(events[name]) == expected[name] for name in set(PROMPTS) - failing)
        # No image was tried again and again.
        assert len(sizes) < 150


def test_beside_the_urgent(gemma, expected, monkeypatch):
    """Bulk has less in a step than an image, and none of it what another image has taken beyond that."""
    monkeypatch.setattr(TokenBudget, "took", lambda *_: None)
    engine = new_engine(gemma)
    engine._scheduler.budget.beside_urgent = 5
    urgent = replace(gemma.request("text only", *PROMPTS["text only"]), priority=-1)
    bulk = [gemma.request(name, *PROMPTS[name]) for name in PROMPTS if name != "text only"]
    assert answers(engine, [urgent, *bulk]) == expected
    assert engine.num_launched_steps == engine.stats.num_steps


def test_with_nothing_but_windows(tmp_path):
    """Sequences keep all their blocks: what a window leaves free may be less than an image."""
    sliding = GemmaOracle(tmp_path, save_gemma3(tmp_path, layer_types=["sliding_attention"] * 3))
    request = sliding.request("two", *PROMPTS["two"])
    engine = new_engine(sliding, max_num_batched_tokens=13, num_gpu_blocks_override=12)
    assert engine.max_model_len == 12 * 8
    assert answers(engine, [request])["two"] == sliding.answer(request, *PROMPTS["two"])


def test_in_int8(gemma):
    """However prompts are cut: sums are whole numbers, and an image is computed at once."""
    if native_library() is None:
        pytest.skip("needs the compiled kernels")
    requests = [gemma.request(name, *parts) for name, parts in PROMPTS.items()]
    whole = answers(new_engine(gemma, quantization="int8"), requests)
    assert answers(new_engine(gemma, quantization="int8", max_num_batched_tokens=13), requests) == whole


@pytest.mark.parametrize(
    "names",
    [
        [("vision_tower.", "vision_tower.vision_model.")],
        [
            ("language_model.model.", "model.language_model."),
            ("vision_tower.", "model.vision_tower.vision_model."),
            ("multi_modal_projector.", "model.multi_modal_projector."),
        ],
    ],
    ids=["as published", "as modules are called"],
)
def test_tensors_by_other_names(gemma, expected, tmp_path, names):
    folder = Path(copytree(gemma.folder, tmp_path / "renamed"))
    tensors = load_file(file := folder / "model.safetensors")
    for here, there in names:
        tensors = {
            there + name.removeprefix(here) if name.startswith(here) else name: tensors[name] for name in tensors
        }
    # Of a head that is the embedding, and of what makes one vector of an image.
    tensors["lm_head.weight"] = next(tensors[name] for name in tensors if "embed_tokens" in name).clone()
    tower = next(name for name in tensors if name.endswith("post_layernorm.weight")).removesuffix(
        "post_layernorm.weight"
    )
    tensors[f"{tower}head.probe"] = torch.zeros(1, 1, 36)
    save_file(tensors, file, metadata={"format": "pt"})
    renamed = GemmaOracle(folder, gemma.model)
    assert answers(new_engine(renamed), [gemma.request("two", *PROMPTS["two"])])["two"] == expected["two"]


@pytest.mark.parametrize(
    "text",
    ["<start_of_image>", "a<start_of_image>b", "a\n<start_of_image>\n\nb", "<start_of_image><start_of_image>\n"],
)
def test_places_are_those_of_its_processor(gemma, text):
    """As `Gemma3Processor` writes them into the text, which takes torchvision: newlines are joined with the text's."""
    llm = LLM(gemma.folder, num_gpu_blocks_override=8)
    encode = llm.get_tokenizer().encode
    start, end = GEMMA_TOKENS[1:3]
    whole = text.replace(start, f"\n\n{start}{GEMMA_TOKENS[0] * 16}{end}\n\n")
    reader, grids = ImageReader.of_model(gemma.folder), [Grid(4, 4)] * text.count(start)
    lengths: list[int] = []
    assert reader.expanded(encode(text), grids, lengths.append).tolist() == encode(whole)
    assert lengths == [len(encode(whole))]
    # Elsewhere a prompt of tokens has newlines as it came.
    apart = [TWO_NEWLINES - 1, TWO_NEWLINES - 1, 65]
    assert reader.expanded([*apart, *encode(text)], grids).tolist() == [*apart, *encode(whole)]


def test_chats(gemma):
    llm = LLM(gemma.folder, num_gpu_blocks_override=64, max_num_batched_tokens=32)
    parts = [{"type": "text", "text": "And this:\n"}, {"type": "image_pil", "image_pil": DOG}]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    [output] = llm.chat([[{"role": "user", "content": parts}]], params)
    _, *places, _ = gemma.places(Grid(4, 4))
    text = llm.get_tokenizer().encode
    assert output.prompt_token_ids == [
        *text("user:And this:"),
        THREE_NEWLINES,
        *places,
        TWO_NEWLINES,
        259,
        *text("assistant:"),
    ]
    asked = gemma.request("", max_tokens=12).of_row("", output.prompt_token_ids, params)
    assert list(output.outputs[0].token_ids) == gemma.answer(asked, DOG)


def test_places_that_are_not_the_images(gemma, tmp_path):
    reader = ImageReader.of_model(gemma.folder)
    with pytest.raises(InvalidRequestError, match=r"prompt has 1 places for images \(token 257\) and 2 images"):
        reader.expanded([65, 257], [Grid(4, 4)] * 2)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 1, "\n\n": 2}}}))
    with pytest.raises(InvalidRequestError, match="has no token for a newline"):
        framed([257], iter([Grid(4, 4)]), replace(gemma.vision, frame=ImageFrame(257, 258, newlines=tmp_path)))


def test_adapters(gemma, expected, tmp_path):
    adapter = save_adapter(gemma.folder, tmp_path / "adapter")
    # As PEFT calls them.
    saved = load_file(file := adapter / "adapter_model.safetensors")
    save_file({name.replace("language_model.model.", "model.language_model."): saved[name] for name in saved}, file)
    request = replace(gemma.request("two", *PROMPTS["two"]), lora_request=LoRARequest("a", 1, str(adapter)))
    answer = GemmaOracle(gemma.folder, merged(gemma.model, adapter)).answer(request, *PROMPTS["two"])
    assert answers(new_engine(gemma, enable_lora=True), [request])["two"] == answer != expected["two"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"vision_config": {"model_type": "pixtral"}},
            "vision_config.model_type is 'pixtral'; supported: s",
        ),
        ({"vision_config": {"hidden_act": "gelu"}}, "vision_config.hidden_act is 'gelu'; supported: gelu_py"),
        ({"vision_config": {"num_attention_heads": 5}}, "hidden_size 36 must be a multiple of num_heads 5"),
        (
            {"mm_tokens_per_image": 15},
            "mm_tokens_per_image 15 must be a square of what divides the 8 patches",
        ),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image 9 must be a square"),
    ],
)
def test_a_tower_that_cannot_be_is_refused(gemma, tmp_path, fields, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(changed(gemma.folder, tmp_path / "odd", **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan is set: images are shown whole"),
        ({"size": {"height": 112, "width": 224}}, "size is .* must be the tower's: height and width of 112"),
        ({"size": [112, 112]}, r"size is \[112, 112\], and must be"),
        ({"resample": 1}, "resample is 1; supported: 2, 3"),
        ({"resample": [2]}, r"resample is \[2\]; supported: 2, 3"),
        ({"image_std": [0.5]}, "image_mean and image_std must have 3 numbers each"),
    ],
)
def test_images_that_are_made_ready_otherwise_are_refused(gemma, tmp_path, fields, message):
    file = "preprocessor_config.json"
    folder = changed(gemma.folder, tmp_path / "odd", file, size={}, image_std=[])
    raw = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(raw | fields))
    with pytest.raises(ModelError, match=f"^{folder / file}: {message}"):
        ModelConfig.from_pretrained(folder)


def test_what_the_published_config_leaves_out(gemma, tmp_path):
    """Its decoder and tower are Gemma 3 4B's, and what is not said of images is as it was published."""
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "boi_token_index": 255_999,
        "eoi_token_index": 256_000,
        "image_token_index": 262_144,
        "mm_tokens_per_image": 256,
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_pretrained(tmp_path)
    assert num_parameters(config) == 4_300_079_472
    assert config.vision is not None
    assert token_grid(500, 90, config.vision) == Grid(16, 16)
    assert config.vision.resampling == "bilinear"
    assert config.vision.image_mean == config.vision.image_std == (0.5, 0.5, 0.5)
    # In all layers: answers of a model so small do not show it.
    assert config.vision.two_way_layers == "all"
    tokens = {"boi_token_index", "eoi_token_index", "image_token_index"}
    bare = {name: value for name, value in raw.items() if name not in tokens}
    (tmp_path / "config.json").write_text(json.dumps(bare))
    assert ModelConfig.from_pretrained(tmp_path).vision == config.vision
    (tmp_path / "config.json").write_text(json.dumps({**bare, "image_token_id": 7}))
    assert ModelConfig.from_pretrained(tmp_path).vision == replace(config.vision, image_token_id=7)
