"""The tokens that a stream's choices have taken so far, for chunks that tell them."""

from collections import Counter

from ...streams.events import StreamEvent
from .asking import Asked


class RunningUsage:
    """Told each event before its chunks are written. What was found in the prefix cache is known at the end alone."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._num_generated: Counter[int] = Counter()

    def add(self, choice: int, event: StreamEvent) -> None:
        if not self._asked.echoes_only:
            self._num_generated[choice] += len(event.token_ids)

    def body(self, choice: int) -> dict[str, int]:
        """As OpenAI's clients read it."""
        prompt = len(self._asked.requests[choice // self._asked.samples].prompt_token_ids)
        completion = self._num_generated[choice]
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
