"""A frame gives what the template gives, whatever the text; where a text may matter there is none."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from headrace.engine.errors import InvalidRequestError
from headrace.engine.text.tokenizer import Tokenizer

TEXTS = [
    "hello",
    "",
    "  spaces \n\n",
    "\x1c\u3000both\u00a0",
    "{{ braces }}",
    "{% raw %}",
    "<|im_end|>",
    "\uf8f0headrace\uf8f1",
]
LOOP = "{% for message in messages %}<BODY>{% endfor %}"
CHATML = "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
COPYING = {
    "ChatML": CHATML,
    "attributes": "{{ message.role }}: {{ message.content }}\n",
    "stripped": "{{ '<|' ~ message['role'] ~ '|>' + (message['content'] | trim) + '<|end|>' }}",
    "refuses roles": "{% if message['role'] not in ['system', 'user'] %}"
    "{{ raise_exception('no ' + message['role']) }}{% endif %}" + CHATML,
    "says who is first": "{% if loop.first and messages[0]['role'] != 'system' %}{{ bos_token }}Be kind.{% endif %}"
    + CHATML,
    "asks for tools": "{% if tools is defined and tools %}{{ bos_token }}{% endif %}" + CHATML,
}
NOT_COPYING = {
    "upper case": "{{ message['content'] | upper }}",
    "stripped of something": "{{ message['content'] | trim('x') }}",
    "all stripped": "{{ ('a ' + message['content']) | trim }}",
    "asks for the text": "{% if 'think' in message['content'] %}{{ bos_token }}{% endif %}{{ message['content'] }}",
    "its length": "{{ message['content'] | length }}{{ message['content'] }}",
    "a part": "{{ message['content'][:3] }}",
    "a method": "{{ message['content'].split('x')[-1] }}",
    "one or the other": "{{ message['content'] if message['content'] else 'nothing' }}",
    "as JSON": "{{ message | tojson }}",
    "all as JSON": "{{ messages | tojson }}{{ message['content'] }}",
    "kept in a variable": "{% set text = message['content'] %}{{ text | upper }}",
    "captured": "{% set text %}{{ message['content'] }}{% endset %}{{ text | upper }}",
    "filtered": "{% filter upper %}{{ message['content'] }}{% endfilter %}",
    "the next message": "{{ loop.nextitem['content'] | upper }}{{ message['content'] }}",
    "under another name": "{{ message['con' + 'tent'] | upper }}{{ message['content'] }}",
    "copied twice": "{{ message['content'] }}{{ message['content'] }}",
    "stripped here, not there": "{% if loop.first %}{{ message['content'] | trim }}{% endif %}"
    "{% if not loop.first %}{{ message['content'] }}{% endif %}",
    "leaves the text out": "{{ message['role'] }}",
    "refuses the text": "{{ raise_exception(message['content']) }}{{ message['content'] }}",
    "a macro": "{% macro shout(text) %}{{ text | upper }}{% endmacro %}{{ shout(message['content']) }}",
}


def tokenizer(folder: Path, body: str) -> Tokenizer:
    FastTokenizer(WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    template = LOOP.replace("<BODY>", body) + "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    config = {"chat_template": template, "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("system", [None, "Be brief."])
@pytest.mark.parametrize("name", COPYING)
def test_a_frame_gives_what_the_template_gives(tmp_path, name, system):
    made = tokenizer(tmp_path, COPYING[name])
    frame = made.chat_frame(system)
    assert frame is not None
    opening = [{"role": "system", "content": system}] if system else []
    for text in TEXTS:
        assert frame.around(text) == made.apply_chat_template([*opening, {"role": "user", "content": text}])


@pytest.mark.parametrize("name", NOT_COPYING)
def test_there_is_none_where_a_text_may_matter(tmp_path, name):
    made = tokenizer(tmp_path, NOT_COPYING[name])
    assert made.chat_frame(None) is None


def test_what_the_template_refuses_is_refused(tmp_path):
    made = tokenizer(tmp_path, "{{ raise_exception('no ' + message['role']) }}{{ message['content'] }}")
    with pytest.raises(InvalidRequestError, match="no user"):
        made.chat_frame(None)
