"""What fewer bits cost a model of yours: its perplexity on a text, in each precision.

    python benchmarks/perplexity.py MODEL [--text FILE] [--tokens 4096]

The text is cut into pieces of 512 tokens; without `--text` it is this project's licence. Perplexity is e to the mean of
what each token but a piece's first costs in nats. The last line is JSON.
"""

import argparse
import gc
import math
from pathlib import Path
from typing import Any

from report import print_result

from headrace import LLM, SamplingParams
from headrace.engine.errors import ConfigError

PIECE = 512
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "FP8 KV cache": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--tokens", type=int, default=4096, help="at most")
    options = parser.parse_args()
    text = options.text.read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    for name, precision in PRECISIONS.items():
        try:
            found[name] = measured(options.model, precision, text, options.tokens)
        except ConfigError as error:
            print(f"{name:<14}not here: {error}")
            continue
        print(f"{name:<14}{found[name]['perplexity']:8.3f}  of {found[name]['tokens']:,} tokens")
        gc.collect()
    print_result("perplexity", {"model": options.model, "text": str(options.text), "precisions": found})


def measured(model: str, precision: dict[str, Any], text: str, num_tokens: int) -> dict[str, Any]:
    """How likely the model of that precision finds the text. Raises `ConfigError` where it can not be had."""
    llm = LLM(model, max_model_len=2 * PIECE, **precision)
    ids = llm.get_tokenizer().encode(text)[:num_tokens]
    pieces = [ids[start : start + PIECE] for start in range(0, len(ids), PIECE)]
    costs: list[float] = []
    for result in llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False):
        after_the_first = zip(result.prompt_token_ids[1:], (result.prompt_logprobs or [])[1:], strict=True)
        costs += [-known[token].logprob for token, known in after_the_first if known is not None]
    return {"perplexity": math.exp(sum(costs) / len(costs)), "tokens": len(costs)}


if __name__ == "__main__":
    main()
