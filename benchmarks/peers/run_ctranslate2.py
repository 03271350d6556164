"""CTranslate2 (an environment from `install.sh ctranslate2`): a shared prefix is its static prompt.

A batch holds prompts of like lengths, because what is longer than the shortest is taken in token by token; a row leaves
its batch when it has all its tokens.
"""

import ctranslate2
from protocol import Generate, Prompts, by_prefix, num_threads, serve

PRECISIONS = {"float32": "f32", "int8": "int8 W8A8"}
BATCH = 32


def run(engine: ctranslate2.Generator, prefix: list[str], prompts: list[list[str]], max_tokens: list[int]) -> Prompts:
    """Greedy tokens of one batch, the prompts without their prefix."""

    missing = list(max_tokens)

    # A step's own number will not do: it counts the tokens of a longer prompt too.
    def has_all(step: ctranslate2.GenerationStepResult) -> bool:
        row: int = step.batch_id
        missing[row] -= 1
        return missing[row] == 0

    results = engine.generate_batch(
        prompts,
        static_prompt=prefix or None,
        cache_static_prompt=True,
        include_prompt_in_result=False,
        max_length=max(max_tokens),
        min_length=max(max_tokens),
        callback=has_all if min(max_tokens) < max(max_tokens) else None,
    )
    return [result.sequences_ids[0] for result in results]


def load(model: str, precision: str, _: int) -> Generate:
    engine = ctranslate2.Generator(model, device="cpu", compute_type=precision, intra_threads=num_threads())

    def generate(prompts: Prompts, max_tokens: list[int], shared: int) -> list[list[int]]:
        found: list[list[int]] = [[]] * len(prompts)
        for prefix, rows in by_prefix(prompts, shared):
            rows.sort(key=lambda row: len(prompts[row]))
            for start in range(0, len(rows), BATCH):
                batch = rows[start : start + BATCH]
                own = [list(map(str, prompts[row][shared:])) for row in batch]
                new = run(engine, list(map(str, prefix)), own, [max_tokens[row] for row in batch])
                for row, tokens in zip(batch, new, strict=True):
                    found[row] = tokens
        return found

    return generate


if __name__ == "__main__":
    serve(ctranslate2.__version__, PRECISIONS, load)
