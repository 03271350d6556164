"""GGUF headers that no converter writes: refused in one line, whatever they claim."""

import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.checkpoints.gguf.config import read_gguf_config
from headrace.engine.checkpoints.gguf.file import GgufModel, gguf_in
from headrace.engine.checkpoints.gguf.vocabulary import special_token_id
from headrace.engine.errors import ModelError

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9
SIZES = dict.fromkeys(("embedding_length", "block_count", "context_length", "feed_forward_length"), (UINT32, 64))


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def texts(*values: str) -> tuple[int, bytes]:
    return ARRAY, struct.pack("<IQ", STRING, len(values)) + b"".join(map(text, values))


def stored(kind: int, value: Any) -> bytes:
    """A value of the metadata; that of an array is given as its bytes."""
    codes = {UINT32: "<I", FLOAT32: "<f"}
    content = value if kind == ARRAY else text(value) if kind == STRING else struct.pack(codes[kind], value)
    return struct.pack("<I", kind) + content


def written(folder: Path, metadata: dict[str, tuple[int, Any]], shape: tuple[int, ...] = (1, 1)) -> Path:
    """A file with a tensor of float32 of this shape, innermost dimension first."""
    values = b"".join(text(name) + stored(*value) for name, value in metadata.items())
    tensor = text("token_embd.weight") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, 0)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata))
    (file := folder / "model.gguf").write_bytes(header + values + tensor + bytes(4096))
    return file


@pytest.mark.parametrize(
    ("metadata", "shape", "message"),
    [
        ({"x": (ARRAY, struct.pack("<IQ", ARRAY, 1) * 5000)}, (1, 1), "has a list of lists in its metadata"),
        ({"general.alignment": (UINT32, 0)}, (1, 1), "has general.alignment 0, which is no number"),
        ({"general.alignment": (STRING, "x")}, (1, 1), "has general.alignment 'x', which is no number"),
        ({}, (2**63, 2**63), "is truncated: it ends within the tensor token_embd.weight"),
        ({}, (0, 2**60), "tensor token_embd.weight has rows of 0"),
        ({"x": (ARRAY, struct.pack("<IQ", UINT32, 2**62))}, (1, 1), "its header is not whole"),
        ({"x": (ARRAY, struct.pack("<IQ", STRING, 2**62))}, (1, 1), "damaged or truncated|is truncated"),
    ],
)
def test_headers_that_claim_too_much(metadata, shape, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        GgufModel.open(written(tmp_path, metadata, shape))


def test_a_header_is_read_once_while_its_file_is_the_same(tmp_path):
    file = written(tmp_path, {"x": texts("a", "é")})
    first = GgufModel.open(file)
    assert first.metadata == {"x": ["a", "é"]}
    assert GgufModel.open(file).metadata is first.metadata
    assert GgufModel.open(written(tmp_path, {"y": (STRING, "longer than that")})).metadata == {"y": "longer than that"}


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": (ARRAY, struct.pack("<IQ", UINT32, 0))}, r"unsupported general.architecture \[\]"),
        ({"phi3.attention.head_count": (UINT32, 0)}, "phi3.attention.head_count must be at least 1, not 0"),
        ({"phi3.block_count": (FLOAT32, float("inf"))}, "phi3.block_count must be a whole number, not inf"),
        ({"phi3.block_count": (UINT32, 2**31)}, "phi3.block_count must be at most 10,000, not 2147483648"),
        ({"phi3.attention.head_count_kv": texts("x")}, r"phi3.attention.head_count_kv\[0\] must be a whole number, no"),
        ({"phi3.attention.key_length": (STRING, "x")}, "phi3.attention.key_length must be a whole number, not 'x'"),
        ({"phi3.rope.freq_base": (STRING, "x")}, "phi3.rope.freq_base must be a number, not 'x'"),
        ({"phi3.rope.scaling.type": (UINT32, 3)}, "phi3.rope.scaling.type is 3; supported: none, linear, yarn"),
        (
            {"phi3.rope.scaling.type": (STRING, "yarn"), "phi3.rope.scaling.factor": (FLOAT32, 0.0)},
            "phi3.rope.scaling.factor must be above 0, not 0.0",
        ),
        (
            {"tokenizer.ggml.tokens": (ARRAY, struct.pack("<IQI", UINT32, 1, 3))},
            r"tokenizer.ggml.tokens must be a list of texts, not \[3\]",
        ),
        ({"tokenizer.ggml.tokens": (UINT32, 3)}, "tokenizer.ggml.tokens must be a list of texts, not 3"),
        (
            {"tokenizer.ggml.tokens": texts("a", "b"), "tokenizer.ggml.scores": (STRING, "x")},
            "tokenizer.ggml.scores must be a list of numbers, not 'x'",
        ),
        ({"tokenizer.ggml.eos_token_id": (STRING, "x")}, "tokenizer.ggml.eos_token_id is 'x', which is no token's id"),
    ],
)
def test_fields_of_another_kind(metadata, message, tmp_path):
    fields: dict[str, tuple[int, Any]] = {f"phi3.{name}": value for name, value in SIZES.items()}
    fields |= {"phi3.attention.head_count": (UINT32, 4), "phi3.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5)}
    fields |= {"general.architecture": (STRING, "phi3")}
    assert read_gguf_config(written(tmp_path, fields))["num_attention_heads"] == 4
    with pytest.raises(ModelError, match=f"^{tmp_path / 'model.gguf'}: {message}"):
        read_gguf_config(written(tmp_path, fields | metadata))


def test_windows_are_said_of_each_layer(tmp_path):
    fields: dict[str, tuple[int, Any]] = {f"gemma3.{name}": value for name, value in SIZES.items()}
    fields |= {"gemma3.attention.head_count": (UINT32, 4), "gemma3.attention.key_length": (UINT32, 16)}
    fields |= {"gemma3.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5)}
    fields |= {"general.architecture": (STRING, "gemma3")}
    for number in (63, 64, 65):
        pattern = ARRAY, struct.pack(f"<IQ{number}I", UINT32, number, *[1] * number)
        file = written(tmp_path, fields | {"gemma3.attention.sliding_window_pattern": pattern})
        if number == 64:
            assert read_gguf_config(file)["layer_types"] == ["sliding_attention"] * 64
        else:
            with pytest.raises(ModelError, match="pattern must be a number or say of each of 64 layers whether"):
                read_gguf_config(file)


@pytest.mark.parametrize("number", [-1, True, 1.0])
def test_what_is_no_tokens_id(number):
    with pytest.raises(ModelError, match=f"padding_token_id is {number}"):
        special_token_id({"tokenizer.ggml.padding_token_id": number}, "padding")


def test_no_parts_are_a_whole_file(tmp_path):
    file = written(tmp_path, {}).rename(tmp_path / "model-00001-of-00000.gguf")
    assert list(GgufModel.open(file).tensors) == ["token_embd.weight"]


def test_a_vision_tower_beside_a_model_is_no_second_model(tmp_path):
    for name in ("model-Q4_K_M.gguf", "mmproj-F16.gguf"):
        written(tmp_path, {}).rename(tmp_path / name)
    assert gguf_in(tmp_path) == tmp_path / "model-Q4_K_M.gguf"
