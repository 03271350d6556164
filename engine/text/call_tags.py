"""Between which tags models call tools whose texts would be no calls without them. Free of torch."""

from typing import NamedTuple


class Tags(NamedTuple):
    """What begins and ends a call, or several."""

    begin: str
    end: str


GEMMA = Tags("<|tool_call>", "<tool_call|>")
# Around each text in one of Gemma's.
GEMMA_QUOTE = '<|"|>'
SEED = Tags("<seed:tool_call>", "</seed:tool_call>")
MINIMAX = Tags("<minimax:tool_call>", "</minimax:tool_call>")
DEEPSEEK = Tags("<\uff5ctool▁calls▁begin\uff5c>", "<\uff5ctool▁calls▁end\uff5c>")
# Around each call of DeepSeek's, and within it.
DEEPSEEK_CALL = Tags("<\uff5ctool▁call▁begin\uff5c>", "<\uff5ctool▁call▁end\uff5c>")
DEEPSEEK_SEPARATOR = "<\uff5ctool▁sep\uff5c>"
COHERE = Tags("<|START_ACTION|>", "<|END_ACTION|>")
APERTUS = Tags("<|tools_prefix|>", "<|tools_suffix|>")
LFM = Tags("<|tool_call_start|>", "<|tool_call_end|>")
HUNYUAN = Tags("<tool_calls>", "</tool_calls>")
NEMOTRON = Tags("<TOOLCALL>", "</TOOLCALL>")
OLMO = Tags("<function_calls>", "</function_calls>")

# Some vocabularies have them as special tokens, which texts are without otherwise.
WRITTEN = frozenset(
    (*GEMMA, GEMMA_QUOTE, *SEED, *MINIMAX, *DEEPSEEK, *DEEPSEEK_CALL, DEEPSEEK_SEPARATOR, *COHERE, *APERTUS, *LFM)
)
