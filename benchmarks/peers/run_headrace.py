"""headrace, with the options that a user gets who gives none."""

from importlib.metadata import version

from protocol import Generate, serve

from headrace import LLM, SamplingParams


def load(model: str, dtype: str, max_model_len: int) -> Generate:
    llm = LLM(model, dtype=dtype, max_model_len=max_model_len, skip_tokenizer_init=True)

    def generate(prompts: list[list[int]], max_tokens: list[int], _: int) -> list[list[int]]:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in max_tokens]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    serve(version("headrace"), load)
