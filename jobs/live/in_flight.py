"""The requests that a worker has claimed and not done with."""

import threading
from collections.abc import Sequence

from .answer import LiveAnswer


class AnswersInFlight:
    """By their ids. Thread-safe."""

    def __init__(self) -> None:
        self._answers: dict[str, LiveAnswer] = {}
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._answers)

    def all(self) -> list[LiveAnswer]:
        return list(self._answers.values())

    def get(self, request_id: str) -> LiveAnswer | None:
        return self._answers.get(request_id)

    def add(self, answers: Sequence[LiveAnswer]) -> list[LiveAnswer]:
        """Returns the earlier attempts at the same requests that were here until now."""
        with self._changed:
            earlier = [self._answers.get(answer.id) for answer in answers]
            self._answers.update((answer.id, answer) for answer in answers)
        return [answer for answer in earlier if answer is not None]

    def remove(self, answer: LiveAnswer) -> None:
        """Harmless when repeated, or when a later attempt at the request is here by now."""
        with self._changed:
            if self._answers.get(answer.id) is answer:
                del self._answers[answer.id]
            self._changed.notify_all()

    def wait_until_empty(self, seconds: float) -> None:
        """For no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._answers, seconds)
