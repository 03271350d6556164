"""headrace, with the options that a user gets who gives none."""

from importlib.metadata import version
from typing import Any

from protocol import Generate, Prompts, serve

from headrace import LLM, SamplingParams

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "int8 W8A8"}


def load(model: str, precision: str, max_model_len: int) -> Generate:
    options: dict[str, Any] = {"quantization": "int8"} if precision == "int8" else {"dtype": precision}
    llm = LLM(model, max_model_len=max_model_len, skip_tokenizer_init=True, **options)

    def generate(prompts: Prompts, max_tokens: list[int], _: int) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(version("headrace"), PRECISIONS, load)
