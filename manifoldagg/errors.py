"""The exceptions and the warning category of the library.

Every error that the library raises on purpose is a [`ManifoldAggError`][manifoldagg.errors.ManifoldAggError].
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
    """The family: `except ManifoldAggError` catches everything that this package raises on purpose."""


class ArgumentError(ManifoldAggError, ValueError):
    """An argument has a value, a shape or a type that cannot be used. The message names the argument."""


class StateDictError(ArgumentError):
    """The tensors of a model do not fit a layout. The message names the tensor."""


class RuleError(ManifoldAggError):
    """A rule, or a schedule in it, gave what cannot be used: no client is to blame."""


class BusyError(ManifoldAggError):
    """As much is under way as may be; the same call can succeed later."""


class DivergenceError(ManifoldAggError, ArithmeticError):
    """A computation left the finite numbers although its input was finite."""


class CheckpointError(ManifoldAggError):
    """Something cannot be saved, or a file is not what was saved. The message names the file, or what of the tree."""


class WireError(ManifoldAggError):
    """Bytes are not what `pack` made, or something cannot be packed. The message begins with `wire`."""


class SpillError(ManifoldAggError):
    """A tree cannot go to a file, or its file is not what was written. The message names the file.

    Args:
        message: what was wrong.
        temporary: whether the same may succeed later: a full disk gets room again, an altered file stays altered.

    Example:
        >>> SpillError("/tmp/1.tensors: no space left", temporary=True).temporary
        True
    """

    def __init__(self, message: str, *, temporary: bool = False) -> None:
        super().__init__(message)
        self.temporary = temporary


class StabilityWarning(UserWarning):
    """A learning rate is above the stability limit of the concurrency, so that training may diverge."""
