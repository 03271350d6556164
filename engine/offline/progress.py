"""How far a call has come, as a bar of tqdm's on stderr."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from ..errors import InvalidRequestError, shown
from ..request import Request

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
        self._start = time.monotonic()
        self._input = self._output = 0

    def tell(self, num_tokens: int, done: Sequence[Request]) -> None:
        """What a step has brought: so many tokens, and the first samples of the prompts that have all by now."""
        self._output += num_tokens
        if self._bar is None or not done:
            return
        self._input += sum(len(request.prompt_token_ids) for request in done)
        seconds = max(time.monotonic() - self._start, 1e-9)
        rates = (self._input / seconds, self._output / seconds)
        self._bar.postfix = "est. speed input: {:.2f} toks/s, output: {:.2f} toks/s".format(*rates)
        self._bar.update(len(done))

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
