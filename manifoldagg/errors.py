"""The exceptions and the warning category of the library.

All errors that the library raises deliberately are subclasses of
[`ManifoldAggError`][manifoldagg.errors.ManifoldAggError], except the `TypeError` for an unknown keyword argument.
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
    """Base class for all errors that this package raises deliberately.

    The `TypeError` for an unknown keyword argument does not have this base class.
    """


class ArgumentError(ManifoldAggError, ValueError):
    """An argument has an invalid value, shape or type. The message names the argument."""


class StateDictError(ArgumentError):
    """The tensors of a model do not match the expected layout. The message names the tensor."""


class RuleError(ManifoldAggError):
    """An aggregation rule returned an invalid result for a valid client update.

    The exception is also raised if a function in the options of the rule returns an invalid value. An example is a
    learning-rate schedule that returns a negative number.
    """


class BusyError(ManifoldAggError):
    """The server has reached its limit on tickets in flight or on queued updates. A later call can succeed."""


class DivergenceError(ManifoldAggError, ArithmeticError):
    """A computation with finite inputs returned a value that is not finite."""


class CheckpointError(ManifoldAggError):
    """The exception for a value that cannot be saved to a file, or for a saved file that is invalid.

    The message names the file, or the part of the value that cannot be saved.
    """


class WireError(ManifoldAggError):
    """The exception for a value that `wire.pack` cannot serialize, or for invalid bytes that `wire.unpack` receives.

    All messages of this exception begin with `wire: `.
    """


class SpillError(ManifoldAggError):
    """A server failed to move tensors from memory to a temporary file, called a spill file, or to load them again.

    For example, the disk is full, or another program has altered the file.

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
    """Training may diverge, because a learning rate exceeds the stability limit for the given concurrency.

    The concurrency is the number of clients that train at the same time.
    """
