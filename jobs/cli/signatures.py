"""Commands that have options in common: each set is a function, whose parameters are the options."""

import functools
from collections.abc import Callable
from inspect import Parameter, Signature, signature
from typing import Any


def takes(*parsers: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the parameters of these functions. Its first arguments are their results, in their order.

    A parameter that several of them have is one option, as the command has it, or the last of them.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        sets = [list(signature(parser).parameters.values()) for parser in parsers]
        own = list(signature(command).parameters.values())[len(parsers) :]
        parameters = {parameter.name: parameter for group in (*sets, own) for parameter in group}.values()

        @functools.wraps(command)
        def run(**values: Any) -> None:
            results = [
                parser(**{parameter.name: values[parameter.name] for parameter in group})
                for parser, group in zip(parsers, sets, strict=True)
            ]
            command(*results, **{parameter.name: values[parameter.name] for parameter in own})

        # What typer reads.
        keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
        run.__signature__ = Signature(keywords, return_annotation=None)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorate
