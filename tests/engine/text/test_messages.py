"""Calls that a conversation has had reach its template with their arguments as objects."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from headrace.engine.text.tokenizer import Tokenizer

MODEL = Path(__file__).parents[3] / "examples/tickets/model"
TEMPLATE = (
    "{% for message in messages %}{% for call in message.tool_calls or () %}"
    "{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}{% endfor %}"
)


def test_arguments_that_are_added_to_a_text_are_json(tmp_path: Path) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    template = "{% set given = messages[0].tool_calls[0].function.arguments %}"
    written = template + "{{ 'f:' + given + ';' }}{{ given + '' }}{{ given.a }}{{ given is mapping }}"
    (folder / "chat_template.jinja").write_text(written)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":  1}'}}
    text = Tokenizer.from_pretrained(folder).apply_chat_template([{"role": "assistant", "tool_calls": [call]}])
    assert text == 'f:{"a":  1};{"a":  1}1True'


@pytest.mark.parametrize(
    ("arguments", "written"),
    [('{"a": "é"}', '{"a": "é"}'), ({"a": 1}, '{"a": 1}'), ("no JSON", '"no JSON"'), (None, "null")],
)
def test_arguments_are_objects_where_they_are_json(tmp_path: Path, arguments: Any, written: str) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call, call]}]
    before = json.dumps(chat)
    assert Tokenizer.from_pretrained(folder).apply_chat_template(chat) == f"1f{written}" * 2
    assert json.dumps(chat) == before
