"""What tokens cost, by the price of an hour and what was measured."""

import math
from decimal import Decimal
from typing import Annotated

import typer

from ..errors import SpecError


def _checked(price: float | None) -> float | None:
    if price is not None and not 0 < price < math.inf:
        raise SpecError(f"--gpu-hour-price must be above 0, not {price}")
    return price


GpuHourPrice = Annotated[
    float | None,
    typer.Option(
        "--gpu-hour-price",
        metavar="PRICE",
        callback=_checked,
        help="Price of an hour of all GPUs (or machines) at work: adds what the job costs, and a million tokens.",
    ),
]


def cost(price: float, seconds: float, prompt_tokens: float, completion_tokens: float) -> str:
    """In the price's currency. Each kind of token is priced as if all of the time were spent on it."""
    total = price * seconds / 3600
    kinds = (("prompt", prompt_tokens), ("completion", completion_tokens))
    millions = [f"{_amount(total / count * 1e6)} a million {kind} tokens" for kind, count in kinds if count]
    return ", ".join([_amount(total), *millions])


def _amount(value: float) -> str:
    # Three digits, without an exponent.
    return f"{value:,.2f}" if value >= 10 else f"{Decimal(f'{value:.3g}'):f}"
