"""A model that thinks, made of one that does not."""

import json
from pathlib import Path
from shutil import copytree

TICKETS = Path(__file__).parents[2] / "examples/tickets/model"
_TEMPLATE = (
    "{% if tools %}{{ '<|user|>' + tools | tojson + ' <tool_call>' + '<|end|>' }}{% endif %}"
    "{% for message in messages %}{{ '<|user|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}"
    "{% elif open is defined and open %}{{ '<think>\n' }}{% endif %}{% endif %}"
)


def thinking_copy(model: Path, folder: Path) -> Path:
    """The tickets model, two of whose special tokens are markers of thinking; as Qwen3's they are no special ones."""
    copytree(model, folder, dirs_exist_ok=True)
    names = {"<|endoftext|>": "<think>", "<|system|>": "</think>"}
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] in names:
            token.update(content=names[token["content"]], special=False)
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config.update(chat_template=_TEMPLATE, bos_token=None, pad_token=None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
