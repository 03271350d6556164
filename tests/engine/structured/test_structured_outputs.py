"""Grammars: what is taken, what is refused and why, and which tokens an answer may go on with."""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from headrace.engine.errors import InvalidRequestError
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured import grammar as grammar_module
from headrace.engine.structured.grammar import GrammarCompiler, check_grammar
from headrace.engine.structured.guide import GrammarError, Guide
from headrace.engine.structured.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputsParams
from headrace.engine.text.tokenizer import Tokenizer

TICKETS = Path(__file__).parents[3] / "examples" / "tickets" / "model"
MERGED = FastTokenizer.from_file(str(TICKETS / "tokenizer.json"))


def byte_level() -> FastTokenizer:
    """<s> is 0, </s> is 1, which this tokenizer takes for a text like any other; then a token a byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = FastTokenizer(models.BPE({token: i for i, token in enumerate(["<s>", "</s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_like() -> FastTokenizer:
    """As Llama 2's: ▁ for a space, and a token for each byte that no other token has."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *"abcdefgxyz0123456789{}[]:,", '"', "▁a", "▁1"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *bytes_, *letters])}
    merges = [("▁", "a"), ("▁", "1")]
    tokenizer = FastTokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "sentencepiece": sentencepiece_like(), "merged": MERGED}
COMPILERS = {name: GrammarCompiler(tokenizer) for name, tokenizer in TOKENIZERS.items()}


def guide(
    params: StructuredOutputsParams, name: str = "byte level", ends: Sequence[int] = (1,), extra: int = 0
) -> Guide:
    return Guide(COMPILERS[name].compile(params), ends, TOKENIZERS[name].get_vocab_size() + extra)


def allowed(at: Guide) -> list[int]:
    return np.flatnonzero(np.unpackbits(at.mask.view(np.uint8), bitorder="little")).tolist()


def walk(at: Guide, name: str, seed: int, ends: Sequence[int] = (1,)) -> str:
    """A random answer of allowed tokens; ends as soon as it can from the 80th token on."""
    rng = np.random.default_rng(seed)
    tokens: list[int] = []
    for length in range(1000):
        choices = allowed(at)
        if set(choices) & set(ends) and (length > 80 or rng.random() < 0.2 or set(choices) <= set(ends)):
            return TOKENIZERS[name].decode(tokens, skip_special_tokens=True)
        tokens.append(int(rng.choice([token for token in choices if token not in ends])))
        at.advance(tokens[-1])
    raise AssertionError("the answer does not end")


integers = st.integers(-20, 20).flatmap(lambda low: st.integers(low, 30).map(lambda high: (low, high)))
leaves = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": "é\n"}, {"enum": ["a", 1, None, [2]]}]),
    st.integers(0, 4).map(lambda most: {"type": "string", "minLength": most // 2, "maxLength": most}),
    integers.map(lambda ends: {"type": "integer", "minimum": ends[0], "maximum": ends[1]}),
    st.just({"type": "string", "pattern": "^[ab]{1,3}x?$"}),
)
schemas = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.lists(inner, min_size=1, max_size=2).map(lambda each: {"anyOf": each}),
        st.dictionaries(st.sampled_from(["a", "b c", 'q"', "ü"]), inner, max_size=3).flatmap(
            lambda properties: st.builds(
                lambda required: {
                    "type": "object",
                    "properties": properties,
                    "required": required,
                    "additionalProperties": False,
                },
                st.lists(st.sampled_from(sorted(properties)), unique=True) if properties else st.just([]),
            )
        ),
    ),
    max_leaves=4,
)


@settings(max_examples=60, deadline=None)
@given(schemas, st.booleans(), st.integers(0, 2**32), st.sampled_from(sorted(TOKENIZERS)))
def test_whatever_is_allowed_follows_the_schema(schema, compact, seed, name):
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=compact)
    check_grammar(params)
    ends = (2,) if name == "sentencepiece" else (1,)
    value = json.loads(walk(guide(params, name, ends), name, seed, ends))
    assert jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize("seed", range(20))
def test_an_object_has_no_property_that_its_schema_does_not_name(seed):
    inner = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}, "required": ["a"], "$defs": {"B": inner}}
    params = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    assert json.loads(walk(guide(params), "byte level", seed, (1,))) in ({"a": {"b": True}}, {"a": {"b": False}})


REGEXES = ["[a-z]{2,4}[0-9]", "(yes|no|maybe)( please)?", r"\d{4}-\d\d", "a*b?", "(é|ü){1,3}", "x y  z"]


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("regex", REGEXES)
def test_whatever_is_allowed_matches_the_expression(regex, name):
    params = StructuredOutputsParams(regex=regex)
    check_grammar(params)
    ends = (2,) if name == "sentencepiece" else (1,)
    answers = {walk(guide(params, name, ends), name, seed, ends) for seed in range(20)}
    assert len(answers) > 1 or regex == "x y  z"
    assert all(re.fullmatch(regex, answer) for answer in answers)


def test_choices_grammars_and_any_object():
    choice = StructuredOutputsParams(choice=['say "so"', "né", "no"])
    assert {walk(guide(choice), "byte level", seed) for seed in range(30)} == {'say "so"', "né", "no"}
    lark = StructuredOutputsParams(grammar='start: greeting (" " /[a-c]+/)?\ngreeting: "hi" | "ho"')
    assert all(re.fullmatch("h[io]( [a-c]+)?", walk(guide(lark), "byte level", seed)) for seed in range(20))
    anything = guide(StructuredOutputsParams(json_object=True))
    assert allowed(anything) == [BYTES["{"]]


GBNF = """
root ::= "select " column (", " column)* " from " [a-c]+ # GBNF, as vLLM's users write it
column ::= "x" | "y" digits?
digits ::= [0-9]{1,2}
"""


def test_a_grammar_may_be_written_in_gbnf():
    params = StructuredOutputsParams(grammar=GBNF)
    check_grammar(params)
    answers = {walk(guide(params), "byte level", seed) for seed in range(20)}
    column = "(x|y([0-9]{1,2})?)"
    assert len(answers) > 1
    assert all(re.fullmatch(f"select {column}(, {column})* from [a-c]+", answer) for answer in answers)
    # Lark has texts too.
    assert walk(guide(StructuredOutputsParams(grammar='start: "a ::= b"')), "byte level", 0) == "a ::= b"


@pytest.mark.parametrize("grammar", ['root ::= "a', 'root ::= "\\', 'other ::= "a"', "root ::= " + "(" * 5000])
def test_what_is_no_gbnf_is_refused(grammar):
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: grammar is no GBNF: "):
        check_grammar(StructuredOutputsParams(grammar=grammar))


BYTES = {text: TOKENIZERS["byte level"].encode(text).ids[0] for text in '{}"ab'}


def test_an_end_token_is_allowed_where_the_grammar_is_complete_and_only_there():
    # Both are texts to this tokenizer, and the expression allows any text.
    at = guide(StructuredOutputsParams(regex="(.|\n)*b"), ends=(0, 1))
    assert not {0, 1} & set(allowed(at))
    at.advance(BYTES["b"])
    assert {0, 1} < set(allowed(at))
    at.advance(BYTES["a"])
    assert not {0, 1} & set(allowed(at))
    assert not at.is_complete


def test_where_nothing_more_can_follow_only_the_end_tokens_are_left():
    at = guide(StructuredOutputsParams(regex="ab"), ends=(0, 1))
    for text in "ab":
        assert not at.is_complete
        assert allowed(at) == [BYTES[text]]
        at.advance(BYTES[text])
    assert at.is_complete
    assert allowed(at) == [0, 1]
    assert not at.allows_other_than([0, 1])
    assert at.allows_other_than([1])


@pytest.mark.parametrize("extra", [0, 1, 30, 31, 32, 200])
def test_padding_of_the_vocabulary_is_never_allowed(extra):
    at = guide(StructuredOutputsParams(regex="(.|\n)*"), extra=extra)
    size = TOKENIZERS["byte level"].get_vocab_size()
    assert at.mask.shape == (-(-(size + extra) // 32),)
    assert max(allowed(at)) < size


def test_a_vocabulary_smaller_than_the_tokenizers_is_no_obstacle():
    size = 100
    at = Guide(COMPILERS["byte level"].compile(StructuredOutputsParams(regex="[a-z]+")), (1,), size)
    assert allowed(at)
    assert max(allowed(at)) < size
    beyond = StructuredOutputsParams(regex="é")
    with pytest.raises(GrammarError, match="no next token that the model's vocabulary has"):
        _ = Guide(COMPILERS["byte level"].compile(beyond), (1,), size).mask


def test_a_token_that_does_not_fit_is_an_error():
    at = guide(StructuredOutputsParams(regex="ab"))
    with pytest.raises(GrammarError, match="token 1 does not fit structured_outputs"):
        at.advance(1)


def test_answers_start_afresh_and_apart():
    params = StructuredOutputsParams(regex="ab|ba")
    one, other = guide(params), guide(params)
    one.advance(BYTES["a"])
    assert allowed(one) == [BYTES["b"]]
    assert allowed(other) == sorted([BYTES["a"], BYTES["b"]])


def test_a_grammar_is_compiled_once():
    compiler = COMPILERS["byte level"]
    first = compiler.compile(StructuredOutputsParams(json={"type": "integer"}))
    assert compiler.compile(StructuredOutputsParams(json='{"type": "integer"}')) is first
    assert compiler.compile(StructuredOutputsParams(json={"type": "null"})) is not first
    assert compiler.compile(StructuredOutputsParams(json={"type": "integer"}, disable_any_whitespace=True)) is not first


@pytest.mark.parametrize("token", ["<|of_some_model|>", "<[100000]>"])
def test_whether_a_model_has_a_grammars_tokens_only_its_tokenizer_tells(token):
    params = StructuredOutputsParams(grammar=f'start: "a" {token}')
    check_grammar(params)
    with pytest.raises(InvalidRequestError, match=r"^structured_outputs: "):
        COMPILERS["byte level"].compile(params)


def test_what_was_asked_for_least_lately_is_forgotten(monkeypatch):
    monkeypatch.setattr(grammar_module, "_NUM_KEPT", 2)
    compiler = GrammarCompiler(TOKENIZERS["byte level"])
    asked = [StructuredOutputsParams(choice=[name]) for name in "abc"]
    a, b, again, _ = (compiler.compile(params) for params in (asked[0], asked[1], asked[0], asked[2]))
    assert compiler.compile(asked[0]) is a is again
    assert compiler.compile(asked[1]) is not b


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({}, "need exactly one of json, json_object, regex, choice, grammar, not none"),
    "two": ({"regex": "a", "json_object": True}, "not json_object and regex"),
    "no object wanted": ({"json_object": False}, "not none"),
    "regex": ({"regex": 3}, "regex must be a text, not 3"),
    "choice": ({"choice": "ab"}, "choice must be a list of texts"),
    "empty choice": ({"choice": ["a", ""]}, "choice must be a list of texts"),
    "no JSON": ({"json": "{"}, "json is no JSON"),
    "no schema": ({"json": "[1]"}, "json must be a schema"),
    "false": ({"json": "false"}, "json must be a schema"),
    "not JSON's": ({"json": {"const": float("nan")}}, "json is no JSON"),
    "deep": ({"json": nested(100)}, "json is nested deeper than 64 levels"),
    "very deep": ({"json": '{"a":' * 100_000}, "json is n"),
    "large": ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "regex is 131073 bytes, but at most 131072 are taken"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_description_of_a_grammar_is_refused(name):
    options, message = REFUSED[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        StructuredOutputsParams(**options)
    assert caught.value.field == "structured_outputs"


UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "regex": ({"regex": "("}, "unclosed group"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-ahead"),
    "no text matches": ({"regex": r"[^\s\S]"}, "no answer fits"),
    "unsatisfiable": ({"json": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable"),
    "parts that may both hold": (
        {"json": {"oneOf": [{"type": "number"}, {"type": "integer"}]}},
        "^structured_outputs: oneOf constraints are not supported where several may hold: say anyOf$",
    ),
    "unsupported": (
        {"json": {"type": "array", "uniqueItems": True}},
        r'Unimplemented keys: \["uniqueItems"\]: leave them out$',
    ),
    "unsupported within": (
        {
            "json": {
                # No keyword where it is a value or a name.
                "enum": [{"uniqueItems": True}],
                "properties": {"uniqueItems": {}, "tags": {"anyOf": [{}, {"items": {"uniqueItems": True}}]}},
            }
        },
        r'Unimplemented keys: \["uniqueItems"\], first in properties\.tags\.anyOf\.1\.items: leave them out$',
    ),
    "no such type": ({"json": {"type": "nonsense"}}, "Invalid type: nonsense"),
    "no such reference": ({"json": {"$ref": "#/$defs/none"}}, "does not exist"),
    "elsewhere": ({"json": {"$ref": "https://example.com/schema"}}, "structured_outputs: "),
    "itself": ({"json": {"$ref": "#"}}, "no answer fits"),
    "empty grammar": ({"grammar": ""}, "Empty grammar"),
    "unknown rule": ({"grammar": "start: x"}, "unknown name"),
    "left recursion without end": ({"grammar": 'start: start "a"'}, "no answer fits"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_what_cannot_be_compiled_is_refused_with_and_without_a_tokenizer(name):
    options, message = UNUSABLE[name]
    params = StructuredOutputsParams(**options)
    for refuse in (check_grammar, COMPILERS["merged"].compile):
        with pytest.raises(InvalidRequestError, match=message) as caught:
            refuse(params)
        assert caught.value.field == "structured_outputs"
        assert "\n" not in str(caught.value)


def test_an_expression_that_takes_too_long_is_refused():
    with pytest.raises(InvalidRequestError, match="too complex"):
        COMPILERS["merged"].compile(StructuredOutputsParams(regex="a{1000000}"))


def test_a_lexer_that_many_answers_have_filled_is_replaced(monkeypatch):
    monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 100)
    compiler = GrammarCompiler(TOKENIZERS["byte level"])
    grammar = compiler.compile(StructuredOutputsParams(regex="([ab]{0,40}c){12}"))
    first = grammar.start
    for seed in range(30):
        at = Guide(grammar, (1,), 258)
        answer = walk(at, "byte level", seed)
        assert re.fullmatch("([ab]{0,40}c){12}", answer)
    assert grammar.start is not first


def test_without_llguidance_it_is_named_and_all_else_works(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match="need the package llguidance, which is not installed"):
        check_grammar(StructuredOutputsParams(regex="never checked before"))
    code = "import sys; sys.modules['llguidance'] = None; import headrace.engine.llm, headrace.jobs.spec.schemas"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_tokenizer_that_cannot_be_used_is_named():
    tokenizer = Tokenizer(Path("folder"), FastTokenizer(models.WordLevel({"word": 0}, unk_token="word")), {})
    with pytest.raises(InvalidRequestError, match="cannot be used with this model's tokenizer"):
        tokenizer.grammar(StructuredOutputsParams(regex="a"))


def test_sampling_parameters_that_go_ill_with_it_are_refused():
    shape = StructuredOutputsParams(regex="a")
    with pytest.raises(InvalidRequestError, match="structured_outputs has no meaning with choices"):
        SamplingParams(structured_outputs=shape, choices=["a"])
    with pytest.raises(InvalidRequestError, match="ignore_eos has no meaning with structured_outputs"):
        SamplingParams(structured_outputs=shape, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match="structured_outputs must be a StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
