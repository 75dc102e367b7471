"""The exceptions and the warning category of the library.

All errors that the library raises deliberately are subclasses of
[`ManifoldAggError`][manifoldagg.errors.ManifoldAggError].
"""

__all__ = [
    "ArgumentError",
    "BusyError",
    "CheckpointError",
    "DivergenceError",
    "ManifoldAggError",
    "RuleError",
    "SpillError",
    "StabilityWarning",
    "StateDictError",
    "WireError",
]


class ManifoldAggError(Exception):
    """Base class for all errors that this package raises deliberately, except the `TypeError` for unknown keywords."""


class ArgumentError(ManifoldAggError, ValueError):
    """An argument has an invalid value, shape or type. The message names the argument."""


class StateDictError(ArgumentError):
    """The tensors of a model do not match the expected layout. The message names the tensor."""


class RuleError(ManifoldAggError):
    """An aggregation rule or one of its schedules returned an invalid result. The client's update is not the cause."""


class BusyError(ManifoldAggError):
    """The server has reached a limit on tickets in flight or queued updates. The same call can succeed later."""


class DivergenceError(ManifoldAggError, ArithmeticError):
    """A computation with finite inputs returned a value that is not finite."""


class CheckpointError(ManifoldAggError):
    """A value cannot be saved, or a saved file is invalid. The message names the file or the part of the state."""


class WireError(ManifoldAggError):
    """A value cannot be serialized by `wire.pack`, or bytes are not a result of it. The message begins with `wire`."""


class SpillError(ManifoldAggError):
    """A tree of tensors cannot be written to a spill file, or its spill file was altered. The message names the folder.

    Args:
        message: the error message.
        temporary: whether a later attempt can succeed, for example after a full disk has free space again.

    Example:
        >>> SpillError("spill: /tmp: no space left", temporary=True).temporary
        True
    """

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary


class StabilityWarning(UserWarning):
    """A learning rate exceeds the stability limit for the given concurrency. Training may diverge."""
