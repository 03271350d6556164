"""The answer that most of a row's samples give, and how many samples it takes to know it."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...engine.request import Request
from ...engine.sampling.sampler import pick_choice
from ...engine.text.finished_answer import num_tokens_before
from ...engine.text.tokenizer import Tokenizer
from ..hosting.answer_values import text_of
from ..hosting.outcomes import Answer
from .row_answers import Answered, answer_columns


class Vote(NamedTuple):
    """What a sample says. `opinion` is what is counted, if it has one; `likelihood` grows with how likely it is."""

    opinion: str | None
    likelihood: float


def num_wanted(opinions: Sequence[str | None], num_samples: int) -> int:
    """How many more of `num_samples` it takes at least until the rest cannot change the majority; 0 when it cannot.

    It depends on the samples' order alone, not on which was done first.
    """
    left = num_samples - len(opinions)
    counts = sorted(_counts(opinions).values(), reverse=True)
    lead = sum(counts[:1]) - sum(counts[1:2])
    return 0 if lead > left else min(left, (left - lead) // 2 + 1)


def opinion(text: str) -> str:
    """The same for answers that say the same: without spaces around them, JSON in whichever order and spacing."""
    text = text.strip()
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.dumps(json.loads(text), sort_keys=True, ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


def opinion_of(tokenizer: Tokenizer, request: Request, answer: Answer) -> str | None:
    """None for an answer that is nothing but thinking, as where a limit cut it off: it has said nothing."""
    text = opinion(text_of(tokenizer, request, answer))
    return None if request.reasoning is not None and not text else text


def voted_columns(tokenizer: Tokenizer, samples: Sequence[Answered]) -> dict[str, Any]:
    """The columns of a row whose answer is that of the majority. `samples`: those it took, in their order."""
    votes = [Vote(opinion_of(tokenizer, *sample), _likelihood(*sample)) for sample in samples]
    chosen = _winner(votes)
    return answer_columns(tokenizer, samples, chosen=chosen) | _counted(votes, chosen)


def drawn_columns(tokenizer: Tokenizer, request: Request, answer: Answer, num_samples: int) -> dict[str, Any]:
    """The same for choices: samples are drawn from their probabilities, for which the engine is asked once."""
    choices, probabilities = request.params.choices, answer.choice_probabilities
    assert choices is not None
    assert probabilities is not None
    params = replace(request.params, n=num_samples)
    samples = map(params.of_sample, range(num_samples))
    drawn = [pick_choice(probabilities, sample, sample.seed or 0) for sample in samples]
    votes = [Vote(choices[index], probabilities[index]) for index in drawn]
    chosen = _winner(votes)
    columns = answer_columns(tokenizer, [(request, answer._replace(choice_index=drawn[chosen]))])
    return columns | {"outputs": [vote.opinion for vote in votes]} | _counted(votes, chosen)


def _likelihood(request: Request, answer: Answer) -> float:
    """Of the answer's own tokens: what was thought before only makes it the less likely the longer it is."""
    if answer.choice_probabilities is not None and answer.choice_index is not None:
        return answer.choice_probabilities[answer.choice_index]
    begin = num_tokens_before(request, answer.token_ids)
    places = zip(answer.logprobs[begin:], answer.token_ids[begin:], strict=False)
    return sum(logprobs[token].logprob for logprobs, token in places)


def _winner(votes: Sequence[Vote]) -> int:
    """Which sample is the answer: of the most frequent opinion, of several such the likeliest, then the first."""
    counts = _counts(vote.opinion for vote in votes)
    return max(range(len(votes)), key=lambda index: (counts[votes[index].opinion], votes[index].likelihood, -index))


def _counts(opinions: Iterable[str | None]) -> Counter[str | None]:
    return Counter(each for each in opinions if each is not None)


def _counted(votes: Sequence[Vote], chosen: int) -> dict[str, Any]:
    winner = votes[chosen].opinion
    counts = _counts(vote.opinion for vote in votes)
    ranked = sorted(counts, key=lambda each: (each != winner, -counts[each]))
    return {
        "votes": [{"answer": each, "count": counts[each]} for each in ranked],
        "agreement": counts[winner] / len(votes),
    }
