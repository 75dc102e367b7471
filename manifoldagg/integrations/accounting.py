r"""Privacy accounting: $(\varepsilon, \delta)$ of a private rule, by Google's `dp-accounting`.

For [`Private`][manifoldagg.federated.rules.Private]: Gaussian mechanisms of noise multiplier $\sigma$, all of which say
no more of a client than one of $\sigma / \sqrt n$, n its participations. Nothing is claimed for clients being drawn at
random: the first clients to reply are not a uniform sample. Needs the extra `privacy`.
"""

import math
from typing import Any

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError

__all__ = ["epsilon", "noise_for"]


def epsilon(noise: float, *, participations: int, delta: float) -> float:
    r"""Compute the smallest $\varepsilon$ for which the models are $(\varepsilon, \delta)$-private for every client.

    $$\delta = \Phi\Bigl(\frac{\mu}{2} - \frac{\varepsilon}{\mu}\Bigr)
      - e^\varepsilon\, \Phi\Bigl(-\frac{\mu}{2} - \frac{\varepsilon}{\mu}\Bigr), \qquad \mu = \frac{\sqrt n}{\sigma}.$$

    Two runs are compared, in one of which all updates of a client are zero. Where they may be any others, $\mu$ is
    twice as large: ask for half the noise.

    Args:
        noise: $\sigma > 0$, as in [`Private`][manifoldagg.federated.rules.Private].
        participations: n, the limit that was set there, or what `numbers["participations"]` says.
        delta: $\delta$ in (0, 1), much smaller than one over the number of clients.

    Raises:
        ArgumentError: naming the argument that is out of range.
        ModuleNotFoundError: naming the extra.

    Source: Balle, Wang 2018, Theorem 8; Dong, Roth, Su 2022, Corollary 3.3.

    Example:
        >>> round(epsilon(5.0, participations=20, delta=1e-5), 3)
        3.849
    """
    check_number("noise", noise, above=0)
    found: float = _library().get_epsilon_gaussian(noise / _root(participations), _small(delta))
    return found


def noise_for(epsilon: float, *, participations: int, delta: float) -> float:
    r"""Compute the smallest noise multiplier $\sigma$ whose `epsilon` is at most this.

    Args:
        epsilon: $\varepsilon > 0$.
        participations: n, as above.
        delta: $\delta$ in (0, 1).

    Raises:
        ArgumentError: naming the argument that is out of range.
        ModuleNotFoundError: naming the extra.

    Example:
        >>> round(noise_for(3.849, participations=20, delta=1e-5), 3)
        5.0
    """
    check_number("epsilon", epsilon, above=0)
    found: float = _library().get_sigma_gaussian(epsilon, _small(delta)) * _root(participations)
    return found


def _root(participations: int) -> float:
    return math.sqrt(check_count("participations", participations))


def _small(delta: float) -> float:
    if check_number("delta", delta, above=0) >= 1:
        raise ArgumentError(f"delta: expected a number in (0, 1), got {delta!r}")
    return float(delta)


def _library() -> Any:
    try:
        import dp_accounting
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("dp_accounting: pip install 'manifoldagg[privacy]'", name=error.name) from None
    return dp_accounting
