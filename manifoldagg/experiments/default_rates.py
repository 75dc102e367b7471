"""Default global learning rates of federated methods, adjusted to the number of clients and the concurrency."""

from collections.abc import Sequence
from typing import Any

from manifoldagg._validation import check_count
from manifoldagg.experiments.registry import methods, parse_methods
from manifoldagg.experiments.tuning import find_rate, with_rate
from manifoldagg.federated.stability import (
    has_buffer,
    is_synchronous,
    stability_limit,
    updates_per_step,
    with_buffer_size,
)
from manifoldagg.simulation.method import Method

__all__ = ["methods_with_scaled_rates"]

TUNED_CLIENTS = 30
"""The number of clients, and the concurrency, with which the rates in `defaults.toml` were tuned."""
MAX_STEP_SIZE = 0.5
"""The largest scaled step size. Without staleness, the stability limit is 2, but a step size of 1 replaces the model by
the model of one client. In `benchmarks/stability.py`, with two clients in flight, this costs 2 to 16 percentage points
of accuracy."""


def methods_with_scaled_rates(
    names: Sequence[str] | str,
    rates: Sequence[str] = (),
    *,
    clients: int,
    concurrency: int | None = None,
    buffer: int | None = None,
) -> tuple[list[Method], list[str]]:
    r"""Build the named methods with scaled default rates, and return a line of text for each scaled rate.

    The default rates were tuned with 30 clients in flight. Their tuned step sizes are fractions of the
    [`stability_limit`][manifoldagg.federated.stability_limit] for 30 clients. The function scales a rate as follows:

    - If a rule multiplies the rate by the weight of a client, the step size is $\rho = \text{rate} / N$. The scaled
      step size is the same fraction of the stability limit as the tuned step size, and at most 0.5.
    - The rate of a rule with a buffer is its step size. A rate above the tuned fraction of the limit is reduced to this
      fraction.
    - The rate of `ace` is proportional to $1 / N$, like its stability limit.

    These rates are unchanged: rates that `names` or `rates` set, rates in other units, and rates of rules in user
    modules.

    Args:
        names: the methods, as in [`methods`][manifoldagg.experiments.registry.methods].
        rates: the explicit rates, as in `methods`.
        clients: the number $N$ of clients.
        concurrency: the number of clients that train at the same time. `None` means all clients.
        buffer: the number of updates in each step of a rule with a buffer. `None` selects the buffer size of the rule.

    Raises:
        ArgumentError: for the same reasons as in `methods`, or if `clients` or `concurrency` is not a positive integer.

    Example:
        >>> chosen, lines = methods_with_scaled_rates("fedortho,fedavg", clients=10)
        >>> [method.rule.rate for method in chosen]
        [3.03, 1.0]
        >>> lines
        ['FedOrtho: default rate 5 scaled to 3.03 for 10 clients and a concurrency of 10']
    """
    chosen = methods(names, rates)
    check_count("clients", clients)
    in_flight = clients if concurrency is None else min(check_count("concurrency", concurrency), clients)
    lines = []
    for place, (spec, made) in enumerate(zip(parse_methods(names), chosen, strict=True)):
        # A name with a colon is a rule in a user module, whose rate is not a tuned default.
        found = None if ":" in spec.name else _scale_rate(made, clients, in_flight, buffer)
        if found is not None and found[0] != found[1]:
            chosen[place] = with_rate(made, found[1])
            lines.append(
                f"{made.name}: default rate {found[0]:g} scaled to {found[1]:g} for {clients} clients and a "
                f"concurrency of {in_flight}"
            )
    return chosen, lines


def _scale_rate(method: Method, clients: int, concurrency: int, buffer: int | None) -> tuple[float, float] | None:
    """Return the default rate and the scaled rate, or `None` if the rate is not scaled."""
    rule: Any = method.bind(range(clients)).rule
    rate = find_rate(rule, method.rate_field)
    while hasattr(rule, "rule"):
        rule = rule.rule
    kind = getattr(rule, "rate_kind", "")
    if rate is None:
        return None
    if kind == "step" or (kind == "share" and rule.weighted):
        part = rate / TUNED_CLIENTS / stability_limit(TUNED_CLIENTS)
        return rate, _round(clients * min(part * stability_limit(concurrency), MAX_STEP_SIZE))
    if kind == "latest":
        return rate, _round(rate * TUNED_CLIENTS / clients)
    if kind == "mean" and not is_synchronous(rule):
        size = updates_per_step(rule if buffer is None or not has_buffer(rule) else with_buffer_size(rule, buffer))
        # A rate of 1 steps to the mean of the buffer, so a higher limit does not justify a higher rate.
        part = rate / stability_limit(TUNED_CLIENTS, size)
        return rate, min(rate, _round(part * stability_limit(concurrency, size)))
    return None


def _round(rate: float) -> float:
    """Round a rate to three significant digits."""
    return float(f"{rate:.3g}")
