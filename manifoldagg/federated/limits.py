"""Limits on the norm, the cosine, the sample count and the staleness of updates."""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from manifoldagg._validation import KeywordHints, check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import Update
from manifoldagg.federated.weights import MAX_SAMPLES
from manifoldagg.kernels import combine
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.ambient import AmbientSpace
from manifoldagg.manifolds.formulas import norm

__all__ = ["DEFAULT_LIMITS", "NormLimitError", "Norms", "UpdateLimits", "clip_update", "update_norm", "with_norm"]

MAX_WINDOW = 10**6
"""The largest allowed `norm_window`. The server computes a median over the window for each update."""

Norms = tuple[tuple[Hashable, float], ...]
"""Pairs of a client and the norm of its latest update, with the oldest update first."""


class NormLimitError(ArgumentError):
    """Error raised if an update is much longer than the updates of other clients.

    Attributes:
        limit: the largest allowed norm. It is the option `norm_factor` of `UpdateLimits` times the median norm of the
            other clients' updates.
        norms: the norm of the latest update of each client. The rejected update is included, with `limit` as its norm.
            The server checks later updates with these norms.
    """

    def __init__(self, message: str, limit: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.norms: Norms = ()


@dataclass(frozen=True)
class UpdateLimits(KeywordHints):
    r"""Limits beyond which the server rejects or clips an update.

    An update consists of the control points $\varphi_1, \dots, \varphi_n$, of which $\varphi_n$ is the client's model.
    $\Theta^t$ is the base from which the client started, and $\Theta^\tau$ is the current model. On a curved space,
    $\exp$ and $\log$ are the exponential map and the logarithm at $\Theta^t$. A limit of `None` is disabled.

    - Norm: the norm of an update is the largest distance of a point from the base, $\max_i d(\Theta^t, \varphi_i)$.
    - Clipping: an update with the norm $r$ is clipped to the norm $c$ by
      $\varphi_i \leftarrow \exp_{\Theta^t}(\lambda \log_{\Theta^t} \varphi_i)$ with $\lambda = \min(1, c / r)$. On a
      flat space, this is $\Theta^t + \lambda (\varphi_i - \Theta^t)$. The rule receives the clipped points. Additional
      tensors are not clipped. The receipt reports `clipped`, and the history contains $\lambda$ as `clip`.
    - Cosine: the cosine of an update is the cosine of the angle between its displacement
      $v = \log_{\Theta^t} \varphi_n$ and the drift $g = \log_{\Theta^t} \Theta^\tau$, in the metric at $\Theta^t$. An
      update whose staleness or norm is zero always satisfies this limit.

    Args:
        max_norm: the largest norm.
        norm_factor: the largest norm as a multiple of the median norm of the other clients' updates.
        norm_window: the number of clients with the latest updates from which the median is computed. Zero norms do not
            count. A clipped update counts with its clipped norm. An update that `norm_factor` rejects counts with the
            largest allowed norm, so that the limit grows if most clients send longer updates.
        norm_after: the smallest number of other clients for which `norm_factor` and `clip_factor` apply.
        clip: the norm to which the server clips longer updates.
        clip_factor: the norm to which the server clips longer updates, as a multiple of the median norm of the other
            clients' updates. If `clip` is also given, the smaller norm applies.
        min_cosine: the smallest cosine, in [-1, 1].
        max_samples: the largest sample count.
        samples_factor: the largest sample count as a multiple f of the median sample count of the other clients. The
            server caps a larger count, and the receipt reports `clipped`. If n - 1 clients report equal counts, the
            weight of the remaining client is at most f / (f + n - 1).
        max_points: the largest number n of control points. The cost of a step grows at least quadratically with n.
        max_staleness: the largest staleness, in versions.

    Raises:
        ArgumentError: if a limit is out of range.

    Source: Sun et al. 2019 (Can You Really Backdoor Federated Learning?), section 4, for clipping.

    Cost: if there is a limit on the norm or the cosine, the server reads the points and the base once before it calls
    the rule. For `min_cosine`, it also reads the current model. It reads and writes a clipped update once more.

    Example:
        >>> UpdateLimits(norm_factor=10.0).check_norm(25.0, others=[1.0, 2.0, 3.0, 2.0, 2.0])
        Traceback (most recent call last):
            ...
        manifoldagg.federated.limits.NormLimitError: points: expected a norm <= 20 (10 x the median of others), got 25
    """

    max_norm: float | None = None
    norm_factor: float | None = None
    norm_window: int = 101
    norm_after: int = 5
    clip: float | None = None
    clip_factor: float | None = None
    min_cosine: float | None = None
    max_samples: int = 10**9
    samples_factor: float | None = 100.0
    max_points: int = 16
    max_staleness: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness is not None:
            check_count("max_staleness", self.max_staleness, at_least=0)
        for name in ("max_norm", "norm_factor", "clip", "clip_factor"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        if self.min_cosine is not None:
            check_number("min_cosine", self.min_cosine, at_least=-1, at_most=1)
        if self.samples_factor is not None:
            check_number("samples_factor", self.samples_factor, at_least=1)
        for name in ("norm_window", "norm_after", "max_samples", "max_points"):
            check_count(name, getattr(self, name))
        if self.max_samples > MAX_SAMPLES:
            raise ArgumentError(f"max_samples: expected at most 2^53, got {short_repr(self.max_samples)}")
        if self.norm_window > MAX_WINDOW:
            raise ArgumentError(f"norm_window: expected at most {MAX_WINDOW}, got {short_repr(self.norm_window)}")
        if self.norm_after > self.norm_window:
            # If `norm_after` has its default, the user has probably passed only `norm_window`. The message then starts
            # with this argument.
            if self.norm_after == UpdateLimits.norm_after:
                raise ArgumentError(
                    f"norm_window: expected at least norm_after = {self.norm_after}, got {short_repr(self.norm_window)}"
                )
            raise ArgumentError(
                f"norm_after: expected at most norm_window = {self.norm_window}, got {short_repr(self.norm_after)}"
            )

    @cached_property
    def uses_clipping(self) -> bool:
        """Whether the limits may clip an update."""
        return self.clip is not None or self.clip_factor is not None

    @cached_property
    def needs_norms(self) -> bool:
        """Whether a limit depends on the norm or the cosine of an update."""
        limits = (self.max_norm, self.norm_factor, self.min_cosine)
        return self.uses_clipping or any(limit is not None for limit in limits)

    def check_space(self, space: Manifold) -> None:
        """Check that a space supports the operations that the limits need, such as `log`.

        Raises:
            ArgumentError: if the space lacks an operation.
        """
        if space.flat or space.ambient or not self.needs_norms:
            return
        lacks = sorted(({"inner", "log"} | ({"exp"} if self.uses_clipping else set())) - space.capabilities)
        if lacks:
            raise ArgumentError(
                f"limits: update: expected a space with {', '.join(lacks)} for norms, got {short_repr(space)}"
            )

    def apply(self, space: Manifold, update: Update, norms: Norms) -> tuple[Update, float, Norms]:
        r"""Check the norm and the cosine of an update, and clip the update.

        Args:
            space: the space of the models.
            update: the update.
            norms: the latest norms of the clients.

        Returns:
            The clipped update for the rule, the factor $\lambda$, and the latest norms of the clients including this
            update.

        Raises:
            ArgumentError: if the update exceeds a limit.
            NormLimitError: if the exceeded limit is `norm_factor`.
        """
        late = self.min_cosine is not None and update.staleness > 0
        length, cosine = _norm_and_cosine(space, update.base, update.points, update.current if late else None)
        others = [norm for client, norm in norms if client != update.client]
        try:
            self.check_norm(length, others)
        except NormLimitError as error:
            error.norms = with_norm(norms, update.client, error.limit, self.norm_window)
            raise
        if self.min_cosine is not None and cosine < self.min_cosine:
            raise ArgumentError(f"points: expected a cosine with the drift >= {self.min_cosine:g}, got {cosine:g}")
        limit = self.clip_threshold(others)
        kept = 1.0 if length <= limit else limit / length
        if kept < 1:
            update = replace(update, points=clip_update(space, update.base, update.points, kept))
        return update, kept, with_norm(norms, update.client, min(length, limit), self.norm_window)

    def clip_threshold(self, others: Sequence[float]) -> float:
        """Return the norm above which the server clips an update.

        It is the smaller of two norms: the option `clip`, and the option `clip_factor` times the median of `others`
        (the latest norms of the other clients). If neither option applies, the result is infinity.

        Example:
            >>> limits = UpdateLimits(clip=5.0, clip_factor=2.0, norm_after=3)
            >>> [limits.clip_threshold(norms) for norms in ([1.0, 2.0], [1.0, 2.0, 3.0], [1.0, 3.0, 4.0])]
            [5.0, 4.0, 5.0]
        """
        return min(math.inf if self.clip is None else self.clip, self._limit_by_median(self.clip_factor, others))

    def check_norm(self, norm: float, others: Sequence[float]) -> None:
        """Check that a norm is a finite number and satisfies `max_norm` and `norm_factor`.

        Args:
            norm: the norm of an update.
            others: the latest norms of the other clients. Zeros do not count.

        Raises:
            ArgumentError: if the norm is not finite or exceeds a limit.
            NormLimitError: if the exceeded limit is `norm_factor`.
        """
        check_number("points: norm", norm)
        if self.max_norm is not None and norm > self.max_norm:
            raise ArgumentError(f"points: expected a norm <= {self.max_norm:g}, got {norm:g}")
        limit = self._limit_by_median(self.norm_factor, others)
        if norm > limit:
            why = f"{self.norm_factor:g} x the median of others"
            raise NormLimitError(f"points: expected a norm <= {limit:g} ({why}), got {norm:g}", limit)

    def _limit_by_median(self, factor: float | None, others: Sequence[float]) -> float:
        """Return the largest allowed norm: `factor` times the median of `others`, or infinity."""
        if factor is None:
            return math.inf
        # A zero norm would lower the median, although it contains no information about the norms of other updates.
        # With fewer than `norm_after` other norms, there is no limit.
        norms = [norm for norm in others if norm > 0]
        return factor * float(np.median(norms)) if len(norms) >= self.norm_after else math.inf


DEFAULT_LIMITS = UpdateLimits()


def with_norm(norms: Norms, client: Hashable, norm: float, window: int) -> Norms:
    """Record the norm of a client's new update, and return the latest norm of each client.

    The result contains only the `window` clients with the most recent updates, in the order of these updates. A norm of
    zero is not recorded.

    Example:
        >>> with_norm((("a", 1.0), ("b", 2.0)), "a", 3.0, window=2)
        (('b', 2.0), ('a', 3.0))
    """
    if norm <= 0:
        return norms
    return (*[pair for pair in norms if pair[0] != client], (client, norm))[-window:]


def update_norm(space: Manifold, base: Tensor, points: Tensor) -> float:
    r"""Return the norm of an update, which is the largest distance between its base and one of its points.

    For the points $\varphi_i$ and the base $\Theta^t$, the norm is $\max_i d(\Theta^t, \varphi_i)$. If a distance is
    NaN, the result is infinity.
    """
    return _norm_and_cosine(space, base, points, None)[0]


def clip_update(space: Manifold, base: Tensor, points: Tensor, factor: float) -> Tensor:
    r"""Clip an update: move its points towards the model from which the client started.

    For the points $\varphi_i$, the start model $\Theta^t$ (`base`) and the factor $\lambda \in (0, 1)$, the clipped
    points are $\exp_{\Theta^t}(\lambda \log_{\Theta^t} \varphi_i)$.

    - On a flat space, this is $\Theta^t + \lambda (\varphi_i - \Theta^t)$. Each entry is rounded once.
    - For tensors of low rank, the scaled point can have a higher rank. The function then returns the nearest point of
      low rank. If the norm of the result is above $\lambda$ times the norm of the update, the function repeats this
      with $\lambda / 2$. This is enough, because the nearest point is at most twice as far from the base as the scaled
      point.

    Args:
        space: the space of the points.
        base: the base $\Theta^t$, (P,).
        points: the points $\varphi_i$, (n, P).
        factor: the factor $\lambda \in (0, 1)$ by which the distances from the base shrink.
    """
    if space.flat:
        scaled = torch.empty_like(points, memory_format=torch.contiguous_format)
        start = base.flatten()
        for row, out in zip(points.flatten(1), scaled.flatten(1), strict=True):
            combine(start, [row], [factor], minus=[start], out=out)
        return scaled
    if not space.ambient:
        starts = base.expand_as(points)
        moved = space._exp(starts, factor * space._log(starts, points))
        return space._project(moved) if "project" in space.capabilities else moved
    goal = factor * update_norm(space, base, points)
    nearest = _nearest_low_rank(space, base, points, factor)
    if update_norm(space, base, nearest) > goal * (1 + torch.finfo(points.dtype).eps):
        nearest = _nearest_low_rank(space, base, points, factor / 2)
    return nearest


def _nearest_low_rank(space: Manifold, base: Tensor, points: Tensor, factor: float) -> Tensor:
    return torch.stack([AmbientSpace.of(space, base).combine(base, [row], [factor], minus=[base]) for row in points])


def _norm_and_cosine(space: Manifold, base: Tensor, points: Tensor, current: Tensor | None) -> tuple[float, float]:
    """Return the norm of an update, and the cosine between the changes of the client's and the server's model.

    The client's model changed from `base` to `points[-1]`, and the server's model changed from `base` to `current`. If
    `current` is `None` or a change is zero, the cosine is NaN. If the norm is NaN, the function returns infinity.
    """
    ends = points if current is None else [*points, current]
    if space.flat or space.ambient:
        rows = [*ends] if space.ambient else [row.flatten() for row in ends]
        start = base if space.ambient else base.flatten()
        inner = AmbientSpace.of(space, base).gram(rows, minus=[start] * len(rows))[0]
        lengths = inner.diagonal().clamp(min=0).sqrt()
        product = inner[len(points) - 1, -1]
    else:
        stacked = points if current is None else torch.cat([points, current[None]])
        logs = space._log(base.expand_as(stacked), stacked)
        lengths = norm(space, base.expand_as(stacked), logs)
        product = space._inner(base, logs[len(points) - 1], logs[-1])
    largest = lengths[: len(points)].max().item()
    both = (lengths[len(points) - 1] * lengths[-1]).item()
    known = current is not None and both > 0
    cosine = max(-1.0, min(1.0, product.item() / both)) if known else math.nan
    return math.inf if math.isnan(largest) else largest, cosine
