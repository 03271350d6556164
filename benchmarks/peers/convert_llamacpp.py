"""`convert_llamacpp.py CHECKPOINT PRECISION FOLDER`: the checkpoint as FOLDER/model.gguf.

Matrices in the precision asked for, everything else in float32, no vocabulary. For models with tied embeddings.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np

TYPES = {
    "float32": gguf.GGMLQuantizationType.F32,
    "bfloat16": gguf.GGMLQuantizationType.BF16,
    "int8": gguf.GGMLQuantizationType.Q8_0,
}
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` is `blk.3.ffn_up.weight`."""
    module, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return f"blk.{layer[1]}.{NAMES[layer[2]]}.{kind}" if layer else f"{NAMES[module]}.{kind}"


def interleaved(weight: Any, heads: int) -> Any:
    """A query or key projection for rotary embedding of neighbours instead of halves, as GGUF has it for Llama."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any], head_dim: int) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def bfloat16_tensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Name and float32 array of each tensor of a safetensors file that holds bfloat16 alone; needs no torch."""
    with file.open("rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(header_bytes))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            stream.seek(8 + header_bytes + begin)
            upper_halves = np.frombuffer(stream.read(end - begin), dtype="<u2")
            yield name, (upper_halves.astype("<u4") << 16).view("<f4").reshape(entry["shape"])


def add_tensors(writer: gguf.GGUFWriter, checkpoint: Path, config: dict[str, int], kind: Any) -> None:
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, weight in bfloat16_tensors(checkpoint / "model.safetensors"):
        module = name.split(".")[-2]
        if writer.arch == "llama" and module in heads:
            weight = interleaved(weight, heads[module])
        if weight.ndim == 1:
            writer.add_tensor(gguf_name(name), weight)
        else:
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)


def main(checkpoint: str, precision: str, folder: str) -> None:
    config = json.loads(Path(checkpoint, "config.json").read_text(encoding="utf-8"))
    Path(folder).mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(Path(folder, "model.gguf"), config["model_type"])
    add_sizes(writer, config, config["hidden_size"] // config["num_attention_heads"])
    add_tensors(writer, Path(checkpoint), config, TYPES[precision])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
