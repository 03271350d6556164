"""Model folders for tests of the queue side, where a tokenizer is wanted but no weights."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers

from ..engine.fakes import CONTEXT, END_TOKEN_ID, VOCAB_SIZE

WORDS = ("<end>", *"abcdefghij")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<' + message['role'] + '>' + message['content'] + ' ' }}"
    "{% endfor %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "max_position_embeddings": CONTEXT,
    "eos_token_id": END_TOKEN_ID,
}


def write_model_folder(folder: Path, chat: bool = False, **config: Any) -> Path:
    """A folder without weights whose tokens are the words a to j, as the fake runner knows them."""
    folder.mkdir(parents=True)
    words = models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="j")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([WORDS[END_TOKEN_ID]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if chat:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder
