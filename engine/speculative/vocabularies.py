"""Whether two models mean the same by their token ids."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..checkpoints.gguf.file import GgufModel, is_gguf
from ..checkpoints.gguf.vocabulary import unused_token_ids
from ..checkpoints.model_config import ModelConfig
from ..errors import ConfigError
from ..text.tokenizer import Tokenizer


def require_same_vocabulary(model: ModelConfig, draft: ModelConfig) -> None:
    """Raises `ConfigError`: the draft model's token ids are not the model's.

    Two tokenizers with the same tokens will do, whatever the sizes that the models' vocabularies are padded to.
    """
    sizes = f"{model.path} has a vocabulary of {model.vocab_size} tokens, the draft model {draft.path} one of"
    if not (_has_tokenizer(model.path) and _has_tokenizer(draft.path)):
        if model.vocab_size != draft.vocab_size:
            raise ConfigError(f"speculative_config: {sizes} {draft.vocab_size}: take a draft model of the same family")
        return
    ours, theirs = _Tokens.of(model.path), _Tokens.of(draft.path)
    if differing := ours.differing(theirs):
        token, _ = min(differing, key=lambda pair: (pair[1], pair[0]))
        raise ConfigError(
            f"speculative_config: {sizes} {draft.vocab_size}, and their tokenizers differ in "
            f"{len({name for name, _ in differing})} tokens, as {token!r}: take a draft model of the same family"
        )


@dataclass(frozen=True)
class _Tokens:
    """Tokens with their ids. `unused`: the ids that a GGUF file fills up its vocabulary with, whatever their names."""

    named: Set[tuple[str, int]]
    unused: Set[int]

    @classmethod
    def of(cls, path: Path) -> Self:
        # A GGUF file has spaces in some tokens that a tokenizer.json has this character for.
        ids = Tokenizer.from_pretrained(path).fast.get_vocab().items()
        named = {(token.replace("▁", " "), number) for token, number in ids}
        return cls(named, unused_token_ids(GgufModel.open(path).metadata) if is_gguf(path) else frozenset())

    def differing(self, other: Self) -> Set[tuple[str, int]]:
        unused = self.unused | other.unused
        return {each for each in self.named ^ other.named if each[1] not in unused}


def _has_tokenizer(path: Path) -> bool:
    return is_gguf(path) or (path / "tokenizer.json").is_file()
