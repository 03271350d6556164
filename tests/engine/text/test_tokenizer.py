"""Text to ids and back, and chats to prompts, as transformers does it."""

import json
from pathlib import Path
from shutil import copytree

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Replace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.text.segments import SegmentEncoder
from headrace.engine.text.tokenizer import Tokenizer

TEXTS = ["plain", "  spaces  and\n\nlines\t", "naïve café 😀 漢字", "", "</s> inside <s>"]
CHATS = [
    [{"role": "user", "content": "hello"}],
    [{"role": "system", "content": "  be brief "}, {"role": "user", "content": "hé\n"}],
    [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
]


@pytest.fixture
def folder(tmp_path, chat_folder) -> Path:
    """A copy of the model folder to break."""
    return Path(copytree(chat_folder, tmp_path / "model"))


@pytest.fixture(scope="module")
def tokenizer(chat_folder) -> Tokenizer:
    return Tokenizer.from_pretrained(chat_folder)


@pytest.fixture(scope="module")
def oracle(chat_folder):
    return AutoTokenizer.from_pretrained(chat_folder)


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_is_transformers(tokenizer, oracle, text):
    for special in (True, False):
        assert tokenizer.encode(text, add_special_tokens=special) == oracle.encode(text, add_special_tokens=special)


def test_a_batch_is_encoded_as_its_texts_are(tokenizer):
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


@pytest.mark.parametrize("single", ["$A", "<s> $A", "$A </s>", "<s> <s> $A </s>"])
def test_what_is_put_around_each_text_of_a_batch_is_put_around_pieces_of_it(tokenizer, single, monkeypatch):
    fast = FastTokenizer.from_str(tokenizer.fast.to_str())
    fast.post_processor = TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    ours, pack_batch = Tokenizer(tokenizer.folder, fast, {}), SegmentEncoder.pack_batch
    packed: list[list[str]] = []

    def noted(self, texts):
        packed.append(texts)
        return pack_batch(self, texts)

    monkeypatch.setattr(SegmentEncoder, "pack_batch", noted)
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert packed == [TEXTS]


def test_where_a_tokenizer_knows_no_text_to_put_tokens_around_it_is_left_to_itself():
    fast = FastTokenizer(WordLevel({"b": 2}, unk_token="b"))
    fast.post_processor = TemplateProcessing(single="[s] $A", special_tokens=[("[s]", 0)])
    fast.normalizer = Replace("a", "")
    ours = Tokenizer(Path(), fast, {})
    assert ours.encode_batch(["b", "a", ""]) == [ours.encode(text) for text in ("b", "a", "")]


@pytest.mark.parametrize("text", TEXTS[:-1])
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_are_left_out_of_the_text(tokenizer, oracle):
    ids = tokenizer.encode("</s> inside <s>")
    assert {0, 1} <= set(ids)
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == " inside "


@pytest.mark.parametrize("chat", CHATS, ids=["user", "system", "turns"])
def test_chats_are_rendered_as_transformers_does(tokenizer, oracle, chat):
    rendered = tokenizer.apply_chat_template(chat)
    assert rendered == oracle.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = oracle.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(rendered, add_special_tokens=False) == ids


@pytest.mark.parametrize(
    "source",
    [
        "{{ strftime_now('%Y') }}{% if strftime_now is defined %}dated{% endif %}",
        "{% for m in messages %} {%- generation -%} {{ m.role }}{% set x = 1 %}{%- endgeneration %}{{ x }}{% endfor %}",
        "{{ messages[0] | tojson(ensure_ascii=False) }}{{ messages | tojson(ensure_ascii=True, sort_keys=True) }}",
        "{{ messages[-1] | tojson(separators=(',', ':'), indent=1) }}",
    ],
    ids=["date", "generation", "unicode", "spacing"],
)
def test_what_templates_may_use_is_what_transformers_has(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHATS[1], tokenize=False, add_generation_prompt=True
    )
    assert Tokenizer.from_pretrained(folder).apply_chat_template(CHATS[1]) == expected


def test_the_template_may_stand_in_tokenizer_config(folder, tokenizer):
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    for spelling in (source, [{"name": "other", "template": "x"}, {"name": "default", "template": source}]):
        file.write_text(json.dumps({**config, "chat_template": spelling, "bos_token": {"content": "<s>"}}))
        rendered = Tokenizer.from_pretrained(folder).apply_chat_template(CHATS[1])
        assert rendered == tokenizer.apply_chat_template(CHATS[1])


def test_models_that_read_images_may_have_their_template_in_a_file_of_its_own(folder, tokenizer):
    """As transformers' processors wrote it; what the tokenizer says goes before it."""
    source = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": source}))
    rendered = Tokenizer.from_pretrained(folder).apply_chat_template(CHATS[1])
    assert rendered == tokenizer.apply_chat_template(CHATS[1])
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": "its own"}))
    assert Tokenizer.from_pretrained(folder).apply_chat_template(CHATS[1]) == "its own"


def test_conversations_with_tools_may_have_a_template_of_their_own(folder):
    """As those of Hermes 2 and 3."""
    (folder / "chat_template.jinja").unlink()
    file = folder / "tokenizer_config.json"
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].name }}"}]
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": templates}))
    tokenizer, tools = Tokenizer.from_pretrained(folder), [{"name": "f"}]
    assert tokenizer.apply_chat_template(CHATS[0]) == "plain"
    assert tokenizer.apply_chat_template(CHATS[0], tools=tools) == "f"
    oracle = AutoTokenizer.from_pretrained(folder)
    assert oracle.apply_chat_template(CHATS[0], tools=tools, tokenize=False) == "f"
    assert tokenizer.tools_template_has("tools")


def test_further_templates_may_be_files_of_their_own(folder):
    """As transformers saves a tokenizer that has several."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    # What files say goes before it.
    config["chat_template"] = [{"name": "default", "template": "none"}, {"name": "old", "template": "none"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text("plain")
    (folder / "additional_chat_templates").mkdir()
    for name, source in {"tool_use": "{{ tools[0].name }}", "rag": "{{ documents[0].title }}"}.items():
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)
    tokenizer, oracle = Tokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    told = {"documents": [{"title": "found", "text": "it"}]}
    for tools, template in ((None, None), ([{"name": "f"}], None), ([{"name": "f"}], "default"), (None, "rag")):
        written = tokenizer.apply_chat_template(CHATS[0], told, tools or (), chat_template=template)
        assert written == oracle.apply_chat_template(
            CHATS[0], tools=tools, chat_template=template, tokenize=False, **told
        )
    assert tokenizer.tools_template_has("tools")
    # What is no name is a template.
    assert tokenizer.apply_chat_template(CHATS[0], chat_template="old") == "old"


def test_a_model_without_a_template(folder):
    (folder / "chat_template.jinja").unlink()
    tokenizer = Tokenizer.from_pretrained(folder)
    assert not tokenizer.has_chat_template
    with pytest.raises(ModelError, match="no chat template: use plain prompts"):
        tokenizer.apply_chat_template(CHATS[0])


def test_a_template_that_is_no_text(folder):
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": [{"name": "default", "template": 5}]}))
    with pytest.raises(ModelError, match="malformed chat template: it must be a text, not 5"):
        Tokenizer.from_pretrained(folder).apply_chat_template(CHATS[0])


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "tool", "content": "x"}], "no tools here"),
        ([{"content": "no role"}], "the model's chat template refuses the messages"),
    ],
)
def test_messages_the_template_refuses(tokenizer, chat, message):
    with pytest.raises(InvalidRequestError, match=message):
        tokenizer.apply_chat_template(chat)


def test_a_template_cannot_reach_into_the_process(folder):
    (folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(InvalidRequestError):
        Tokenizer.from_pretrained(folder).apply_chat_template(CHATS[0])


def test_a_missing_tokenizer(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer(folder, name):
    (folder / name).write_text('{"model": ')
    with pytest.raises(ModelError, match=name):
        Tokenizer.from_pretrained(folder)
