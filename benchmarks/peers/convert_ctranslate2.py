"""`convert_ctranslate2.py CHECKPOINT PRECISION FOLDER`: the checkpoint as a CTranslate2 model."""

import json
import sys
from pathlib import Path
from typing import Any

from ctranslate2.converters import TransformersConverter


class NumberedTokens:
    """Stands for the tokenizer that random weights have none of: token 17 is called "17"."""

    bos_token = eos_token = unk_token = "0"

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self._vocab_size)}


class Converter(TransformersConverter):  # type: ignore[misc]  # Any: it has no types
    def load_tokenizer(self, _: Any, model_name_or_path: str, **__: Any) -> NumberedTokens:
        config = json.loads(Path(model_name_or_path, "config.json").read_text(encoding="utf-8"))
        return NumberedTokens(config["vocab_size"])


def main(checkpoint: str, precision: str, folder: str) -> None:
    Converter(checkpoint).convert(folder, quantization=precision, force=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
