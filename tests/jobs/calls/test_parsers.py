"""Calls of tools are found in the texts that models write, whichever pieces these come in."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from headrace.engine.text.call_tags import DEEPSEEK
from headrace.engine.text.call_tags import DEEPSEEK_SEPARATOR as SEPARATOR
from headrace.jobs.calls.events import merged_calls
from headrace.jobs.calls.formats import CallFormat, Kind
from headrace.jobs.calls.written import no_texts
from headrace.jobs.streams.events import StreamEvent

from .written_calls import F, G, P, Q, parsed, separated

# What a model writes, the text of it, its calls.
HERMES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "no call": ("Hello <tool> there. \n", "Hello <tool> there. \n", []),
    "one": (F, "", [("f", {"a": 1})]),
    "two after a text": (f"Let me see.\n\n{F}\n{G}", "Let me see.", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "text behind": (f"{F} done", " done", [("f", {"a": 1})]),
    "blanks behind": (f"{F}\n{G} \n", "", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "no end": (F.removesuffix("</tool_call>"), "", [("f", {"a": 1})]),
    "no JSON": (" <tool_call>f(1)</tool_call>", " <tool_call>f(1)</tool_call>", []),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    "cut short": ('So: <tool_call>{"name": "f", "argu', 'So: <tool_call>{"name": "f", "argu', []),
    "no number": (F.replace("1", "1e999"), F.replace("1", "1e999"), []),
    "half a character": (F.replace("1", r'"\ud800"'), F.replace("1", r'"\ud800"'), []),
    "begun at the end": ("a <tool_ca", "a <tool_ca", []),
}


@pytest.mark.parametrize("case", HERMES)
def test_hermes_calls_are_found_however_they_come(case: str) -> None:
    written, text, calls = HERMES[case]
    wanted = text, calls, "tool_calls" if calls else "stop"
    assert parsed(CallFormat("hermes").parser(""), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(CallFormat("hermes").parser(""), [written[:cut], written[cut:]]) == wanted


def test_calls_beyond_the_most_stay_text() -> None:
    for pieces in ([F + G], [F, G], list(F + G)):
        assert parsed(CallFormat("hermes", most=1).parser(""), pieces) == (G, [("f", {"a": 1})], "tool_calls")


def test_text_comes_before_a_call_is_complete() -> None:
    parser = CallFormat("hermes").parser("")
    assert parser.add(StreamEvent(1, text="Let me see.\n<tool_call>")).text == "Let me see."


def test_a_forced_call_that_is_cut_short_stays_what_it_is() -> None:
    assert parsed(CallFormat("required").parser(""), ['[{"name"', ': "f'], "length") == ('[{"name": "f', [], "length")
    parser = CallFormat("named", "f").parser("")
    events = [parser.add(StreamEvent(1, text='{"a')), parser.add(StreamEvent(1, finish_reason="length"))]
    assert [call["function"]["arguments"] for call in merged_calls(events)] == ['{"a']
    assert events[-1].finish_reason == "length"


JSON: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "text": ("Hello.\n", "Hello.\n", []),
    "one": (f" {P}\n", "", [("f", {"a": 1})]),
    "a list": (f"[{P}, {Q}]", "", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "semicolons": (f"{P}; {Q}", "", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "another object": ('{"name": "Ada"}', '{"name": "Ada"}', []),
    "text behind": (f"{P} done", f"{P} done", []),
    "cut short": (P[:-3], P[:-3], []),
    "a bracket": ("[sic] Hello", "[sic] Hello", []),
}


@pytest.mark.parametrize("case", JSON)
def test_calls_in_json_are_found_however_they_come(case: str) -> None:
    written, text, calls = JSON[case]
    wanted = text, calls, "tool_calls" if calls else "stop"
    assert parsed(CallFormat("json").parser(""), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(CallFormat("json").parser(""), [written[:cut], written[cut:]]) == wanted
    # What is too much stays, as JSON.
    text, calls, _ = parsed(CallFormat("json", most=1).parser(""), [f"{P};{Q}"])
    assert (json.loads(text), calls) == ([json.loads(Q)], [("f", {"a": 1})])


# Which of the functions' parameters are no texts.
FUNCTIONS = {"f": ["a", "on"], "g": []}


def function(name: str, **arguments: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def pairs(name: str, **arguments: str) -> str:
    written = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>" for key, each in arguments.items())
    return f"<tool_call>{name}{written}\n</tool_call>"


# Each as its model writes it, the text of it, its calls.
OWN: dict[tuple[Kind, str], tuple[str, str, list[tuple[str, Any]]]] = {}
XML: tuple[tuple[Kind, Any], ...] = (("qwen3_coder", function), ("glm45", pairs))
for kind, write in XML:
    one, two = write("f", a='{"b": [1]}', on="True", c="3"), write("g", text="é\n</x>\n 1")
    both: list[tuple[str, Any]] = [
        ("f", {"a": {"b": [1]}, "on": True, "c": "3"}),
        ("g", {"text": "é\n</x>\n 1"}),
    ]
    OWN |= {
        (kind, "two after a text"): (f"Let me see.\n{one}\n{two}\n", "Let me see.", both),
        (kind, "nothing given"): (write("g"), "", [("g", {})]),
        (kind, "no JSON"): (write("f", a="[1", on="null"), "", [("f", {"a": "[1", "on": None})]),
        (kind, "text behind"): (f"{two} done", " done", both[1:]),
        (kind, "no call"): ("<tool_call>one two</tool_call>", "<tool_call>one two</tool_call>", []),
        (kind, "cut short"): (one[: one.index("</", 60)], one[: one.index("</", 60)], []),
    }
GEMMA = '<|tool_call>call:f{a:1,on:<|"|>é, "x": }<|"|>}<tool_call|>'
GEMMA_F: list[tuple[str, Any]] = [("f", {"a": 1, "on": 'é, "x": }'})]
OWN |= {
    ("gemma4", name): (f"<|tool_call>call:g{inside}<tool_call|>", "", [("g", arguments)])
    for name, inside, arguments in (
        ("nothing given", "{}", {}),
        (
            "values",
            "{a:[true,false,null],b:{c:-1.5e3,d:[]},e:{}}",
            {"a": [True, False, None], "b": {"c": -1500.0, "d": []}, "e": {}},
        ),
        ("blanks", ' { a : 1 , b : <|"|> c\n<|"|> }\n', {"a": 1, "b": " c\n"}),
        ("keys as texts", '{<|"|>a b<|"|>:1,"c":2}', {"a b": 1, "c": 2}),
        ("texts as JSON has them", '{a:["b, }\\"",\'c\'],d:{"e":"f"}}', {"a": ['b, }"', "c"], "d": {"e": "f"}}),
        (
            "texts as they are",
            "{a:celsius,b:[New York,5 km],c:True,1:it's}",
            {"a": "celsius", "b": ["New York", "5 km"], "c": True, "1": "it's"},
        ),
        ("as it was seen", '{a:<|"|>"""b"""<|"|>,c=["d"],e="f, \\"g\\""}', {"a": '"""b"""', "c": ["d"], "e": 'f, "g"'}),
        ("an empty text", '{a:<|"|><|"|>}', {"a": ""}),
    )
}
OWN |= {
    ("gemma4", name): (written, written, [])
    for name, written in (
        ("text", "call:f{a:1}"),
        ("another's form", P),
        ("no arguments", "<|tool_call>call:f<tool_call|>"),
        ("no name", "<|tool_call>call:{a:1}<tool_call|>"),
        ("no value", "<|tool_call>call:f{a}<tool_call|>"),
        ("a text without an end", '<|tool_call>call:f{a:<|"|>b}<tool_call|>'),
        ("cut short", GEMMA[:-14]),
        ("begun at the end", "a <|tool_ca"),
    )
}
OWN |= {
    ("gemma4", "two after a text"): (
        f"Let me see.\n{GEMMA}<|tool_call>call:g{{}}<tool_call|>",
        "Let me see.",
        [*GEMMA_F, ("g", {})],
    ),
    ("gemma4", "text behind"): (f"{GEMMA} done", " done", GEMMA_F),
    ("gemma4", "no end"): (GEMMA.removesuffix("<tool_call|>"), "", GEMMA_F),
    ("glm45", "cut between"): (pairs("g", b="1")[:-13], pairs("g", b="1")[:-13], []),
    ("mistral", "one"): ('f{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "two"): ('f{"a": 1}g{"b": "}{"}', "", [("f", {"a": 1}), ("g", {"b": "}{"})]),
    ("mistral", "with its marks"): (
        '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    ("mistral", "numbered"): ('fabcdefgh1{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "text"): ("good morning, {all}", "good morning, {all}", []),
    ("mistral", "text behind"): ('f{"a": 1} done', "done", [("f", {"a": 1})]),
    ("mistral", "another name"): ('h{"a": 1}', 'h{"a": 1}', []),
    ("mistral", "cut short"): ('f{"a": ', 'f{"a": ', []),
    # What follows `to` in a message's header, without the special tokens, and the message.
    ("harmony", "behind the channel"): ('=functions.f json{"a": 1}', "", [("f", {"a": 1})]),
    ("harmony", "in front of it"): (' to=functions.gcommentary json{"b": "}{"}', "", [("g", {"b": "}{"})]),
    ("harmony", "without its form"): ("=functions.gcommentary{}", "", [("g", {})]),
    ("harmony", "text"): ("to whom it may concern", "to whom it may concern", []),
    ("harmony", "another name"): ("=functions.h json{}", "=functions.h json{}", []),
    ("harmony", "another tool"): ("=python code1 + 1", "=python code1 + 1", []),
    ("harmony", "cut short"): ('=functions.f json{"a": ', '=functions.f json{"a": ', []),
}
# Calls of f and g as forms have them that write several together, what ends them there, and what none of them is.
BLOCKS: dict[Kind, tuple[str, str, Sequence[str]]] = {
    "seed_oss": (
        "<seed:tool_call><function=f><parameter=a>1</parameter></function></seed:tool_call>"
        "<seed:tool_call><function=g></function></seed:tool_call>",
        "</seed:tool_call>",
        ["<seed:tool_call>f(1)</seed:tool_call>"],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="g">\n</invoke>\n</minimax:tool_call>',
        "</minimax:tool_call>",
        [
            '<minimax:tool_call><invoke name="f">1</invoke></minimax:tool_call>',
            '<minimax:tool_call><invoke name="g"></invoke>\nand</minimax:tool_call>',
        ],
    ),
    "deepseek_v3": (
        separated(f'f{SEPARATOR}{{"a": 1}}', f"function{SEPARATOR}g\n```json\n{{}}\n```"),
        DEEPSEEK.end,
        [separated(f"f{SEPARATOR}1"), separated("f{}"), separated(f"f{SEPARATOR}{{}}", "")],
    ),
    "hunyuan": (
        '<tool_calls>\n[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]\n</tool_calls>',
        "</tool_calls>",
        ['<tool_calls>{"name": "f", "arguments": {}}</tool_calls>', '<tool_calls>[{"name": "f"}]</tool_calls>'],
    ),
    "nemotron": (
        '<TOOLCALL>[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]</TOOLCALL>',
        "</TOOLCALL>",
        ["<TOOLCALL>[f(a=1)]</TOOLCALL>"],
    ),
    "cohere": (
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}},\n'
        '{"tool_call_id": "1", "tool_name": "g", "parameters": {}}]<|END_ACTION|>',
        "<|END_ACTION|>",
        ["<|START_ACTION|>[1]<|END_ACTION|>"],
    ),
    "apertus": (
        '<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>',
        "<|tools_suffix|>",
        ['<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>'],
    ),
    "lfm2": (
        "<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>",
        "<|tool_call_end|>",
        [f"<|tool_call_start|>{each}<|tool_call_end|>" for each in ("[]", "[f]", "[f(), 1]", "[f(1)]")],
    ),
    "olmo3": (
        "<function_calls>\nf(a=1)\ng()\n</function_calls>",
        "</function_calls>",
        [
            f"<function_calls>{each}</function_calls>"
            for each in ("f(1)", "f", "f(a=b)", "f(**a)", "f()()", "a = 1", "f(a=b'')", "f(a=1e999)")
        ],
    ),
}
for kind, (block, end, wrong) in BLOCKS.items():
    both = [("f", {"a": 1}), ("g", {})]
    OWN |= {
        (kind, "two after a text"): (f"Let me see.\n{block}\n", "Let me see.", both),
        (kind, "text behind"): (f"{block} done", " done", both),
        (kind, "no end"): (block.removesuffix(end), "", both),
        **{(kind, each): (each, each, []) for each in wrong},
    }
OWN["olmo3", "values"] = (
    '<function_calls>m.f(a="b)\\n\\"", c=[true, None, -1.5], d={"e": false})</function_calls>',
    "",
    [("m.f", {"a": 'b)\n"', "c": [True, None, -1.5], "d": {"e": False}})],
)


@pytest.mark.parametrize("case", OWN, ids=" ".join)
def test_other_forms_are_found_however_they_come(case: tuple[Kind, str]) -> None:
    written, text, calls = OWN[case]
    wanted = text, calls, "tool_calls" if calls else "stop"
    form = CallFormat(case[0], functions=FUNCTIONS)
    assert parsed(form.parser(""), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(form.parser(""), [written[:cut], written[cut:]]) == wanted
    most = CallFormat(case[0], most=1, functions=FUNCTIONS)
    for pieces in ([written], list(written)):
        text, one, _ = parsed(most.parser(""), pieces)
        assert one == calls[:1]
        assert bool(text) or len(calls) < 2


def test_text_that_cannot_become_a_call_comes_at_once() -> None:
    parser = CallFormat("mistral", functions=FUNCTIONS).parser("")
    assert [parser.add(StreamEvent(number, text=text)).text for number, text in enumerate("Hey", 1)] == ["H", "e", "y"]


def test_what_a_parameter_may_be_is_read_off_its_schema() -> None:
    schema = {
        "$defs": {"Size": {"enum": [1, 2]}, "Name": {"type": ["string", "null"]}},
        "properties": {
            "number": {"type": "integer"},
            "size": {"$ref": "#/$defs/Size"},
            "name": {"$ref": "#/$defs/Name"},
            "maybe": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "either": {"anyOf": [{"type": "object"}, {"type": "string"}]},
            "any": {},
            "true": True,
            "none": {"const": None},
            "list": {"type": "array"},
            "lost": {"$ref": "#/$defs/Nothing"},
        },
    }
    assert no_texts(schema) == ["number", "size", "maybe", "none", "list"]
    assert no_texts({}) == []


@pytest.mark.parametrize("end", ["stop", "length"])
def test_required_calls_are_told_as_they_come(end: str) -> None:
    one, two = '{"a": "}]\\\\", "b": [{"c": "\\"{"}]}', "{}"
    written = f'[{{"name": "f", "parameters": {one}}}, {{"name": "g\\"", "parameters": {two}}}]'
    calls = [("f", json.loads(one)), ('g"', {})]
    for pieces in ([written], list(written), *([written[:cut], written[cut:]] for cut in range(len(written)))):
        wanted = "tool_calls" if end == "stop" else end
        assert parsed(CallFormat("required").parser(""), pieces, end) == ("", calls, wanted)
    parser, told = CallFormat("required").parser(""), ""
    for place, character in enumerate(written, 1):
        event = parser.add(StreamEvent(place, text=character))
        told += "".join(delta.arguments for delta in event.calls)
        # What is known of the arguments is told at once.
        if place <= written.index(one) + len(one):
            assert told == one[: max(0, place - written.index(one))]
    cut = CallFormat("required").parser("")
    events = [cut.add(StreamEvent(1, text=written[:40])), cut.add(StreamEvent(2, finish_reason="length"))]
    [call] = merged_calls(events)
    assert one.startswith(call["function"]["arguments"])
    assert events[-1].finish_reason == "length"
