r"""Stability of asynchronous training: the largest stable step size, and a suggested learning rate.

The displacement of an update leads from the model with which the client started to the model that it returned. The
server multiplies the displacement by the step size $\rho$ and adds it to its own model. If $m$ clients train at the
same time, the server model changes about $m - 1$ times while one client trains, so the displacement is outdated. If
$\rho$ is too large, such steps overshoot the minimum, the oscillation grows, and training diverges.
"""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from manifoldagg._validation import check_count, warn_caller
from manifoldagg.errors import ArgumentError, StabilityWarning
from manifoldagg.federated.schedules import weight_at
from manifoldagg.federated.types import check_rule_protocol

__all__ = [
    "has_buffer",
    "is_synchronous",
    "stability_limit",
    "suggest_rate",
    "updates_per_step",
    "warn_if_unstable",
    "with_buffer_size",
]

RATE_KINDS = ("share", "step", "mean", "latest")
"""The kinds of rates that multiply a displacement. Other rates have other units, such as the length of an Adam step."""


def stability_limit(concurrency: int, buffer_size: int = 1) -> float:
    r"""Return the largest step size $\rho$ for which asynchronous training is stable.

    The limit is exact for the following model. Each client has the loss $\frac12 \|x\|^2$ of the model $x$ and trains
    to the minimum at 0. A client $i$ that started from the base $b_i$ therefore returns the displacement $-b_i$. In
    each step, a random set $S$ of $K$ clients among the $m$ clients in flight return. The server averages their
    displacements, and the clients start again from the new model $x'$:

    $$x' = x - \frac{\rho}{K} \sum_{i \in S} b_i, \qquad b_i' = x' \ (i \in S), \qquad b_i' = b_i \ (i \notin S).$$

    The second moments of $x$ and $b$ follow a linear recursion. The spectral radius of the recursion is below 1, so
    that training is stable, if and only if

    $$2 m (m - K)\, \rho^2 + K (K^2 + K - 2 m)\, \rho < 2 K^2 (2 m - K - 1).$$

    Special cases:

    - For $K = 1$, the condition is $m \rho^2 < \rho + 2$.
    - For $K = m$ (synchronous rounds), the condition is $\rho < 2$, as for gradient descent.
    - If clients train only a fraction of the distance to the minimum, divide the limit by this fraction.
    - If clients return in a fixed order and $K = 1$, the limit is $2 \sin \frac{\pi}{2 (2 m - 1)}$ (Levin and May
      1976). It is lower than the limit for a random order, but above $\pi / (2 m)$.

    Args:
        concurrency: the number $m$ of clients in flight, which train at the same time.
        buffer_size: the number $K$ of updates in each step. A value above `concurrency` is replaced by `concurrency`.

    Raises:
        ArgumentError: if an argument is not a positive integer.

    Example:
        >>> [stability_limit(m) for m in (1, 3, 10)]
        [2.0, 1.0, 0.5]
        >>> stability_limit(10, buffer_size=10)
        2.0
    """
    m = check_count("concurrency", concurrency)
    k = min(check_count("buffer_size", buffer_size), m)
    if k == m:
        return 2.0
    # The limit is the larger root of a ρ² + b ρ = c with positive a and c. Each of the two forms avoids cancellation
    # between b and the square root for one sign of b.
    a, b, c = 2 * m * (m - k), k * (k * k + k - 2 * m), 2 * k * k * (2 * m - k - 1)
    root = math.sqrt(b * b + 4 * a * c)
    return (root - b) / (2 * a) if b <= 0 else 2 * c / (root + b)


def suggest_rate(rule: Any, num_clients: int, concurrency: int) -> float:
    r"""Suggest a stable learning rate for a rule, a number of clients and a concurrency.

    With the suggested rate, the update of a client with an average weight moves the model by a fraction $\rho$ of its
    displacement. The fraction depends on the rule, the number $N$ of clients and the concurrency $m$:

    - For most rules, the fraction is $\rho = 1 / (m + 1)$. It is at most about a quarter of
      [`stability_limit`][manifoldagg.federated.stability_limit], and at most two thirds of the lower limit for clients
      that return in a fixed order.
    - For a rule with a buffer of $K$ updates, the fraction is $\rho = \min(1, K / m)$.
    - For a rule that adds the latest update of every client in each step, the stability limit is lower. The fraction is
      $\rho = 1 / (2 N)$.

    | rate of the rule | $\rho$ | suggested rate |
    | --- | --- | --- |
    | step, times the weight $w_i \approx 1 / N$ (`FedOrtho`, `ASGD` and others) | rate / N | N / (m + 1) |
    | share of the distance to the client's model (`FedAsync`, `OrthoFL`) | rate $\cdot\, s$ | 1 / (m + 1) / s |
    | share with `weighted=True` | rate $\cdot\, s$ / N | N / (m + 1) / s |
    | step on the mean of a buffer of K (`FedBuff`, `Median` and others) | rate | min(1, K / m) |
    | step on the mean of a synchronous cohort (`FedAvg`) | rate | 1 |
    | step on the mean of the latest updates of all clients (`ACE`) | rate | 1 / (2 N) |

    Here, $w_i$ is the client's share of the data, and $s$ is the staleness weight of the rule at the mean staleness
    $m - 1$.

    In short runs, higher rates converge faster, up to about half of the stability limit.

    Args:
        rule: a rule whose rate multiplies a displacement. For the wrappers `Momentum` and `Private`, the result is the
            rate of the wrapped rule. For `Momentum`, it is multiplied by $1 - \beta$, because the momentum $\beta$
            enlarges steps by the factor $1 / (1 - \beta)$.
        num_clients: the number $N$ of participating clients.
        concurrency: the number $m \le N$ of clients that train at the same time.

    Raises:
        ArgumentError: if an argument is not a positive integer, if `concurrency` is above `num_clients`, or if the rate
            of the rule has another unit, such as the length of an Adam step.

    Example:
        >>> from manifoldagg.federated.rules import FedAsync, FedBuff, FedOrtho
        >>> suggest_rate(FedOrtho(), num_clients=10, concurrency=9)
        1.0
        >>> suggest_rate(FedAsync(), num_clients=10, concurrency=9)
        0.1
        >>> suggest_rate(FedBuff(5), num_clients=100, concurrency=20)
        0.25
    """
    n = check_count("num_clients", num_clients)
    m = check_count("concurrency", concurrency)
    if m > n:
        raise ArgumentError(f"concurrency: expected at most num_clients={n}, got {m}")
    check_rule_protocol(rule)
    return _suggested_rate(rule, n, m)


def _suggested_rate(rule: Any, n: int, m: int) -> float:
    """Return a stable learning rate for n clients and m concurrent tasks.

    Unlike the concurrency in `suggest_rate`, m may exceed n, because a client may have several tasks at the same time.
    """
    inner = rule
    factor = 1.0
    while hasattr(inner, "rule"):
        factor *= 1 - getattr(inner, "beta", 0.0)
        inner = inner.rule
    kind = getattr(inner, "rate_kind", "")
    if kind not in RATE_KINDS:
        raise ArgumentError(
            f"rule: expected a rule whose rate is a multiple of an update (rate_kind 'share', 'step', 'mean' or "
            f"'latest'), got {type(inner).__name__}; search its rate with `manifoldagg compare --tune`"
        )
    if kind == "mean":
        return factor * (1.0 if is_synchronous(inner) else min(1.0, updates_per_step(inner) / m))
    if kind == "step":
        return factor * n / (m + 1)
    if kind == "latest":
        return factor / (2 * n)
    size = n if inner.weighted else 1
    # The lower bound of the staleness weight avoids a division by 0 and limits the share to 1.
    return factor * min(size, size / (m + 1) / max(weight_at(inner.staleness, m - 1), 1 / (m + 1)))


def warn_if_unstable(
    rule: Any,
    numbers: Mapping[str, float],
    staleness: int,
    num_in_flight: int,
    *,
    weight: float,
    num_clients: int,
) -> bool:
    """Warn if the step size of an update exceeds the stability limit.

    The limit decreases with the concurrency, which is the number of clients that train at the same time. Two
    adjustments avoid false warnings:

    - Step size: for a client with a large weight, a large step size does not make training unstable. If the step size
      is proportional to the weight, the function converts it to the average weight 1 / N of N clients.
    - Concurrency: the function uses the smaller of two numbers: the number of tasks in flight, and $K x + 1$. Here, K
      is the number of updates in each step, and x is the staleness of the update. Neither lost clients nor a single
      late update can therefore increase the concurrency. This observed concurrency can be lower than the number of
      tasks in flight, for example at the start of a run, when all updates are fresh.

    There is no warning for rates with the kinds `"share"` and `"latest"`, for rates with another unit, or for wrappers
    such as `Momentum`. The limit of `stability_limit` does not apply to their steps.

    Args:
        rule: the rule that computed the step.
        numbers: the metrics of the step. The metric `rate` is the step size.
        staleness: the staleness x of the update in versions.
        num_in_flight: the number of tasks in flight, including the current task.
        weight: the weight of the client.
        num_clients: the number $N$ of clients that share the weights.

    Returns:
        Whether the step size exceeds the limit.

    Warns:
        StabilityWarning: if the step size exceeds the limit. The message contains the step size, the limit, the
            observed concurrency and a stable rate.
    """
    kind = getattr(rule, "rate_kind", None)
    rho = numbers.get("rate", 0.0)
    # Rates of the kind "share" are excluded, because a step of at most the whole distance to the client's model cannot
    # overshoot this model. `stability_limit` does not cover the latest updates of all clients, or a momentum.
    if kind not in ("step", "mean") or not rho > 0:
        return False
    if kind == "step" and weight > 0:
        rho /= weight * num_clients
    if getattr(rule, "overshoot", None) == "clamp":
        rho = min(rho, 1.0)
    k = updates_per_step(rule)
    m = max(1, min(k * staleness + 1, num_in_flight))
    limit = stability_limit(m, k)
    # The tolerance covers the rounding error of the division by N times the weight.
    if rho <= limit * (1 + 1e-9):
        return False
    rate = _suggested_rate(rule, num_clients, num_in_flight)
    warn_caller(
        f"rate: {type(rule).__name__} takes a step of size {rho:.3g}, above the stability limit of {limit:.3g} at an "
        f"observed concurrency of {m}, so training may diverge; use a lower rate, such as {rate:.3g}, or a lower "
        "concurrency",
        StabilityWarning,
    )
    return True


def is_synchronous(rule: Any) -> bool:
    """Return whether a rule is synchronous, that is, whether it waits for all clients of a cohort before each step.

    The updates of a synchronous rule are never stale.

    Example:
        >>> from manifoldagg.federated.rules import DeFedAvg, FedAvg
        >>> is_synchronous(FedAvg(5)), is_synchronous(DeFedAvg(5))
        (True, False)
    """
    return rule.cohort > 1 and not hasattr(rule, "draw")


def updates_per_step(rule: Any) -> int:
    """Return the number of updates that a rule combines in one step.

    For a wrapper such as `Momentum`, the result is that of the wrapped rule.

    Example:
        >>> from manifoldagg.federated.rules import FedAsync, FedBuff, Momentum
        >>> updates_per_step(FedBuff(5)), updates_per_step(Momentum(FedBuff(5))), updates_per_step(FedAsync())
        (5, 5, 1)
    """
    size = getattr(rule, "buffer_size", None) or getattr(rule, "size", None)
    if size is None and hasattr(rule, "rule"):
        return updates_per_step(rule.rule)
    return int(size or 1)


def with_buffer_size(rule: Any, size: int) -> Any:
    """Return a copy of a buffered rule, or of a rule that wraps one, with another buffer size.

    Args:
        rule: the rule.
        size: the number of updates in each step.

    Raises:
        ArgumentError: if the rule has no buffer, or if `size` is not a positive integer. The message starts with
            `buffer`.

    Example:
        >>> from manifoldagg.federated.rules import FedBuff, Momentum
        >>> with_buffer_size(Momentum(FedBuff(size=10)), 4).rule.size
        4
    """
    check_count("buffer", size)
    names = {field.name for field in fields(rule)} if is_dataclass(rule) else set()
    if "size" in names:
        return replace(rule, size=size)
    if "rule" in names:
        return replace(rule, rule=with_buffer_size(rule.rule, size))
    raise ArgumentError(f"buffer: expected a rule with a buffer, such as FedBuff, got {type(rule).__name__}")


def has_buffer(rule: Any) -> bool:
    """Return whether `with_buffer_size` can change the buffer size of a rule.

    This is possible for a buffered rule such as `FedBuff`, and for a wrapper around a buffered rule.

    Example:
        >>> from manifoldagg.federated.rules import FedAsync, FedBuff
        >>> has_buffer(FedBuff(5)), has_buffer(FedAsync())
        (True, False)
    """
    while rule is not None and not isinstance(getattr(rule, "size", None), int):
        rule = getattr(rule, "rule", None)
    return is_dataclass(rule)
