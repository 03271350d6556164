"""What the engine raises to its callers. Every message is one line and says what to do."""

# Of what was given; a message may be written for each of a million rows.
_MAX_SHOWN = 200


class EngineError(Exception):
    """Base of all errors the engine raises on purpose."""


class ModelError(EngineError):
    """A model folder that cannot be served: missing, incomplete, misshapen or of an unknown architecture."""


class ConfigError(EngineError, ValueError):
    """An engine option out of its range."""


class InvalidRequestError(EngineError, ValueError):
    """A request that can never run; its neighbours are not affected. `field`: the parameter at fault, if it is one."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineDeadError(EngineError):
    """The engine can compute nothing any more: a process that shares its model is gone, or its GPU is lost.

    Make another one, of a lost GPU in another process.
    """


def shown(value: object) -> str:
    """What was given, or its beginning, as Python writes it, in one line; lists are kept as tuples, and shown as lists.

    Python refuses to write numbers of thousands of digits.
    """
    try:
        text = repr(list(value) if type(value) is tuple else value).replace("\n", " ")
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}…"


def one_line(error: Exception) -> str:
    """What is told of an error, for a log or an answer."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def message_of(error: Exception) -> str:
    """What it says itself, for a message that says the rest."""
    return " ".join(str(error).split())
