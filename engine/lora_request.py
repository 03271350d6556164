"""Which LoRA adapter a request is answered with. Free of torch."""

from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from pathlib import Path

from .errors import InvalidRequestError, shown
from .paths import absolute_path


@dataclass(frozen=True)
class LoRARequest:
    """An adapter by its name, a number of its own from 1 on, and the folder that PEFT has saved it in; as in vLLM.

    What tells adapters apart here is the folder; name and number are for those who read. Raises `InvalidRequestError`
    naming the field that is off.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str

    def __post_init__(self) -> None:
        self._check_types()
        if not self.lora_name:
            raise InvalidRequestError("lora_name must not be empty", "lora_request")
        if self.lora_int_id < 1:
            raise InvalidRequestError(f"lora_int_id must be at least 1, not {shown(self.lora_int_id)}", "lora_request")
        if not self.lora_path:
            raise InvalidRequestError("lora_path must name a folder", "lora_request")
        try:
            absolute_path(self.lora_path)
        except ValueError as error:
            raise InvalidRequestError(f"lora_path {error}", "lora_request") from error

    def _check_types(self) -> None:
        number = self.lora_int_id
        for name, fits, wanted in (
            ("lora_name", isinstance(self.lora_name, str), "a text"),
            ("lora_int_id", isinstance(number, Integral) and not isinstance(number, bool), "a whole number"),
            ("lora_path", isinstance(self.lora_path, str | Path), "a path"),
        ):
            if not fits:
                raise InvalidRequestError(f"{name} must be {wanted}, not {shown(getattr(self, name))}", "lora_request")
        # As one is mostly at hand.
        object.__setattr__(self, "lora_path", str(self.lora_path))

    @cached_property
    def folder(self) -> Path:
        return absolute_path(self.lora_path)
