"""Which of a model's layers are here, where several processes have some each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Consecutive layers from `first_layer` of the whole model on.

    The first stage also has the embedding; the last one has the final norm and the head, and so the embedding as well
    where the two are one.
    """

    first_layer: int = 0
    is_first: bool = True
    is_last: bool = True


WHOLE_MODEL = Stage()
