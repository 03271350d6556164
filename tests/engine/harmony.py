"""A model that writes in harmony's format, made of one that does not."""

import json
from pathlib import Path
from shutil import copytree

_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + message['content'] + '<|end|>' }}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
_NAMES = {
    "<|endoftext|>": "<|channel|>",
    "<|system|>": "<|message|>",
    "<|user|>": "<|start|>",
    "<|assistant|>": "<|end|>",
    "<|end|>": "<|return|>",
}


def harmony_copy(model: Path, folder: Path) -> Path:
    """The tickets model, whose special tokens are harmony's; it ends its answers with `<|return|>`."""
    copytree(model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = _NAMES[token["content"]]
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {_NAMES.get(text, text): number for text, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.update(chat_template=_TEMPLATE, bos_token=None, pad_token=None, eos_token="<|return|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
