"""Encoding by pieces gives the tokens that the whole text has, whatever the tokenizer."""

from random import Random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.engine.text.segments import SegmentEncoder
from headrace.engine.text.words import packed

ADDED = [
    AddedToken("<|a|>", special=True, normalized=False),
    AddedToken("<|b|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|c|>", special=True, normalized=False, lstrip=True),
    AddedToken("<|a|><|b|>", special=True, normalized=False),
    AddedToken("<|a", special=False, normalized=False),
    AddedToken("word", special=False, normalized=False, single_word=True),
    AddedToken("<n>", special=False, normalized=True),
]
SNIPPETS = [
    *(token.content for token in ADDED),
    "hello world",
    " ",
    "  \n",
    "wordy",
    "a word b",
    "naïve 漢字 😀",
    "user\n",
    "\n",
    "'s 123",
]
CORPUS = ["hello world, hello user", "a word and some words", "naïve 漢字 😀 text\n\nuser", "it's 123 456"] * 5


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level_with_prefix_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def metaspace(prepend_scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    return tokenizer


def prepending_normalizer() -> Tokenizer:
    """As the first Llama's: no pre-tokenizer, spaces made visible by the normalizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KINDS = {
    "byte level": byte_level,
    "byte level, prefix space": byte_level_with_prefix_space,
    "metaspace, first": lambda: metaspace("first"),
    "metaspace, always": lambda: metaspace("always"),
    "metaspace, never": lambda: metaspace("never"),
    "prepending normalizer": prepending_normalizer,
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    tokenizer = KINDS[request.param]()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(ADDED)
    return tokenizer


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_are_those_of_the_whole_text(tokenizer, seed):
    generator = Random(seed)
    encoder = SegmentEncoder(tokenizer)
    for _ in range(5):
        texts = ["".join(generator.choices(SNIPPETS, k=generator.randint(0, 12))) for _ in range(20)]
        whole = [packed(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]
        assert encoder.pack_batch(texts) == whole


class CountingEncoder(SegmentEncoder):
    """Notes what the tokenizer is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.encoded: list[str] = []

    def _encode(self, texts):
        self.encoded.extend(texts)
        return super()._encode(texts)


def test_a_piece_that_texts_share_is_encoded_once(tokenizer):
    encoder = CountingEncoder(tokenizer)
    for batch in range(3):
        encoder.pack_batch([f"<|a|>system<|a|>{batch} {number}" for number in range(4)])
    assert encoder.encoded.count("<|a|>system") == 1
    assert len(encoder.encoded) == 1 + 3 * 4


def test_what_is_no_longer_shared_is_forgotten(tokenizer):
    encoder = CountingEncoder(tokenizer)
    for text in ("x", "y", "x"):
        encoder.pack_batch([f"<|a|>{text}", f"<|a|>{text}"])
    assert encoder.encoded == ["<|a|>x", "<|a|>y", "<|a|>x"]
