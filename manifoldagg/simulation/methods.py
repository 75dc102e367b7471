"""The methods that can be compared by name, with rates chosen for the digits."""

from collections.abc import Callable, Mapping, Sequence

from manifoldagg.errors import ArgumentError, check_choice, check_number
from manifoldagg.federated import Rule, trainers
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedGS, FedOrtho
from manifoldagg.simulation.run import Method

__all__ = ["RATES", "method", "methods"]

LOCAL = trainers.Local(epochs=4, rate=0.01, proximal=1e-3)
CURVE = trainers.Curve(epochs=(4, 2), rate=0.01, control_rate=1e-3, proximal=1e-3)

RATES: Mapping[str, float] = {"fedasync": 3.0, "fedortho": 5.0, "fedgs": 2.5, "asyncbezier": 3.0}
"""The best of the grid .25, .5, 1, 1.5, 2, 2.5, 3, 5 by `benchmarks/rates.py`, on seeds that no comparison uses."""

_RULES: Mapping[str, tuple[str, Callable[[float], Rule], trainers.Local | trainers.Curve]] = {
    "fedasync": ("FedAsync", lambda rate: FedAsync(rate, weighted=True), LOCAL),
    "fedortho": ("FedOrtho", lambda rate: FedOrtho(rate), LOCAL),
    "fedgs": ("FedGS", lambda rate: FedGS(rate), LOCAL),
    "asyncbezier": ("AsyncBezier", lambda rate: AsyncBezier(rate, threshold=1.0), CURVE),
}


def method(name: str, rate: float | None = None) -> Method:
    """The method of that name, with its global rate or the one given.

    Raises:
        ArgumentError: if the name is unknown or the rate not positive.

    Example:
        >>> method("fedortho", rate=3.0).rule.rate
        3.0
    """
    check_choice("method", name, tuple(_RULES))
    label, rule, trainer = _RULES[name]
    return Method(label, rule(check_number("rate", RATES[name] if rate is None else rate, above=0)), trainer)


def methods(names: Sequence[str], rates: Sequence[str] = ()) -> list[Method]:
    """The methods of these names; each of `rates` is `"0.5"`, for all, or `"fedasync=0.5"`, for one.

    Raises:
        ArgumentError: if a name is unknown or given twice, or a rate is not positive.
    """
    if not names:
        raise ArgumentError(f"methods: expected some of {', '.join(_RULES)}; got none")
    chosen: dict[str, float | None] = {}
    for name in names:
        if check_choice("method", name, tuple(_RULES)) in chosen:
            raise ArgumentError(f"methods: {name} is given twice")
        chosen[name] = None
    for entry in rates:
        name, _, value = entry.rpartition("=")
        try:
            rate = float(value)
        except ValueError:
            raise ArgumentError(f"rate: expected a number or METHOD=NUMBER, got {entry!r}") from None
        check_number("rate", rate, above=0)
        for target in [check_choice("rate", name, tuple(chosen))] if name else list(chosen):
            chosen[target] = rate
    return [method(name, rate) for name, rate in chosen.items()]
