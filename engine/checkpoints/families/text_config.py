"""The decoder of a model that reads images too, within the `config.json` of both. Free of torch."""

from collections.abc import Mapping
from typing import Any

from ..model_folder import Raw, stop_ids
from ..rope_config import rope_fields


def decoder_fields(raw: Raw) -> Raw:
    """The decoder's own `config.json`. transformers 5 writes its fields apart, before they were beside the others."""
    text = raw.get("text_config") or {}
    rope = decoder_rope(raw)
    # "mrope" says no more than that there is a `mrope_section`.
    is_plain = "mrope" in (rope.get("type"), rope.get("rope_type"))
    return {
        **raw,
        **text,
        "rope_parameters": {**rope, "type": "default", "rope_type": "default"} if is_plain else rope,
        "eos_token_id": raw["eos_token_id"] or stop_ids(text, "text_config."),
        "tie_word_embeddings": raw.get("tie_word_embeddings") or text.get("tie_word_embeddings", False),
        "dtype": text.get("dtype") or raw.get("dtype") or raw.get("torch_dtype"),
    }


def decoder_rope(raw: Raw) -> Mapping[str, Any]:
    """What it says of the decoder's positions, by whatever name and wherever: see `rope_place`."""
    return rope_fields(raw.get("text_config") or {}) or rope_fields(raw)
