"""A GGUF file's vocabulary as the tokenizer that it was made of. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import compress
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from ..checkpoints.gguf.file import GgufModel
from ..checkpoints.gguf.vocabulary import TokenType, Vocabulary, special_token_id, texts
from ..checkpoints.model_folder import at_fault
from ..errors import ModelError, shown
from .split_patterns import CONTRACTIONS, GPT2, LLAMA3, QWEN2, QWEN3_5

_SPACE = "▁"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True)
class _PreTokenizer:
    """How a text is cut before bytes are merged: by each pattern in turn.

    `ignore_merges`: a piece that is a token is that token. `add_bos`: where the metadata does not say. `is_nfc`: texts
    are composed first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    is_nfc: bool = False


_LLAMA3 = _PreTokenizer((LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((QWEN2,), is_nfc=True)
_DIGITS_FIRST = _PreTokenizer((r"\p{N}", GPT2))
# By their names in `tokenizer.ggml.pre`.
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((GPT2,)),
    "phi-2": _PreTokenizer((GPT2,)),
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "qwen35": _PreTokenizer((QWEN3_5,), is_nfc=True),
    "stablelm2": _PreTokenizer(_QWEN2.patterns),
    "dbrx": _PreTokenizer(_LLAMA3.patterns),
    "smaug-bpe": _PreTokenizer(_LLAMA3.patterns),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_FIRST),
    "tekken": _PreTokenizer((rf"{'|'.join(_CASED)}|\p{{N}}|{_CASED_REST}",), ignore_merges=True, add_bos=True),
    "gpt-4o": _PreTokenizer(
        (rf"{'|'.join(cased + CONTRACTIONS + '?' for cased in _CASED)}|\p{{N}}{{1,3}}|{_CASED_REST}",)
    ),
}


def gguf_tokenizer(model: GgufModel) -> FastTokenizer:
    """The tokenizer of a GGUF file. Raises `ModelError` naming the field of what it has that is not known here."""
    metadata = model.metadata
    try:
        kind = metadata["tokenizer.ggml.model"]
        if not isinstance(kind, str) or kind not in _MAKERS:
            raise ModelError(f"unsupported tokenizer.ggml.model {shown(kind)}; supported: {', '.join(_MAKERS)}")
        vocabulary = Vocabulary.of(metadata)
        fast, add_bos = _MAKERS[kind](model, vocabulary)
        _add_tokens(fast, vocabulary)
        _add_ends(fast, metadata, vocabulary, add_bos)
    except ModelError as error:
        raise ModelError(f"{model.path}: {error}. {_ADVICE}") from error
    except KeyError as missing:
        raise ModelError(f"{model.path} has no field {missing} in its metadata. {_ADVICE}") from missing
    return fast


def gguf_tokenizer_config(model: GgufModel) -> dict[str, Any]:
    """What a `tokenizer_config.json` would say beside it."""
    metadata = model.metadata
    with at_fault(model.path):
        tokens = texts(metadata, "tokens") if "tokenizer.ggml.tokens" in metadata else []
        numbers = {name: special_token_id(metadata, stored) for name, stored in _NAMED_TOKENS.items()}
    config: dict[str, Any] = {
        name: tokens[number] for name, number in numbers.items() if number is not None and number < len(tokens)
    }
    return config | {"chat_template": _chat_templates(metadata)}


def _chat_templates(metadata: Mapping[str, Any]) -> Any:
    """One, or as `tokenizer_config.json` has several."""
    plain, with_tools = (metadata.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    if with_tools is None:
        return plain
    named = {"default": plain, "tool_use": with_tools}
    return [{"name": name, "template": template} for name, template in named.items() if template is not None]


_NAMED_TOKENS = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding"}
_ADVICE = "Put the model's tokenizer.json beside it"


def _byte_level(model: GgufModel, vocabulary: Vocabulary) -> tuple[FastTokenizer, bool]:
    """BPE over bytes, as GPT-2 began it."""
    name = str(model.metadata.get("tokenizer.ggml.pre", "default"))
    if (pre := _PRE_TOKENIZERS.get(name)) is None:
        supported = ", ".join(_PRE_TOKENIZERS)
        raise ModelError(f"unsupported tokenizer.ggml.pre {name!r}; supported: {supported}")
    merges = [_pair(merge) for merge in texts(model.metadata, "merges")]
    fast = FastTokenizer(_bpe(vocabulary.ids, merges, ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    fast.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(False, use_regex=False)])
    fast.decoder = decoders.ByteLevel()
    if pre.is_nfc:
        fast.normalizer = normalizers.NFC()
    return fast, pre.add_bos


def _pair(merge: str) -> tuple[str, str]:
    # A token may begin with a space, and none is empty.
    left, _, right = merge[1:].partition(" ")
    return merge[:1] + left, right


def _sentencepiece(model: GgufModel, vocabulary: Vocabulary) -> tuple[FastTokenizer, bool]:
    """SentencePiece's BPE: spaces are characters, and what has no token is bytes."""
    is_unknown = [kind == TokenType.UNKNOWN for kind in vocabulary.types]
    unknown = next(compress(vocabulary.tokens, is_unknown), None)
    bpe = _bpe(vocabulary.ids, _merges(vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    fast = FastTokenizer(bpe)
    has_prefix = bool(model.metadata.get("tokenizer.ggml.add_space_prefix", True))
    replace = normalizers.Replace(" ", _SPACE)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), replace]) if has_prefix else replace
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return fast, True


def _bpe(ids: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(ids, merges, **options)
    # The Rust side raises bare Exception for what does not go together.
    except Exception as error:
        raise ModelError(f"tokenizer.ggml.tokens do not go with merges or scores: {error}") from error


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to put a token together of two others, those of the best scores first."""
    found, ids = [], vocabulary.ids
    for token, kind, score in zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True):
        if kind not in (TokenType.NORMAL, TokenType.USER_DEFINED):
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    return [(left, right) for *_, left, right in sorted(found)]


_MAKERS = {"gpt2": _byte_level, "llama": _sentencepiece}


def _add_tokens(fast: FastTokenizer, vocabulary: Vocabulary) -> None:
    """Those that are found in a text before all else."""
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    fast.add_special_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind in special])
    fast.add_tokens([AddedToken(token, normalized=False) for token, kind in typed if kind == TokenType.USER_DEFINED])


def _add_ends(fast: FastTokenizer, metadata: Mapping[str, Any], vocabulary: Vocabulary, add_bos: bool) -> None:
    """What a text begins and ends with, where it is told to."""
    number_of = {"bos": special_token_id(metadata, "bos"), "eos": special_token_id(metadata, "eos")}
    is_added = {"bos": add_bos, "eos": False}
    wanted = [name for name in number_of if metadata.get(f"tokenizer.ggml.add_{name}_token", is_added[name])]
    token_of = {name: _token(vocabulary, name, number) for name in wanted if (number := number_of[name]) is not None}
    if not token_of:
        return
    before, after = ([token_of[name]] if name in token_of else [] for name in ("bos", "eos"))
    special = [(token, fast.token_to_id(token)) for token in token_of.values()]
    fast.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=special)


def _token(vocabulary: Vocabulary, name: str, number: int) -> str:
    if number >= (length := len(vocabulary.tokens)):
        raise ModelError(f"tokenizer.ggml.{name}_token_id is {number}, and there are {length} tokens")
    return vocabulary.tokens[number]
