"""Tokenizers made of a GGUF file's metadata, against those that it was made of."""

from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from headrace.engine.checkpoints.gguf.file import GgufModel
from headrace.engine.checkpoints.gguf.vocabulary import stop_token_ids
from headrace.engine.errors import ModelError
from headrace.engine.text.tokenizer import Tokenizer

from ..checkpoints.gguf_files import byte_level_vocabulary

TEXTS = (
    "",
    " ",
    "Hello world",
    " leading,  two   three    four spaces and a trailing one ",
    "tabs\tand\n\nnew\r\nlines \n x\n",
    "1 12 123 1234 12345 3.14159 1,000,000 ٣٤٥",
    "don't DON'T we'll they've I'M it's",
    "naïve café, cafe\u0301, Straße, Ωμέγα, Привет мир, 你好、世界, こんにちは, 안녕하세요, हिन्दी, עברית",
    "emoji 😀 👩‍👩‍👧 🇩🇪 ok",
    "snake_case camelCase HTTPServer x==y != <=> ~|^`$+ @#%&*()[]{}",
    "<s>[INST] x </s> <|im_start|>user\nhi<|im_end|>\n<|im_end|> tail<|user-defined|>!",
    "def f(x):\n    return x  # comment\n\n\n\tpass",
    "a\u00a0b\u2003c\u200bd \ufeff \x00 \x7f",
)
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
# As the models' own tokenizer.json have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN3_5 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> list[Any]:
    return [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)],
    "llama-bpe": split(LLAMA3),
    "lfm2": split(LLAMA3),
    # As llama.cpp has it; no file of the models' authors was at hand.
    "falcon-h1": split(LLAMA3),
    "dbrx": split(LLAMA3),
    "qwen2": split(QWEN2),
    "qwen35": split(QWEN3_5),
    "tekken": split(TEKKEN),
    "gpt-4o": split(GPT4O),
}


def published(pre: str) -> FastTokenizer:
    """A tokenizer with this way to cut texts, trained on the texts themselves without a cut, so that cuts show."""
    fast = FastTokenizer(BPE(ignore_merges=pre in ("llama-bpe", "lfm2", "falcon-h1", "tekken")))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(False, use_regex=False)
    fast.decoder = ByteLevel()
    if pre.startswith("qwen"):
        fast.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1000, initial_alphabet=alphabet, special_tokens=SPECIAL, show_progress=False
    )
    fast.train_from_iterator(TEXTS * 2, trainer)
    fast.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    fast.add_tokens(["<|user-defined|>"])
    return fast


def vocabulary_file(path: Path, *fields: Any) -> Path:
    """A GGUF file that has a vocabulary alone."""
    writer = gguf.GGUFWriter(path, "llama")
    for add in fields:
        add(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_tokens_are_those_of_the_original(pre, tmp_path):
    original = published(pre)
    ours = Tokenizer.from_pretrained(vocabulary_file(tmp_path / "model.gguf", byte_level_vocabulary(original, pre)))
    expected = [original.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [ours.encode(text, add_special_tokens=False) for text in TEXTS] == expected
    assert ours.encode_batch(TEXTS, add_special_tokens=False) == expected
    assert [ours.decode(ids) for ids in expected] == original.decode_batch(expected)
    assert ours.vocab_size == original.get_vocab_size()


def test_llama3_texts_begin_with_bos_and_qwen2_ones_do_not(tmp_path):
    for pre, bos in (("llama-bpe", [1]), ("lfm2", [1]), ("qwen2", [])):
        original = published(pre)
        vocabulary = byte_level_vocabulary(original, pre)
        ours = Tokenizer.from_pretrained(vocabulary_file(tmp_path / f"{pre}.gguf", vocabulary))
        assert ours.encode("Hello") == [*bos, *original.encode("Hello").ids]
    both = vocabulary_file(
        tmp_path / "both.gguf", vocabulary, lambda it: it.add_add_bos_token(True), lambda it: it.add_add_eos_token(True)
    )
    assert Tokenizer.from_pretrained(both).encode("Hello") == [1, *original.encode("Hello").ids, 2]
    neither = vocabulary_file(
        tmp_path / "neither.gguf",
        byte_level_vocabulary(published("llama-bpe"), "llama-bpe"),
        lambda it: it.add_add_bos_token(False),
    )
    assert Tokenizer.from_pretrained(neither).encode("Hello")[0] != 1


def test_texts_of_the_default_are_cut_as_llama_cpp_does(tmp_path):
    vocabulary = byte_level_vocabulary(published("gpt-2"), "default")
    ours = Tokenizer.from_pretrained(vocabulary_file(tmp_path / "model.gguf", vocabulary))
    pieces = ours.fast.pre_tokenizer.pre_tokenize_str("x+=12345 it's (a)")
    assert [piece for piece, _ in pieces] == ["x", "+=", "123", "45", "Ġit", "'", "s", "Ġ", "(", "a", ")"]


def sentencepiece_vocabulary(**more: Any) -> tuple[list[str], list[float], Any]:
    """Tokens and scores as SentencePiece trains them, and what writes them; `more`: further fields."""
    fast = FastTokenizer(BPE())
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always")
    plain = [text for text in TEXTS if "<" not in text] * 2
    fast.train_from_iterator(plain, trainers.BpeTrainer(vocab_size=260, show_progress=False))
    pieces = sorted(fast.get_vocab(), key=fast.get_vocab().__getitem__)
    words = [each for each in pieces if len(each) > 1]
    # Characters last, and those of no word not at all, so that they become bytes.
    characters = [each for each in pieces if len(each) == 1 and each in "".join(words)]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *byte_tokens, *words, *characters, "<|im_end|>", "<|user-defined|>"]
    scores = [0.0] * 259 + [-1.0 - rank for rank in range(len(tokens) - 261)] + [0.0, 0.0]
    types = [gguf.TokenType.UNKNOWN] + 2 * [gguf.TokenType.CONTROL] + 256 * [gguf.TokenType.BYTE]
    types += (len(tokens) - 261) * [gguf.TokenType.NORMAL] + [gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        for name, value in more.items():
            getattr(writer, name)(value)

    return tokens, scores, add


def merged_by_score(text: str, tokens: list[str], scores: list[float]) -> Iterable[int]:
    """SentencePiece's own way, step by step: of all neighbours those that make the token of the best score."""
    best = {token: score for token, score in zip(tokens, scores, strict=True) if score or len(token) == 1}
    symbols = list(text.replace(" ", "▁"))
    while pairs := [(-best[a + b], place) for place, (a, b) in enumerate(pairwise(symbols)) if a + b in best]:
        _, place = min(pairs)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    for symbol in symbols:
        yield from [tokens.index(symbol)] if symbol in best else [3 + byte for byte in symbol.encode()]


@pytest.mark.parametrize("has_prefix", [True, False])
def test_sentencepiece_tokens_are_those_of_the_best_scores(has_prefix, tmp_path):
    tokens, scores, vocabulary = sentencepiece_vocabulary(add_add_space_prefix=has_prefix)
    ours = Tokenizer.from_pretrained(vocabulary_file(tmp_path / "model.gguf", vocabulary))
    for text in TEXTS:
        if "<" not in text:
            prefixed = f" {text}" if has_prefix and text else text
            assert ours.encode(text) == [1, *merged_by_score(prefixed, tokens, scores)], text
            assert ours.decode(ours.encode(text)) == text
    begin, end = (tokens.index(token) for token in ("<s>", "<|im_end|>"))
    defined = tokens.index("<|user-defined|>")
    after = list(merged_by_score(" b" if has_prefix else "b", tokens, scores))
    found = ours.encode("<s><|im_end|>b<|user-defined|>b", add_special_tokens=False)
    assert found == [begin, end, *after, defined, *after]


def test_a_template_for_tools_comes_from_the_metadata(tmp_path):
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    vocabulary = byte_level_vocabulary(published("qwen2"), "qwen2")
    file = vocabulary_file(tmp_path / "model.gguf", vocabulary, lambda writer: writer.add_chat_template(templates))
    ours, chat = Tokenizer.from_pretrained(file), [{"role": "user", "content": "hi"}]
    assert (ours.apply_chat_template(chat), ours.apply_chat_template(chat, tools=[{"name": "f"}])) == ("plain", "f")


def test_a_template_and_what_ends_a_turn_come_from_the_metadata(tmp_path):
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    vocabulary = byte_level_vocabulary(published("qwen2"), "qwen2")
    file = vocabulary_file(tmp_path / "model.gguf", vocabulary, lambda writer: writer.add_chat_template(template))
    ours = Tokenizer.from_pretrained(file)
    text = ours.apply_chat_template([{"role": "user", "content": "hi"}])
    assert text == "<s><|im_start|>user\nhi<|im_end|>"
    assert ours.encode(text, add_special_tokens=False)[0] == 1
    # The metadata names </s>, and <|im_end|> is known by its text.
    assert stop_token_ids(GgufModel.open(file).metadata) == [2, 4]
    named = vocabulary_file(tmp_path / "named.gguf", vocabulary, lambda it: it.add_eot_token_id(3))
    assert stop_token_ids(GgufModel.open(named).metadata) == [2, 3, 4]


def test_files_beside_it_come_first(tmp_path):
    other = published("gpt-2")
    file = vocabulary_file(tmp_path / "model.gguf", byte_level_vocabulary(published("qwen2"), "no such one"))
    with pytest.raises(
        ModelError, match=r"model\.gguf: unsupported tokenizer\.ggml\.pre 'no such one'.*tokenizer\.json"
    ):
        Tokenizer.from_pretrained(file)
    other.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("beside {{ eos_token }}")
    ours = Tokenizer.from_pretrained(file)
    assert ours.encode(TEXTS[5]) == other.encode(TEXTS[5]).ids
    assert ours.apply_chat_template([]) == "beside </s>"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "has no field 'tokenizer.ggml.model'"),
        (
            [lambda it: it.add_tokenizer_model("bert")],
            "unsupported tokenizer.ggml.model 'bert'; supported: gpt2, llama",
        ),
        ([lambda it: it.add_tokenizer_model("llama")], "has no field 'tokenizer.ggml.tokens'"),
        (
            [
                lambda it: it.add_tokenizer_model("llama"),
                lambda it: it.add_token_list(["a", "b"]),
                lambda it: it.add_token_types([1]),
            ],
            "model.gguf: tokenizer.ggml.tokens has 2 entries, token_type 1 and scores 2: they must be as many. Put",
        ),
        (
            [
                lambda it: it.add_tokenizer_model("gpt2"),
                lambda it: it.add_token_list(["a", "b"]),
                lambda it: it.add_token_merges(["a c"]),
            ],
            "tokenizer.ggml.tokens do not go with merges or scores: .*`c`",
        ),
        (
            [
                lambda it: it.add_tokenizer_model("gpt2"),
                lambda it: it.add_token_list(["a", "b", "ab"]),
                lambda it: it.add_token_merges(["a b"]),
                lambda it: it.add_bos_token_id(3),
                lambda it: it.add_add_bos_token(True),
            ],
            "tokenizer.ggml.bos_token_id is 3, and there are 3 tokens",
        ),
    ],
)
def test_what_is_no_vocabulary_is_refused(fields, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        Tokenizer.from_pretrained(vocabulary_file(tmp_path / "model.gguf", *fields))
