"""Which LoRA adapter a request is answered with. Free of torch."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from .errors import InvalidRequestError
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
        if not self.lora_name:
            raise InvalidRequestError("lora_name must not be empty", "lora_request")
        if self.lora_int_id < 1:
            raise InvalidRequestError(f"lora_int_id must be at least 1, not {self.lora_int_id}", "lora_request")
        if not self.lora_path:
            raise InvalidRequestError("lora_path must name a folder", "lora_request")
        try:
            absolute_path(self.lora_path)
        except ValueError as error:
            raise InvalidRequestError(f"lora_path {error}", "lora_request") from error

    @cached_property
    def folder(self) -> Path:
        return absolute_path(self.lora_path)
