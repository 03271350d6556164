"""transformers as a careful user runs it: a shared prefix is computed once and its cache expanded, batches of 32.

Rows are sorted by the tokens they want, so that a batch ends together.
"""

import copy
from typing import Any

import torch
import transformers
from protocol import Generate, Prompts, by_prefix, serve

BATCH = 32
PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


@torch.inference_mode()
def continue_batch(model: Any, past: Any, prefix: int, prompts: Prompts, max_tokens: list[int]) -> Any:
    """Greedy tokens after each prompt, [rows, longest of max_tokens]; `past` holds the `prefix` first tokens of all."""
    rows, longest = len(prompts), max(map(len, prompts)) - prefix
    # Padded on the left, so that every row's last token is in the last column.
    tokens = torch.tensor([[0] * (longest - len(p) + prefix) + p[prefix:] for p in prompts])
    mask = torch.tensor([[1] * prefix + [0] * (longest - len(p) + prefix) + [1] * (len(p) - prefix) for p in prompts])
    found = []
    for _ in range(max(max_tokens)):
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        out = model(
            tokens, attention_mask=mask, position_ids=positions, past_key_values=past, use_cache=True, logits_to_keep=1
        )
        past, tokens = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
        found.append(tokens)
        mask = torch.cat([mask, mask.new_ones(rows, 1)], dim=1)
    return torch.cat(found, dim=1).tolist()


@torch.inference_mode()
def prefix_cache(model: Any, prefix: list[int]) -> Any:
    if not prefix:
        return None
    return model(torch.tensor([prefix]), use_cache=True, logits_to_keep=1).past_key_values


def expanded(cache: Any, rows: int) -> Any:
    if cache is None:
        return None
    own = copy.deepcopy(cache)
    own.batch_repeat_interleave(rows)
    return own


def load(model: str, precision: str, _: int) -> Generate:
    engine = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=precision).eval()

    def generate(prompts: Prompts, max_tokens: list[int], shared: int) -> list[list[int]]:
        found: list[list[int]] = [[]] * len(prompts)
        for prefix, rows in by_prefix(prompts, shared):
            cache = prefix_cache(engine, prefix)
            rows.sort(key=lambda row: max_tokens[row])
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                wanted = [max_tokens[row] for row in batch]
                past = expanded(cache, len(batch))
                new = continue_batch(engine, past, shared, [prompts[row] for row in batch], wanted)
                for row, tokens, count in zip(batch, new, wanted, strict=True):
                    found[row] = tokens[:count]
        return found

    return generate


if __name__ == "__main__":
    serve(transformers.__version__, PRECISIONS, load)
