"""Model folders for tests of the queue side, where a tokenizer is wanted but no weights."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Decoder

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


def write_model_folder(
    folder: Path, chat: bool = False, words: Sequence[str] = WORDS, decoder: Decoder | None = None, **config: Any
) -> Path:
    """A folder without weights whose tokens are the words a to j, or others, as many as the fake runner knows.

    `decoder`: what makes a text of them; without one they stand with spaces between them.
    """
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([words[END_TOKEN_ID]])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if chat:
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
    return folder
