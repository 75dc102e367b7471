r"""Privacy accounting: the parameters $(\varepsilon, \delta)$ of differential privacy for a private rule.

The rule [`Private`][manifoldagg.federated.rules.Private] is a sequence of Gaussian mechanisms, each with the noise
multiplier $\sigma$. For a client that contributes $n$ updates, the whole sequence is as private as one Gaussian
mechanism with the noise multiplier $\sigma / \sqrt n$.

Privacy amplification by subsampling does not apply. It requires a uniform sample of the clients, but an asynchronous
server uses the clients that reply first.

The functions use Google's library `dp-accounting`, which the extra `privacy` installs.
"""

import math
from typing import Any

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError

__all__ = ["epsilon", "noise_for"]


def epsilon(noise: float, *, participations: float, delta: float) -> float:
    r"""Compute the smallest $\varepsilon$ for which all models are $(\varepsilon, \delta)$-private for every client.

    This $\varepsilon$ satisfies the following equation. Here, $n$ is `participations`, $\sigma$ is `noise`, and $\Phi$
    is the distribution function of the standard normal distribution:

    $$\delta = \Phi\Bigl(\frac{\mu}{2} - \frac{\varepsilon}{\mu}\Bigr)
      - e^\varepsilon\, \Phi\Bigl(-\frac{\mu}{2} - \frac{\varepsilon}{\mu}\Bigr), \qquad \mu = \frac{\sqrt n}{\sigma}.$$

    The definition of privacy compares a run with a second run in which all updates of one client are zero. A stronger
    definition allows arbitrary updates of this client in the second run, which doubles $\mu$. To use the stronger
    definition, pass half of the noise multiplier.

    Args:
        noise: the noise multiplier $\sigma > 0$, as in [`Private`][manifoldagg.federated.rules.Private].
        participations: the number n of updates of one client. Pass the limit of the rule, or the metric
            `participations` in a row of `Server.history`.
        delta: the probability $\delta$ in (0, 1). Choose a value much smaller than one over the number of clients.

    Raises:
        ArgumentError: if an argument is out of range.
        ModuleNotFoundError: if the extra `privacy` is not installed.

    Source: Balle, Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 3.3.

    Example:
        >>> round(epsilon(5.0, participations=20, delta=1e-5), 3)
        3.849
    """
    check_number("noise", noise, above=0)
    result: float = _library().get_epsilon_gaussian(noise / _sqrt_count(participations), _check_delta(delta))
    return result


def noise_for(epsilon: float, *, participations: float, delta: float) -> float:
    r"""Compute the smallest noise multiplier $\sigma$ for a given $\varepsilon$.

    Args:
        epsilon: the privacy loss $\varepsilon > 0$.
        participations: the number n of updates of one client, as in the function `epsilon`.
        delta: the probability $\delta$ in (0, 1).

    Raises:
        ArgumentError: if an argument is out of range.
        ModuleNotFoundError: if the extra `privacy` is not installed.

    Example:
        >>> round(noise_for(3.849, participations=20, delta=1e-5), 3)
        5.0
    """
    check_number("epsilon", epsilon, above=0)
    result: float = _library().get_sigma_gaussian(epsilon, _check_delta(delta)) * _sqrt_count(participations)
    return result


def _sqrt_count(participations: float) -> float:
    # Metrics are floats, so an integral float is accepted.
    is_integral = isinstance(participations, float) and participations.is_integer()
    count: Any = int(participations) if is_integral else participations
    return math.sqrt(check_count("participations", count))


def _check_delta(delta: float) -> float:
    if check_number("delta", delta, above=0) >= 1:
        raise ArgumentError(f"delta: expected a number in (0, 1), got {delta!r}")
    return float(delta)


def _library() -> Any:
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("dp_accounting: pip install 'manifoldagg[privacy]'", name=error.name) from None
    return dp_accounting
