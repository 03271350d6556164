"""A model that thinks and calls tools as Gemma 4 does, made of one that does neither."""

import json
from pathlib import Path
from shutil import copytree

# What the published templates do, in few words. The small models' (E2B, E4B) do not end the thinking themselves.
_TEMPLATE = """
{%- macro value(it) -%}
{%- if it is string -%}<|"|>{{ it }}<|"|>
{%- elif it is boolean -%}{{ 'true' if it else 'false' }}
{%- elif it is mapping -%}{ {{- pairs(it) -}} }
{%- elif it is iterable -%}[{%- for each in it -%}{{ value(each) }}{{ ',' if not loop.last }}{%- endfor -%}]
{%- else -%}{{ it }}{%- endif -%}
{%- endmacro -%}
{%- macro pairs(it) -%}
{%- for key, each in it | dictsort -%}{{ key }}:{{ value(each) }}{{ ',' if not loop.last }}{%- endfor -%}
{%- endmacro -%}
{{- bos_token -}}
{%- if tools or enable_thinking is defined and enable_thinking -%}
{{- '<|turn>system\n' -}}
{%- if enable_thinking is defined and enable_thinking -%}{{ '<|think|>\n' }}{%- endif -%}
{%- for tool in tools or [] -%}<|tool>declaration:{{ tool.function.name }}{}<tool|>{%- endfor -%}
{{- '<turn|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|tool_response>response:{{ message.name or 'unknown' }}{value:{{ value(message.content) }}}<tool_response|>
{%- else -%}
{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' -}}
{%- for call in message.tool_calls or [] -%}
<|tool_call>call:{{ call.function.name }}{ {{- pairs(call.function.arguments) -}} }<tool_call|>
{%- endfor -%}
{%- if message.content -%}{{ message.content.split('<channel|>')[-1] + '<turn|>\n' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{%- if messages[-1].role != 'tool' -%}{{ '<|turn>model\n' ENDING }}
{%- elif enable_thinking is defined and enable_thinking -%}{{ '<|channel>thought\n' }}{%- endif -%}
{%- endif -%}
"""
_ENDING = "+ ('' if enable_thinking is defined and enable_thinking else '<|channel>thought\\n<channel|>')"
_NAMES = {
    "<|endoftext|>": "<bos>",
    "<|system|>": "<|channel>",
    "<|user|>": "<|turn>",
    "<|assistant|>": "<channel|>",
    "<|end|>": "<turn|>",
}
# In place of characters that control a terminal.
_FURTHER = (
    *("<|think|>", '<|"|>', "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>"),
)


def gemma4_copy(model: Path, folder: Path, is_small: bool = False) -> Path:
    """The tickets model, some of whose tokens are Gemma 4's; it ends its answers with `<turn|>`."""
    copytree(model, folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        token["content"] = _NAMES[token["content"]]
    vocabulary = tokenizer["model"]["vocab"]
    names = _NAMES | {chr(0x101 + place): text for place, text in enumerate(_FURTHER)}
    flags = {**tokenizer["added_tokens"][0], "special": True}
    tokenizer["added_tokens"] += [{**flags, "id": vocabulary[old], "content": names[old]} for old in [*names][5:]]
    tokenizer["model"]["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = _TEMPLATE.replace("ENDING", "" if is_small else _ENDING)
    config.update(chat_template=template, bos_token="<bos>", pad_token=None, eos_token="<turn|>")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
