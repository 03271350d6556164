"""Whether a model thinks, as its chat template tells: in the forms of published ones, shortened."""

import json

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.text.tokenizer import Tokenizer

from ..thinking import TICKETS, thinking_copy

READ = (
    "{% set content = m.content %}{% if '</think>' in content %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
)
# Qwen3's, of its earlier and of its later instructed models.
WRITTEN = READ + "{% if loop.last %}{{ '<think>\n\n</think>\n\n' + content }}{% else %}{{ content }}{% endif %}"
ASKED = "{% if add_generation_prompt %}{{ '<|assistant|>' }}"


def turns(turn: str = "{{ m.content }}") -> str:
    return "{% for m in messages %}{{ '<|' + m.role + '|>' }}" + turn + "{% endfor %}"


THINKING = {
    "Qwen3": turns(WRITTEN) + ASKED + "{% if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{% endif %}",
    "QwQ": turns(READ) + ASKED + "{{ '<think>\n' }}{% endif %}",
    "GLM": turns(WRITTEN) + ASKED + "{{ '<think></think>' if (enable_thinking is false) else '' }}{% endif %}",
    "OLMo": turns("{{ m.content }}{% if loop.last and add_generation_prompt %}{{ '<think>' }}{% endif %}"),
    "Magistral": "{% set default = 'Think in <think>…</think>.' %}{{ default }}" + turns(),
    "Seed": "{% set begin = '<think>' %}" + turns() + ASKED + "{% if budget == 0 %}{{ begin }}{% endif %}{% endif %}",
    "V3.1": turns(READ) + ASKED + "{% if not thinking %}{{ '</think>' }}{% endif %}{% endif %}",
    "R1-0528": turns(READ) + "{% if add_generation_prompt %}{{'<\uff5cAssistant\uff5c>'}}{% endif %}",
}
INSTRUCTED = {
    "Qwen3-2507": turns(WRITTEN) + ASKED + "{% endif %}",
    "strips": turns(READ + "{{ content }}") + ASKED + "{% endif %}",
    "replaces": turns("{{ m.content | replace('<think>', '') }}"),
    "asks": "{% if '<think>' in messages[-1].content %}{{ raise_exception('no <think>') }}{% endif %}" + turns(),
    "comments": "{# <think> #}" + turns(),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return thinking_copy(TICKETS, tmp_path_factory.mktemp("thinker"))


def tokenizer_with(folder, template: str) -> Tokenizer:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    return Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template", THINKING.values(), ids=THINKING)
def test_a_model_thinks_whose_template_begins_or_forbids_it(folder, template):
    assert tokenizer_with(folder, template).reasoning(True) is not None


@pytest.mark.parametrize("template", INSTRUCTED.values(), ids=INSTRUCTED)
def test_what_is_done_with_earlier_turns_tells_nothing_of_the_model(folder, template):
    tokenizer = tokenizer_with(folder, template)
    assert "hello" in tokenizer.apply_chat_template([{"role": "user", "content": "hello"}])
    with pytest.raises(InvalidRequestError, match="reasoning: the model does not think"):
        tokenizer.reasoning(True)
    assert tokenizer.reasoning(False) is None


def test_a_template_is_told_to_have_the_model_think(folder):
    template = turns() + ASKED + "{{ '<think>' if thinking else '</think>' }}{% endif %}"
    tokenizer = tokenizer_with(folder, template)
    chat = [{"role": "user", "content": "hello"}]
    told = {thinks: tokenizer.template_kwargs({}, thinks) for thinks in (True, False, None)}
    assert tokenizer.apply_chat_template(chat, told[True]).endswith("<think>")
    for thinks in (False, None):
        assert tokenizer.apply_chat_template(chat, told[thinks]).endswith("</think>")
    assert told[True] == {"enable_thinking": True, "thinking": True}
    assert tokenizer.template_kwargs({"thinking": False}, thinks=True)["thinking"] is False


@pytest.mark.parametrize(
    ("markers", "template"),
    [
        (("<|inner_prefix|>", "<|inner_suffix|>"), "{% set inner = '<|inner_prefix|>' %}" + turns()),
        # Mistral Small 4's, which thinks where that says so.
        (("[THINK]", "[/THINK]"), "[MODEL_SETTINGS]{{ effort }}[/MODEL_SETTINGS]" + turns("{{ '[THINK][/THINK]' }}")),
    ],
)
def test_models_think_between_tokens_of_their_own(tmp_path, markers, template):
    folder = thinking_copy(TICKETS, tmp_path)
    text = (folder / "tokenizer.json").read_text()
    for old, new in zip(("<think>", "</think>"), markers, strict=True):
        text = text.replace(old, new)
    (folder / "tokenizer.json").write_text(text)
    thinking = tokenizer_with(folder, template).reasoning(True)
    assert thinking is not None
    tokenizer = Tokenizer.from_pretrained(folder)
    assert [tokenizer.decode([token], False) for token in (thinking.start_token_id, thinking.end_token_id)] == [
        *markers
    ]
