"""Log-probabilities in the shape of plain completions."""

from typing import Any

from headrace.jobs.api.openai.logprobs import text_logprobs


def entry(token: str, logprob: float | None, **top: float) -> dict[str, Any]:
    return {"token": token, "logprob": logprob, "top": [{"token": name, "logprob": each} for name, each in top.items()]}


def test_a_token_is_among_the_likeliest_and_the_first_of_a_prompt_has_none() -> None:
    entries = [entry("a", None), entry("b", -2.0, a=-1.0, b=-2.0), entry("c", -3.0, a=-0.5), entry("d", -1.0)]
    assert text_logprobs(entries, 2) == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -2.0, -3.0, -1.0],
        "top_logprobs": [None, {"b": -2.0, "a": -1.0}, {"c": -3.0, "a": -0.5}, {"d": -1.0}],
        "text_offset": [2, 3, 4, 5],
    }


def test_of_tokens_with_the_same_text_the_likelier_counts() -> None:
    """Two parts of characters: whether the token was the likeliest is told by the best of `top_logprobs`."""
    part = {"token": "\ufffd", "top": []}
    top = [part | {"logprob": -0.1}, part | {"logprob": -2.5}]
    (found,) = text_logprobs([part | {"logprob": -4.0, "top": top}], 0)["top_logprobs"]
    assert found == {"\ufffd": -0.1}
