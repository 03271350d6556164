"""Encoding by words gives the tokens that the whole text has, for the tokenizers that cut at spaces."""

from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from headrace.engine.text import words
from headrace.engine.text.segments import SegmentEncoder
from headrace.engine.text.split_patterns import LLAMA3, QWEN2
from headrace.engine.text.words import WordEncoder, packed

ADDED = [AddedToken(f"<|{name}|>", special=True, normalized=False) for name in ("a", "b 1", "23")]
CORPUS = [
    "hello world, hello user",
    "it's 12 or 123, isn't it",
    "naïve 漢字 😀 text\n\nuser",
    "  two  spaces \t x",
    "end...\n\nnext...\r\nA\n",
] * 5
SNIPPETS = [
    *("hello", "it's", "'s", "naïve", "漢字", "😀", "½", "٣", "e\u0301", "\u0301", "_", "-", "...", "A"),
    *(" ", " ", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\u0085", "\x1c", "0", "12", "3456", "7 "),
]


def split(pattern: str) -> pre_tokenizers.Sequence:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
KINDS = {
    "GPT-2": BYTE_LEVEL,
    "SmolLM": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL]),
    "one pattern": split(LLAMA3),
    "the other pattern": split(QWEN2),
}


def trained(tokenizer: Tokenizer) -> Tokenizer:
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *SNIPPETS], trainer)
    tokenizer.add_special_tokens(ADDED)
    return tokenizer


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = KINDS[request.param]
    tokenizer.normalizer = normalizers.NFC()
    return trained(tokenizer)


@pytest.mark.parametrize("seed", range(20))
def test_the_tokens_are_those_of_the_whole_text(tokenizer, seed, monkeypatch):
    monkeypatch.setattr(words, "_MAX_NEW", 1.0)
    monkeypatch.setattr(words, "_MAX_KNOWN", 300)
    generator = Random(seed)
    encoder = SegmentEncoder(tokenizer)
    assert encoder._words is not None
    for _ in range(10):
        snippets = [*SNIPPETS, *(token.content for token in ADDED)]
        texts = ["".join(generator.choices(snippets, k=generator.randint(0, 15))) for _ in range(40)]
        assert encoder.pack_batch(texts) == [
            packed(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts
        ]
        assert len(encoder._words._known) <= 1000


@pytest.mark.parametrize("seed", range(20))
def test_texts_that_begin_alike_have_the_tokens_that_each_has(tokenizer, seed, monkeypatch):
    monkeypatch.setattr(words, "_MAX_NEW", 1.0)
    monkeypatch.setattr(words, "_LEAST_ALIKE", 2)
    generator = Random(seed)
    encoder = WordEncoder.of(tokenizer)
    assert encoder is not None
    for _ in range(10):
        stems = ["".join(generator.choices(SNIPPETS, k=generator.randint(0, 12))) for _ in range(3)]
        texts = [
            stem[: generator.randint(0, len(stem))] + "".join(generator.choices(SNIPPETS, k=generator.randint(0, 4)))
            for stem in sorted(generator.choices(stems, k=30))
        ]
        assert encoder.pack_batch(texts) == [
            packed(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts
        ]


def test_what_texts_begin_with_is_looked_through_once():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    encoder = WordEncoder.of(trained(tokenizer))
    assert encoder is not None
    beginnings, cut = encoder._cut(["hello " * 200 + f"world {number}" for number in range(9)])
    assert beginnings == [[], ["hello", *[" hello"] * 199, " world"]]
    assert cut[1:] == [(1, [f" {number}"]) for number in range(1, 9)]
    assert encoder.pack_batch(["hello " * 200 + "world", "hello"]) is not None


def test_a_word_is_encoded_once():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    encoder = WordEncoder.of(trained(tokenizer))
    assert encoder is not None
    assert encoder.pack_batch(["hello hello hello hello hello world world world world"] * 2) is not None
    assert sorted(encoder._known) == [" hello", " world", "hello"]


def test_texts_of_new_words_are_left_to_the_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    encoder = WordEncoder.of(trained(tokenizer))
    assert encoder is not None
    assert encoder.pack_batch(["each word here is new"]) is None


def test_long_words_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(words, "_MAX_KNOWN_CHARACTERS", 500)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    encoder = WordEncoder.of(trained(tokenizer))
    assert encoder is not None
    for number in range(20):
        texts = ["hello " * 30 + chr(ord("a") + number) * 200]
        assert encoder.pack_batch(texts) == [packed(tokenizer.encode(text).ids) for text in texts]
        assert sum(map(len, encoder._known)) <= 500
    assert encoder.pack_batch(["hello " * 30 + "x" * 501]) is None


def test_threads_may_share_an_encoder(monkeypatch):
    monkeypatch.setattr(words, "_MAX_NEW", 1.0)
    monkeypatch.setattr(words, "_MAX_KNOWN", 8)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    encoder = WordEncoder.of(trained(tokenizer))
    assert encoder is not None
    texts = [f"hello {' '.join(f'w{(start * 7 + i) % 31}' for i in range(7))}" for start in range(300)]
    expected = [packed(tokenizer.encode(text).ids) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda text: encoder.pack_batch([text]), texts))
    assert [ids for batch in found for ids in batch or ()] == expected


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        None,
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        split(r"\w+ \w+"),
    ],
    ids=repr,
)
def test_other_tokenizers_get_whole_texts(pre_tokenizer):
    tokenizer = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    assert WordEncoder.of(tokenizer) is None


@pytest.mark.parametrize(
    ("model", "normalizer", "pre_tokenizer", "added"),
    [
        (models.BPE(dropout=0.1), None, BYTE_LEVEL, None),
        (models.BPE(), normalizers.Replace(" ", "_"), BYTE_LEVEL, None),
        (models.BPE(), None, pre_tokenizers.Split(Regex(LLAMA3), behavior="removed"), None),
        (models.BPE(), None, pre_tokenizers.Split(Regex(LLAMA3), behavior="isolated", invert=True), None),
        (models.BPE(), None, BYTE_LEVEL, AddedToken("<|a|>", lstrip=True)),
        (models.BPE(), None, BYTE_LEVEL, AddedToken("<|a|>", rstrip=True)),
        (models.BPE(), None, BYTE_LEVEL, AddedToken("a", single_word=True)),
    ],
    ids=["dropout", "normalizer", "removed", "inverted", "lstrip", "rstrip", "single-word"],
)
def test_where_a_word_depends_on_what_is_around_it_whole_texts_are_encoded(model, normalizer, pre_tokenizer, added):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    if added is not None:
        tokenizer.add_tokens([added])
    assert WordEncoder.of(tokenizer) is None


def test_words_that_may_hold_an_added_token_are_left_to_the_tokenizer():
    """A normalized one is only found once the text is normalized, so texts are not cut at it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = BYTE_LEVEL
    tokenizer = trained(tokenizer)
    tokenizer.add_tokens([AddedToken("lo wo", normalized=True)])
    texts = ["hello world " * 20] * 2
    assert SegmentEncoder(tokenizer).pack_batch(texts) == [packed(tokenizer.encode(text).ids) for text in texts]
