"""How far a call has come, as a bar of tqdm's on stderr."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from ..errors import InvalidRequestError, shown
from ..request import Request, RequestEvent

# What makes a bar as tqdm's does.
MakeBar = Callable[..., Any]


class Progress:
    """A bar, until the context ends, that grows by each prompt whose samples are all there; tokens a second beside it.

    prompts: the requests that answer each; without any there is no bar. use_tqdm: whether there is one, or what makes
    it. A machine without tqdm shows none.
    """

    def __init__(self, prompts: Sequence[Sequence[Request]], use_tqdm: bool | MakeBar) -> None:
        if not isinstance(use_tqdm, bool | None) and not callable(use_tqdm):
            raise InvalidRequestError(
                f"use_tqdm must be true or false, or what makes a bar, not {shown(use_tqdm)}", "use_tqdm"
            )
        make_bar = (_tqdm() if use_tqdm is True else use_tqdm or None) if prompts else None
        self._bar = make_bar and make_bar(total=len(prompts), desc="Processed prompts", dynamic_ncols=True)
        self._prompt_of = {request.request_id: samples[0] for samples in prompts for request in samples}
        self._missing = Counter({samples[0].request_id: len(samples) for samples in prompts})
        self._start = time.monotonic()
        self._input = self._output = 0

    def tell(self, events: Sequence[RequestEvent]) -> None:
        """What a step has brought."""
        if self._bar is None:
            return
        num_done = 0
        for event in events:
            prompt = self._prompt_of[event.request_id]
            self._output += len(event.new_token_ids)
            self._missing[prompt.request_id] -= event.finished
            if event.finished and not self._missing[prompt.request_id]:
                self._input += len(prompt.prompt_token_ids)
                num_done += 1
        if num_done:
            seconds = max(time.monotonic() - self._start, 1e-9)
            rates = (self._input / seconds, self._output / seconds)
            self._bar.postfix = "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
            self._bar.update(num_done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> MakeBar | None:
    try:
        # Not needed to compute: an engine alone may be without.
        from tqdm.auto import tqdm
    except ImportError:
        return None
    bar: MakeBar = tqdm
    return bar
