"""Whether two models mean the same by their token ids."""

from pathlib import Path

from ..checkpoints.model_config import ModelConfig
from ..errors import ConfigError
from .tokenizer import Tokenizer


def require_same_vocabulary(model: ModelConfig, draft: ModelConfig) -> None:
    """Raises `ConfigError`: the draft model's token ids are not the model's.

    Two tokenizers with the same tokens will do, whatever the sizes that the models' vocabularies are padded to.
    """
    sizes = f"{model.path} has a vocabulary of {model.vocab_size} tokens, the draft model {draft.path} one of"
    if not (_has_tokenizer(model.path) and _has_tokenizer(draft.path)):
        if model.vocab_size != draft.vocab_size:
            raise ConfigError(f"speculative_config: {sizes} {draft.vocab_size}: take a draft model of the same family")
        return
    ours, theirs = (Tokenizer.from_pretrained(path).fast.get_vocab() for path in (model.path, draft.path))
    if ours != theirs:
        differing = ours.items() ^ theirs.items()
        token, _ = min(differing, key=lambda pair: (pair[1], pair[0]))
        raise ConfigError(
            f"speculative_config: {sizes} {draft.vocab_size}, and their tokenizers differ in "
            f"{len({name for name, _ in differing})} tokens, as {token!r}: take a draft model of the same family"
        )


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()
