"""How few tokens a text can have is never more than it has, and known for the tokenizers that leave nothing out."""

from random import Random

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from headrace.engine.text.token_lengths import characters_per_token
from headrace.engine.text.tokenizer import Tokenizer as OurTokenizer

BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
TEXTS = ["hello world, hello user " * 20, "naïve 漢字 😀 ᾂ " * 9, "aaaaaaaaaaaaaaaa" * 20]
SNIPPETS = [
    "hello world",
    "aaaaaaaa",
    " ",
    "  ",
    "\n",
    "ᾂ",
    "\u1100\u1161\u11a8",
    "ﷺ",
    "İ",
    "😀",
    "0",
    "½",
    "<|a|>",
    "\0",
]
FALLBACK = {f"<0x{byte:02X}>": byte for byte in range(256)}


def over_bytes(normalizer=None, pre_tokenizer=BYTE_LEVEL) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def falling_back(**options) -> Tokenizer:
    vocabulary = {**FALLBACK, "▁": 256, "a": 257, "aa": 258, "<unk>": 259}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a")], unk_token="<unk>", fuse_unk=True, **options))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KNOWN = {
    "bytes": over_bytes(),
    "digits": over_bytes(None, pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), BYTE_LEVEL])),
    "NFC": over_bytes(normalizers.NFC()),
    "NFKC, lower case": over_bytes(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
    "bytes as a normalizer": over_bytes(normalizers.ByteLevel(), None),
    "falling back to bytes": falling_back(byte_fallback=True),
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_text_has_fewer_tokens(name, tmp_path):
    tokenizer = KNOWN[name]
    tokenizer.add_special_tokens([AddedToken("<|a|>", special=True, normalized=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = OurTokenizer.from_pretrained(tmp_path)
    generator = Random(7)
    texts = ["", *SNIPPETS, *(snippet * 50 for snippet in SNIPPETS)]
    texts += ["".join(generator.choices(SNIPPETS, k=generator.randint(0, 30))) for _ in range(300)]
    for text in texts:
        assert ours.fewest_tokens(len(text)) <= len(ours.encode(text, add_special_tokens=False)), repr(text)
    assert ours.fewest_tokens(10_000) >= 5


def test_the_bound_is_reached():
    tokenizer = over_bytes()
    longest = max(tokenizer.get_vocab(), key=len)
    assert characters_per_token(tokenizer) == len(longest)
    text = decoders.ByteLevel().decode([longest])
    assert len(tokenizer.encode(text).ids) == 1


def with_token(**options) -> Tokenizer:
    tokenizer = over_bytes()
    tokenizer.add_tokens([AddedToken("<|greedy|>", **options)])
    return tokenizer


UNKNOWN = {
    "words": Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>")),
    "pieces": Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
    "fused unknown characters": falling_back(),
    "strips": over_bytes(normalizers.Strip()),
    "drops accents": over_bytes(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
    "shortens": over_bytes(normalizers.Replace("aa", "b")),
    "squeezes": over_bytes(normalizers.Replace(Regex(" +"), " ")),
    "drops white space": over_bytes(None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), BYTE_LEVEL])),
    "drops what it cuts at": over_bytes(
        None, pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTE_LEVEL])
    ),
    "a token takes the space before it": with_token(lstrip=True),
    "a token takes the space after it": with_token(rstrip=True),
    "knows few bytes": Tokenizer(models.BPE({"a": 0}, [])),
    "words have ends": Tokenizer(models.BPE({"a</w>": 0}, [], end_of_word_suffix="</w>")),
}
UNKNOWN["knows few bytes"].pre_tokenizer = BYTE_LEVEL


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_claimed_of_a_tokenizer_that_may_leave_something_out(name):
    assert characters_per_token(UNKNOWN[name]) is None
