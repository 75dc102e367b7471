"""Stochastic weight averaging: the mean of every c-th model of the late part of a run."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_number, check_shape, short_repr
from manifoldagg.averaging.karcher import check_model, karcher
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import combine
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import KarcherMean, Manifold
from manifoldagg.manifolds.ambient import AmbientSpace
from manifoldagg.manifolds.formulas import geodesic
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["SWA", "update_mean"]

T = TypeVar("T")
KINDS = ("streaming", "exact")
REQUIRED_PRIMITIVES = {"streaming": {"exp", "log"}, "exact": {"exp", "log", "inner", "project"}}
STATE_KEYS = {"options", "last", "count", "like", "mean", "truncated", "kept"}
MAX_ENTRY = torch.finfo(torch.float64).max / 4
CHUNK_SIZE = 1 << 16
"""Entries that are averaged at a time: their quotients stay in cache."""


@dataclass(frozen=True)
class _AverageState:
    """The state of an average. It is replaced as a whole, so an interrupt never leaves a half-updated mean.

    Attributes:
        last_version: the latest version.
        count: how many models are averaged.
        like: their shape, dtype and device, in no memory.
        mean: their mean in float64; of what is kept since, the point that was written before it. A row where leaves are
            of low rank.
        models: models with their versions.
        truncated: what truncations of the mean left out.
    """

    last_version: int = -1
    count: int = 0
    like: Tensor | None = None
    mean: Any = None
    models: tuple[tuple[int, Tensor], ...] = ()
    truncated: float = 0.0


class SWA:
    r"""Averages the versions $\Theta^v$ of a model with $\tau = v - \mathrm{offset}$, $\tau \ge$ `start` and
    $\tau \equiv 0 \pmod{\mathrm{cycle}}$.

    It listens to a server, which calls `update` for each new version in order; by hand the loop does.

    - `kind="streaming"`: $m \leftarrow \gamma(m, \Theta; \tfrac{1}{n + 1})$, $n$ the models so far, and no model is
      kept but $m$, in float64, and memory for the next one. On a flat space that is $m + (\Theta - m) / (n + 1)$ in the
      order of these operations, so that for float64 models it equals `torch.optim.swa_utils.AveragedModel` on a CPU bit
      for bit. On a curved space it depends on the order of the models, and is a term of third order in their spread
      from
    - `kind="exact"`: all chosen models are kept; their Karcher mean is computed when it is read, with its certificate.

    Where leaves are flat or of low rank the mean is that of the matrices, of which a streaming one keeps `state_rank`;
    `truncated` says what that left out. A curved average of either kind lies on the space. Where nothing was chosen
    `average` is `None`; `averaged(model)` is then the last model, which is what a run returns. Batch normalisation
    needs its statistics anew at an average: [`refresh_buffers`][manifoldagg.curves.refresh_buffers].

    A server refuses a periodic one as its `averaging`: what listens to a server cannot write its model. Call
    `reset_point` in a loop of your own, or let the rule average and write: `rules.AsyncCurve(periodic=...)`.

    Every method may be called from any thread. An update that is interrupted has happened or has not; a server tells it
    again, which changes nothing where it has.

    Args:
        space: with leaves that are flat or of low rank, or with exp and log (and inner and project for `"exact"`).
        start: the first $\tau$ that counts, a number of versions: for the share $\sigma$ of a run of $T$ versions
            whose first part is left out, `math.ceil(sigma * T)`.
        cycle: $c$.
        kind: `"streaming"` or `"exact"`.
        offset: 0: version $\tau$ is averaged where $\tau$ meets the conditions; 1: version $\tau + 1$, as in the
            Report's Algorithm 1.
        periodic: $C$: see `reset_point`, which has to be called. `None`: never.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Source: Manifold, Algorithm 1; Report, section on its server and Algorithm 1; Izmailov et al. 2018; Guo et al. 2022
        (periodic).

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> swa = SWA(Flat(1), start=2, cycle=2)
        >>> for version in range(1, 7):
        ...     swa.update(version, torch.tensor([float(version)]))
        >>> swa.average, swa.count  # versions 2, 4 and 6
        (tensor([4.]), 3)
    """

    def __init__(
        self,
        space: Manifold,
        *,
        start: int = 0,
        cycle: int = 1,
        kind: str = "streaming",
        offset: int = 0,
        periodic: int | None = None,
    ) -> None:
        check_is_manifold(space)
        check_choice("kind", kind, KINDS)
        lacks = sorted(REQUIRED_PRIMITIVES[kind] - space.capabilities)
        if lacks and not (space.flat or space.ambient):
            raise ArgumentError(f"space: expected a flat manifold or one with {lacks[0]}, got {space}")
        self.space = space
        self.kind = kind
        self.start = check_count("start", start, at_least=0)
        self.cycle = check_count("cycle", cycle)
        self.offset = check_count("offset", offset, at_least=0)
        self.periodic = None if periodic is None else check_count("periodic", periodic)
        self._lock = threading.RLock()
        self._state = _AverageState()
        self._spare_buffer: Tensor | None = None
        self._cached_mean: tuple[object, KarcherMean] | None = None

    def __repr__(self) -> str:
        return format_result(self, kind=self.kind, start=self.start, cycle=self.cycle, count=self.count)

    def selects(self, version: int) -> bool:
        """Return whether a version is averaged."""
        place = version - self.offset
        return place >= self.start and place % self.cycle == 0

    def update(self, version: int, model: Float[Tensor, "..."]) -> None:
        """Add a new version.

        Args:
            version: higher than every one before; with the latest one again nothing happens.
            model: (*space.shape); it is only read, and copied where it is kept.

        Raises:
            ArgumentError: if the version is lower, or a chosen model is not finite, off the space, of another
                shape, dtype or device than those before, or so far from a streaming average that no geodesic between
                them is found. Nothing has changed then.
        """
        check_count("version", version, at_least=0)
        with self._lock:
            before = self._state
            if version == before.last_version:
                return
            if version < before.last_version:
                raise ArgumentError(f"version: expected one above {before.last_version}, got {version}")
            after = replace(before, last_version=version)
            if self.selects(version):
                after = self._with_model(after, check_model(self.space, model, "model", like=before.like))
            self._state = after
            if self.space.flat and after.mean is not before.mean:
                self._spare_buffer = before.mean

    @property
    def has_reset_points(self) -> bool:
        """Whether `reset_point` can return a point: whether `periodic` is given."""
        return self.periodic is not None

    @property
    def count(self) -> int:
        """The number of averaged models, since the last reset if there was one."""
        return self._state.count

    @property
    def versions(self) -> tuple[int, ...]:
        """The stored versions: the averaged ones if `kind="exact"`, none in streaming form."""
        return tuple(version for version, _ in self._state.models)

    @property
    def average(self) -> Float[Tensor, "..."] | None:
        """A copy of the average in the dtype of the models; `None` if no version was selected.

        Just after an overwriting it is the point that was written.
        """
        mean = self.mean
        if mean is not None:
            return mean.point
        return self._consistent_read(self._average_of)

    @property
    def truncated(self) -> float:
        """The sum of the Frobenius norms that truncations of a streaming mean of low-rank leaves left out."""
        return self._state.truncated

    @property
    def mean(self) -> KarcherMean | None:
        """The average of the stored models with its certificate; `None` without any, as in streaming form.

        Its tensors are copies.
        """
        kept = self._state.models
        if not kept:
            return None
        known = self._cached_mean
        if known is None or known[0] is not kept:
            known = (kept, karcher(self.space, [model for _, model in kept]))
            self._cached_mean = known
        mean = known[1]
        return replace(mean, point=mean.point.clone(), residual=mean.residual.clone())

    def average_or(self, model: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        r"""Return the average, or a copy of `model`, the last model $\Theta^T$, without one."""
        average = self.average
        return model.detach().clone() if average is None else average

    def reset_point(self, version: int) -> Float[Tensor, "..."] | None:
        r"""Return the point that replaces a version, or `None` if the version is not reset.

        A listener cannot write the model of a server. Who drives the run asks after `update(version, model)`: it is
        the average where $\tau = \mathrm{version} - \mathrm{offset}$ is a positive multiple of $C$ = `periodic` and a
        model was chosen since the last time. The average then begins anew with the next chosen version; until that it
        stays what it is. Without `periodic` always `None`.

        Args:
            version: the one that `update` was called with last.

        Raises:
            ArgumentError: if `version` is another one.
        """
        with self._lock:
            before = self._state
            if check_count("version", version, at_least=0) != before.last_version:
                raise ArgumentError(f"version: expected the latest one, {before.last_version}, got {version}")
            place = version - self.offset
            if self.periodic is None or before.count == 0 or place <= 0 or place % self.periodic:
                return None
            point = self.average
            written = None if point is None else self._to_float64(point)
            self._state = replace(before, count=0, mean=written, models=(), truncated=0.0)
            return point

    def state(self) -> dict[str, Any]:
        """Return the complete state for `load`: a tree of unshared tensors and numbers."""
        return self._consistent_read(
            lambda now: {
                "options": self._options,
                "last": now.last_version,
                "count": now.count,
                "like": None if now.like is None else now.like.new_zeros(()),
                "mean": _clone_mean(now.mean),
                "truncated": now.truncated,
                "kept": {version: model.clone() for version, model in now.models},
            }
        )

    def load(self, state: Mapping[str, Any]) -> None:
        """Resume from the return value of `state`.

        Raises:
            ArgumentError: if `state` has another structure or other options, or if its models are not points of this
                space. The average is then unchanged.
        """
        if not isinstance(state, Mapping) or set(state) != STATE_KEYS or not isinstance(state["kept"], Mapping):
            raise ArgumentError("state: expected the return value of SWA.state()")
        if state["options"] != self._options:
            raise ArgumentError(
                f"state: expected that of a SWA with {self._options}, got {short_repr(state['options'])}"
            )
        last = check_count("state['last']", state["last"], at_least=-1)
        count = check_count("state['count']", state["count"], at_least=0)
        like = state["like"]
        mean = state["mean"]
        kept = dict[int, Tensor]()
        if like is not None:
            like = check_shape("state['like']", like).detach().clone()
        truncated = check_number("state['truncated']", state["truncated"], at_least=0)
        if isinstance(mean, tuple | list) and like is not None and self.space.ambient:
            point = like.new_empty(self.space.shape, dtype=torch.float64)
            mean = _clone_mean(AmbientSpace.of(self.space, point).check("state['mean']", mean, point))
        elif mean is not None:
            mean = check_model(self.space, mean, "state['mean']").clone()
        for version in sorted(check_count("state['kept']", version, at_least=0) for version in state["kept"]):
            kept[version] = check_model(self.space, state["kept"][version], f"state['kept'][{version}]").clone()
        held = [*kept.values()] if mean is None else [mean, *kept.values()]
        exact = self.kind == "exact"
        fits = count == len(kept) if exact else not kept and (count == 0 or mean is not None)
        if not fits or (like is None) == bool(held) or max(kept, default=count - 1) > last:
            raise ArgumentError(f"state: expected the state of a SWA of kind {self.kind}")
        shape = next((x.shape for x in held if isinstance(x, Tensor)), self.space.shape)
        means = [
            ("state['mean']", x, torch.float64) for x in (mean if isinstance(mean, tuple) else (mean,)) if x is not None
        ]
        for name, x, dtype in [*means, *((f"state['kept'][{v}]", x, like.dtype) for v, x in kept.items())]:
            fitting = isinstance(mean, tuple) or x.shape == shape
            if (x.dtype, x.device) != (dtype, like.device) or not fitting:
                raise ArgumentError(f"{name}: expected a tensor {dtype} on {like.device}, got {x.dtype} on {x.device}")
        like = None if like is None else like.expand(shape)
        with self._lock:
            self._spare_buffer = None
            self._state = _AverageState(last, count, like, mean, tuple(kept.items()), truncated)

    @property
    def _options(self) -> dict[str, Any]:
        names = ("kind", "start", "cycle", "offset", "periodic")
        return {name: getattr(self, name) for name in names}

    def _consistent_read(self, read: Callable[[_AverageState], T]) -> T:
        """Return what `read` copies from the state, without waiting for a lock.

        The memory of a mean is reused only after the state has been replaced. So a copy is consistent if the state is
        still the same afterwards; otherwise `read` is called again.
        """
        while True:
            state = self._state
            result = read(state)
            if self._state is state:
                return result

    def _with_model(self, state: _AverageState, model: Tensor) -> _AverageState:
        """The state with the latest model, a selected one, added."""
        like = model.new_empty(()).expand(model.shape)
        count = state.count + 1
        if (
            self.space.flat
            and model.dtype == torch.float64
            and model.numel()
            and max(map(abs, torch.stack(model.aminmax()).tolist())) > MAX_ENTRY
        ):
            raise ArgumentError(f"model: expected entries up to {MAX_ENTRY:g}, differences of which are numbers")
        if self.kind == "exact":
            kept = (*state.models, (state.last_version, model.clone()))
            return replace(state, count=count, like=like, models=kept)
        if state.count == 0 or state.mean is None:
            return replace(state, count=count, like=like, mean=self._to_float64(model))
        if self.space.ambient:
            ambient = AmbientSpace.of(self.space, model)
            mean = ambient.for_state(
                [state.mean, model], [1.0, 1 / count], minus=[None, state.mean], dtype=torch.float64
            )
            truncated = state.truncated + ambient.diagnostics["state_truncated"]
            return replace(state, count=count, like=like, mean=mean, truncated=truncated)
        return replace(state, count=count, like=like, mean=self._running_mean(state.mean, model, count))

    def _average_of(self, state: _AverageState) -> Tensor | None:
        """The mean in the dtype of the models, a copy."""
        if state.mean is None or state.like is None:
            return None
        if isinstance(state.mean, tuple):
            return AmbientSpace.of(self.space, state.like).to_point(state.mean, state.like)
        mean: Tensor = state.mean.to(state.like.dtype, copy=True)
        return mean

    def _running_mean(self, mean: Tensor, model: Tensor, count: int) -> Tensor:
        """The mean of `count` models, the last of which is `model`."""
        if self.space.flat:
            # Taken out of its place before it is written: an update that interrupts this one finds none.
            spare = self._spare_buffer
            self._spare_buffer = None
            out = empty_like(mean) if spare is None else spare
            update_mean(mean.view(-1), model.reshape(-1), count, out=out.view(-1))
            return out
        between = geodesic(self.space, mean, self._to_float64(model), 1.0 / count)
        try:
            return self._to_float64(check_model(self.space, between, "average"))
        except ArgumentError:
            raise ArgumentError(
                "model: expected one that a geodesic joins to the average; it is too far away"
            ) from None

    def _to_float64(self, model: Tensor) -> Tensor:
        """A copy in float64, brought onto the space, which a narrower dtype misses by its rounding."""
        point = model.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return point if self.space.flat or "project" not in self.space.capabilities else self.space._project(point)


def _clone_mean(mean: Any) -> Any:
    """A mean in memory of its own."""
    if isinstance(mean, tuple):
        return tuple([piece.detach().clone() for piece in mean])
    return None if mean is None else mean.clone()


def update_mean(
    mean: Float[Tensor, " P"], model: Float[Tensor, " P"], count: int, *, out: Float[Tensor, " P"]
) -> Float[Tensor, " P"]:
    r"""Compute $m + (\Theta - m) / n$ for the n-th model, rounded as written, in `out` (float64, as is `mean`).

    The quotient is not a product with $1/n$, which would be rounded once more, so that one combination of the rows does
    not do: the difference and the sum are one each, piece by piece, without scratch of size P.

    Example:
        >>> mean = torch.tensor([1.0], dtype=torch.float64)
        >>> update_mean(mean, torch.tensor([4.0]), 3, out=torch.empty_like(mean))
        tensor([2.], dtype=torch.float64)
    """
    scratch = mean.new_empty(min(CHUNK_SIZE, len(mean)))
    for low in range(0, len(mean), CHUNK_SIZE):
        piece = mean[low : low + CHUNK_SIZE]
        step = combine(None, [model[low : low + CHUNK_SIZE]], [1.0], minus=piece, out=scratch[: len(piece)])
        combine(piece, [step.div_(count)], [1.0], out=out[low : low + CHUNK_SIZE])
    return out
