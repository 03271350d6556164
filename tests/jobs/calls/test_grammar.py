"""Answers that are JSON of some form or a call instead."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from headrace.engine.text.call_tags import DEEPSEEK, DEEPSEEK_CALL, DEEPSEEK_SEPARATOR
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.calls.formats import CallFormat
from headrace.jobs.calls.grammar import json_or_calls
from headrace.jobs.spec.sampling import SamplingSpec

from ..running import MODEL
from .written_calls import parsed, separated

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": CITY}}
NAMES = ("find", "close")
FIND: Any = ("find", {"q": "a"})
CLOSE: Any = ("close", {})
HERMES = [
    '<tool_call>\n{"name": "find", "arguments": {"q": "a"}}\n</tool_call>',
    '<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>',
]
SEPARATED = [
    separated(f"find{DEEPSEEK_SEPARATOR}" + '{"q": "a"}'),
    separated(f"close{DEEPSEEK_SEPARATOR}" + "{}"),
]
OLD_SEPARATED = [
    separated(f'function{DEEPSEEK_SEPARATOR}find\n```json\n{{"q": "a"}}\n```'),
    separated(f"function{DEEPSEEK_SEPARATOR}close\n```json\n{{}}\n```"),
]
# Each with a template, special tokens, a call of each function as such models write it, and what parts them.
KINDS: dict[str, tuple[str, Sequence[str], Sequence[str], str]] = {
    "hermes": ("{{ tools }}<tool_call>", (), HERMES, "\n"),
    "qwen3_coder": (
        "{{ tools }}<tool_call><function=f>",
        (),
        [
            "<tool_call>\n<function=find>\n<parameter=q>\na\n</parameter>\n</function>\n</tool_call>",
            "<tool_call>\n<function=close>\n</function>\n</tool_call>",
        ],
        "\n",
    ),
    "glm45": (
        "{{ tools }}<tool_call>f<arg_key>",
        (),
        [
            "<tool_call>find\n<arg_key>q</arg_key>\n<arg_value>a</arg_value>\n</tool_call>",
            "<tool_call>close\n</tool_call>",
        ],
        "\n",
    ),
    "mistral": (
        "{{ tools }}[TOOL_CALLS]f[ARGS]",
        ("[TOOL_CALLS]", "[ARGS]"),
        ['[TOOL_CALLS]find[ARGS]{"q": "a"}', "[TOOL_CALLS]close[ARGS]{}"],
        "",
    ),
    "mistral, its marks as texts": (
        "{{ tools }}[TOOL_CALLS]f[ARGS]",
        (),
        ['[TOOL_CALLS]find[ARGS]{"q": "a"}', "[TOOL_CALLS]close[ARGS]{}"],
        "",
    ),
    "gemma4": (
        "{{ tools }}<|tool_call>call:f{}<tool_call|>",
        ("<|tool_call>", "<tool_call|>", '<|"|>'),
        ['<|tool_call>call:find{q:<|"|>a<|"|>}<tool_call|>', "<|tool_call>call:close{}<tool_call|>"],
        "",
    ),
    "seed_oss": (
        "{{ tools }}<seed:tool_call>",
        ("<seed:tool_call>", "</seed:tool_call>"),
        [
            "<seed:tool_call>\n<function=find>\n<parameter=q>a</parameter>\n</function>\n</seed:tool_call>",
            "<seed:tool_call>\n<function=close>\n</function>\n</seed:tool_call>",
        ],
        "\n",
    ),
    "minimax_m2": (
        "{{ tools }}<minimax:tool_call>",
        (),
        [
            '<minimax:tool_call><invoke name="find"><parameter name="q">a</parameter>\n</invoke>\n</minimax:tool_call>',
            '<minimax:tool_call>\n<invoke name="close">\n</invoke>\n</minimax:tool_call>',
        ],
        "\n",
    ),
    "deepseek_v3": ("{{ tools }}" + SEPARATED[0], (), SEPARATED, ""),
    "deepseek_v3, as older ones have it": ("{{ tools }}" + SEPARATED[0], (), OLD_SEPARATED, ""),
    "deepseek_v3, special tokens": (
        "{{ tools }}" + SEPARATED[0],
        (*DEEPSEEK, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR),
        OLD_SEPARATED,
        "",
    ),
    "gemma4, its marks as texts": (
        "{{ tools }}<|tool_call>call:f{}<tool_call|>",
        (),
        ['<|tool_call>call:find{q:<|"|>a<|"|>}<tool_call|>', "<|tool_call>call:close{}<tool_call|>"],
        "",
    ),
    "hunyuan": (
        "{{ tools }}<tool_calls>",
        (),
        [
            '<tool_calls>\n[{"name": "find", "arguments": {"q": "a"}}]\n</tool_calls>',
            '<tool_calls>[{"name": "close", "arguments": {}}]</tool_calls>',
        ],
        "\n",
    ),
    "nemotron": (
        "{{ tools }}<TOOLCALL>",
        (),
        [
            '<TOOLCALL>[{"name": "find", "arguments": {"q": "a"}}]</TOOLCALL>',
            '<TOOLCALL>[{"name": "close", "arguments": {}}]</TOOLCALL>',
        ],
        "",
    ),
    "cohere": (
        "{{ tools }}<|START_ACTION|>",
        ("<|START_ACTION|>", "<|END_ACTION|>"),
        [
            '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "find", "parameters": {"q": "a"}}\n]<|END_ACTION|>',
            '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "close", "parameters": {}}]<|END_ACTION|>',
        ],
        "",
    ),
    "apertus": (
        "{{ tools }}<|tools_prefix|>",
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        [
            '<|tools_prefix|>[{"find": {"q": "a"}}]<|tools_suffix|>',
            '<|tools_prefix|>[{"close": {}}]<|tools_suffix|>',
        ],
        "",
    ),
    "olmo3": (
        "{{ tools }}<function_calls>",
        (),
        [
            '<function_calls>\nfind(q="a")\n</function_calls>',
            "<function_calls>close()</function_calls>",
        ],
        "\n",
    ),
    "lfm2": (
        "{{ tools }}<|tool_list_start|>",
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        [
            "<|tool_call_start|>[find(q='a')]<|tool_call_end|>",
            "<|tool_call_start|>[close()]<|tool_call_end|>",
        ],
        "",
    ),
    "json, as Llama 3 has it": (
        '{{ tools }}{"name": "f", "parameters": {}}',
        (),
        ['{"name": "find", "parameters": {"q": "a"}}', '{"name": "close", "parameters": {}}'],
        "; ",
    ),
    "json between special tokens": (
        "{{ tools }}<tool_call>",
        ("<tool_call>", "</tool_call>"),
        HERMES,
        "\n",
    ),
}
LISTED = '[{"name": "find", "arguments": {"q": "a"}}, {"name": "close", "arguments": {}}]'


def tokenizer_of(folder: Path, template: str, special: Sequence[str]) -> Tokenizer:
    """The ticket model's, with another template and further special tokens."""
    model = copytree(MODEL, folder / "model")
    (model / "chat_template.jinja").write_text(template)
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    first = max(token["id"] for token in tokenizer["added_tokens"]) + len(tokenizer["model"]["vocab"])
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] += [{**flags, "id": first + place, "content": text} for place, text in enumerate(special)]
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    return Tokenizer.from_pretrained(model)


def held(tokenizer: Tokenizer, form: CallFormat | None, **sampling: Any) -> SamplingSpec:
    """As a worker reads it."""
    told = json_or_calls(SamplingSpec.model_validate(sampling), form, NAMES, tokenizer)
    return SamplingSpec.model_validate_json(told.model_dump_json(by_alias=True))


def follows(sampling: SamplingSpec, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text is a whole answer of that form."""
    grammar = tokenizer.grammar(sampling.structure)
    assert grammar is not None
    matcher = grammar.start.deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


@pytest.mark.parametrize(("template", "special", "calls", "between"), KINDS.values(), ids=KINDS)
def test_an_answer_is_of_its_form_or_a_call(
    tmp_path: Path, template: str, special: Sequence[str], calls: Sequence[str], between: str
) -> None:
    tokenizer = tokenizer_of(tmp_path, template, special)
    functions: Any = {"find": {"type": "object", "properties": {"q": {"type": "string"}}}, "close": {}}
    form = CallFormat.of_model(tokenizer, functions)
    either = held(tokenizer, form, response_format=FORMAT)
    both = between.join(calls)
    for text, expected in [(calls[0], [FIND]), (calls[1], [CLOSE]), (both, [FIND, CLOSE])]:
        assert follows(either, text, tokenizer), text
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.decode(token_ids)
        assert parsed(form.parser(""), [answer]) == ("", expected, "tool_calls")
    assert follows(either, '{"city": "Ulm"}', tokenizer)
    for text in ("", "Ulm", '{"city": 1}', calls[0].replace("find", "lose"), calls[0][:-1], f'{{"city": "Ulm"}}{both}'):
        assert not follows(either, text, tokenizer), text
    one = held(tokenizer, CallFormat.of_model(tokenizer, functions, most=1), response_format=FORMAT)
    assert [follows(one, text, tokenizer) for text in (*calls, both)] == [True, True, False]


def test_what_gemma_calls_with_is_of_any_form(tmp_path: Path) -> None:
    template, special, _, _ = KINDS["gemma4"]
    tokenizer = tokenizer_of(tmp_path, template, special)
    either = held(tokenizer, CallFormat.of_model(tokenizer, {}), response_format=FORMAT)
    value = """{a:-1.5,b_c:[true,[],{d:<|"|>it's "{a:1}", <b>\n<|"|>}],e:null}"""
    assert follows(either, f"<|tool_call>call:find{value}<tool_call|>", tokenizer)
    for wrong in ("{a:b}", "{a}", "{a:1,}", '{"a":1}', '{a:<|"|>b}', '{a:<|"|>b<|"|><|"|>c<|"|>}', "{} "):
        assert not follows(either, f"<|tool_call>call:find{wrong}<tool_call|>", tokenizer), wrong


def test_calls_may_be_a_list(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, "{{ tools }}[TOOL_CALLS]", ["[TOOL_CALLS]"])
    form = CallFormat.of_model(tokenizer, {})
    either = held(tokenizer, form, structured_outputs={"json_object": True})
    for text in (f"[TOOL_CALLS]{LISTED}", LISTED):
        assert follows(either, text, tokenizer)
    assert parsed(form.parser(""), [LISTED]) == ("", [FIND, CLOSE], "tool_calls")
    assert follows(either, '{"any": [1]}', tokenizer)
    assert not follows(either, "[1]", tokenizer)


@pytest.mark.parametrize(
    ("form", "sampling"),
    [
        (None, {"response_format": FORMAT}),
        (CallFormat("required"), {"response_format": FORMAT}),
        (CallFormat("harmony"), {"response_format": FORMAT}),
        (CallFormat("hermes"), {"structured_outputs": {"regex": "a+"}}),
        (CallFormat("hermes"), {"response_format": {"type": "text"}}),
        (CallFormat("hermes"), {}),
    ],
)
def test_others_stay_as_they_are(form: CallFormat | None, sampling: dict[str, Any]) -> None:
    assert held(Tokenizer.from_pretrained(MODEL), form, **sampling) == SamplingSpec.model_validate(sampling)
