"""The probabilities of choices straight from their definition."""

from collections.abc import Callable, Sequence

from torch import Tensor

Choice = tuple[int, ...]


def choice_probabilities(
    logits_after: Callable[[list[int]], Tensor], prompt: Sequence[int], choices: Sequence[Choice], end: int
) -> list[float]:
    """Each choice's probability: at each of its tokens, softmax among the tokens that some choice has there.

    `logits_after(tokens)` is the model: [vocab]. A choice that begins another one ends with the token `end`.
    """
    ended = [
        (*choice, end) if any(other != choice and other[: len(choice)] == choice for other in choices) else choice
        for choice in choices
    ]
    probabilities = []
    for choice in ended:
        probability = 1.0
        for length in range(len(choice)):
            begun = [other for other in ended if other[:length] == choice[:length]]
            allowed = sorted({other[length] for other in begun})
            logits = logits_after([*prompt, *choice[:length]])[allowed]
            probability *= float(logits.double().softmax(-1)[allowed.index(choice[length])])
        probabilities.append(probability)
    return probabilities
