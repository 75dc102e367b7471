"""Stochastic weight averaging, which averages some models from the late part of a run."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

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
from manifoldagg.tensor_file import load as load_file
from manifoldagg.tensor_file import save as save_file

__all__ = ["SWA", "update_mean"]

T = TypeVar("T")
KINDS = ("streaming", "exact")
REQUIRED_PRIMITIVES = {"streaming": {"exp", "log"}, "exact": {"exp", "log", "inner", "project"}}
FILE_KIND = "averaged model"
STATE_KEYS = {"options", "last", "count", "like", "mean", "truncated", "kept"}
MAX_ENTRY = torch.finfo(torch.float64).max / 4
"""The largest absolute entry of a float64 model. Differences of models and means then do not overflow."""
CHUNK_SIZE = 1 << 16
"""The number of entries that are averaged at a time. The intermediate results then fit into the cache."""


@dataclass(frozen=True)
class _AverageState:
    """The state of a running average of models.

    The object is immutable. Each update replaces it by a new object, so an interrupt never leaves a partial result.

    Attributes:
        last_version: the number of the latest version, or -1 before the first version.
        count: the number of averaged models.
        like: a tensor with the shape, dtype and device of the models. It is expanded from one number to save memory.
        mean: the mean in float64. It is a tuple of tensors if some parameters are low-rank matrices. After a reset, it
            is the average that replaced the model of the training loop.
        models: the stored models with their versions.
        truncated: the sum of the Frobenius norms of all truncated parts, if the mean is truncated to a limited rank.
    """

    last_version: int = -1
    count: int = 0
    like: Tensor | None = None
    mean: Any = None
    models: tuple[tuple[int, Tensor], ...] = ()
    truncated: float = 0.0


class SWA:
    r"""Stochastic weight averaging: the mean of every c-th version of a model, beginning with a given version.

    The average of several models of a run is often more accurate than its last model. A server or a custom loop calls
    `update` for each new version of the model, in order. Version $v$ has the index $\tau = v - \mathrm{offset}$. It is
    averaged if $\tau \ge$ `start` and if $\tau$ is a multiple of `cycle`.

    There are two kinds of averages:

    - `kind="streaming"` updates the mean with each model: $m \leftarrow \gamma(m, \Theta; \tfrac{1}{n + 1})$, where $n$
      is the number of averaged models so far and $\gamma$ the geodesic. It stores $m$ in float64 and memory for the
      next mean. On a flat space, the result is $m + (\Theta - m) / (n + 1)$. For float64 models on a CPU, it is bitwise
      equal to `torch.optim.swa_utils.AveragedModel`. On a curved space, the result depends on the order of the models.
      It differs from the Karcher mean by a term of third order in their spread.
    - `kind="exact"` stores all selected models and computes their Karcher mean when the mean is read.

    Further properties:

    - Flat and low-rank leaves are averaged as matrices. A streaming mean of a low-rank leaf is truncated to the rank
      `state_rank`, and `truncated` is the norm of the removed part.
    - An average on a curved space is a point of the space.
    - If no version was selected, `average` is `None`, and `average_or(model)` returns a copy of `model`.
    - Recompute the statistics of batch normalisation for an average with
      [`refresh_buffers`][manifoldagg.curves.refresh_buffers].
    - Every method is thread-safe and atomic under interrupts. A server repeats an interrupted update. If the update was
      already applied, repeating it has no effect.

    With `periodic`, `reset_point` returns the averages with which a custom loop replaces its model. A server rejects
    such an average as its `averaging`, because a callback cannot write the server's model. Use a rule that averages and
    writes instead: `rules.AsyncCurve(periodic=...)`.

    Args:
        space: a space whose leaves are flat or of low rank, or have `exp` and `log` (also `inner` and `project` for
            `"exact"`).
        start: the first $\tau$ that is averaged, in versions. To skip the fraction $\sigma$ of a run of $T$ versions,
            use `math.ceil(sigma * T)`.
        cycle: $c$.
        kind: `"streaming"` or `"exact"`.
        offset: the version with the index $\tau = 0$. The Report's Algorithm 1 uses the offset 1.
        periodic: $C$, the period of `reset_point`. `None` disables resets.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.

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
        # A signal handler can call a method while its own thread holds the lock, so the lock is reentrant.
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
            version: a number above all previous versions. If it equals the latest version, nothing happens.
            model: (*space.shape). The model is not modified and is stored only as a copy.

        Raises:
            ArgumentError: if the version is lower than the latest version. Also if a selected model is not finite, is
                not on the space, or differs from previous models in shape, dtype or device. Also if no geodesic from a
                streaming average to the model is found, because they are too far apart. The average is then unchanged.
        """
        check_count("version", version, at_least=0)
        with self._lock:
            before = self._state
            if version == before.last_version:
                return
            if version < before.last_version:
                raise ArgumentError(f"version: expected a version above {before.last_version}, got {version}")
            # A version that is not selected is neither read nor validated.
            after = replace(before, last_version=version)
            if self.selects(version):
                after = self._with_model(after, check_model(self.space, model, "model", like=before.like))
            self._state = after
            # The buffer of the old mean is reused for the next mean, which saves an allocation per update.
            if self.space.flat and after.mean is not before.mean:
                self._spare_buffer = before.mean

    @property
    def has_reset_points(self) -> bool:
        """Whether `periodic` is given, so that `reset_point` can return a point."""
        return self.periodic is not None

    @property
    def count(self) -> int:
        """The number of averaged models since the start or the last reset."""
        return self._state.count

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions of the stored models. A streaming average stores no models."""
        return tuple(version for version, _ in self._state.models)

    @property
    def average(self) -> Float[Tensor, "..."] | None:
        """A copy of the average in the dtype of the models, or `None` before the first model has been averaged.

        The average changes only when another model is averaged. It does not change when a training loop replaces its
        model by the average (see `reset_point`).
        """
        mean = self.mean
        if mean is not None:
            return mean.point
        return self._consistent_read(self._average_of)

    @property
    def truncated(self) -> float:
        """The sum of the truncation errors (Frobenius norms) in all updates of a low-rank streaming mean."""
        return self._state.truncated

    @property
    def mean(self) -> KarcherMean | None:
        """A copy of the Karcher mean of the stored models, with its residual (a measure of its numerical error).

        The value is `None` if no model is stored. Models are stored only if the option `kind` is `"exact"`.
        """
        models = self._state.models
        if not models:
            return None
        # `models` is an immutable tuple, so its identity shows whether the cached mean is current.
        cached = self._cached_mean
        if cached is None or cached[0] is not models:
            cached = (models, karcher(self.space, [model for _, model in models]))
            self._cached_mean = cached
        mean = cached[1]
        return replace(mean, point=mean.point.clone(), residual=mean.residual.clone())

    def average_or(self, model: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        r"""Return the average. If there is no average, return a copy of `model`."""
        average = self.average
        return model.detach().clone() if average is None else average

    def reset_point(self, version: int) -> Float[Tensor, "..."] | None:
        r"""Return the average if it should now replace the model of the training loop, and `None` otherwise.

        Call this method after each `update(version, model)`. If it returns an average, write this average to the model.
        This is called a reset. After a reset, the next averaged model starts a new average.

        The method returns the average if all of these conditions are met:

        - The option `periodic` of the constructor is set.
        - `version - offset` is a positive multiple of `periodic`, where `offset` is also an option of the constructor.
        - At least one model was averaged since the last reset.

        Args:
            version: the version of the last call of `update`.

        Raises:
            ArgumentError: if `version` is not the version of the last call of `update`.
        """
        with self._lock:
            before = self._state
            if check_count("version", version, at_least=0) != before.last_version:
                raise ArgumentError(f"version: expected the latest version, {before.last_version}, got {version}")
            place = version - self.offset
            if self.periodic is None or before.count == 0 or place <= 0 or place % self.periodic:
                return None
            point = self.average
            written = None if point is None else self._to_float64(point)
            self._state = replace(before, count=0, mean=written, models=(), truncated=0.0)
            return point

    def state(self) -> dict[str, Any]:
        """Return the complete state for `load`: a tree of copied tensors and numbers."""
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

    def save(self, path: str | Path) -> None:
        """Write `state` to a file for `load`, and replace an existing file atomically.

        Raises:
            ArgumentError: if the folder of `path` does not exist.
            CheckpointError: if the file cannot be written. An existing file is then unchanged.
        """
        save_file(path, FILE_KIND, self.state())

    def load(self, state: Mapping[str, Any] | str | Path) -> None:
        """Resume from the return value of `state`, or from a file that `save` has written.

        Raises:
            ArgumentError: if `state` has an invalid structure or other options, or if its models are not points of this
                space. The average is then unchanged.
            CheckpointError: if the file does not exist, is damaged, or has other contents.

        Example:
            >>> import tempfile
            >>> from manifoldagg.manifolds import Flat
            >>> average = SWA(Flat(1))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     average.update(0, torch.tensor([1.0]))
            ...     average.save(folder + "/average")
            ...     resumed = SWA(Flat(1))
            ...     resumed.load(folder + "/average")
            >>> resumed.update(1, torch.tensor([3.0]))
            >>> resumed.average
            tensor([2.])
        """
        if isinstance(state, str | Path):
            state = load_file(state, FILE_KIND)
        if not isinstance(state, Mapping) or set(state) != STATE_KEYS or not isinstance(state["kept"], Mapping):
            raise ArgumentError(
                f"state: expected the return value of SWA.state() or the path of a file, got {short_repr(state)}"
            )
        if state["options"] != self._options:
            raise ArgumentError(
                f"state: expected the state of an SWA with {self._options}, got {short_repr(state['options'])}"
            )
        last = check_count("state['last']", state["last"], at_least=-1)
        count = check_count("state['count']", state["count"], at_least=0)
        like = state["like"]
        mean = state["mean"]
        models = dict[int, Tensor]()
        if like is not None:
            like = check_shape("state['like']", like).detach().clone()
        truncated = check_number("state['truncated']", state["truncated"], at_least=0)
        if isinstance(mean, tuple | list) and like is not None and self.space.ambient:
            point = like.new_empty(self.space.shape, dtype=torch.float64)
            mean = _clone_mean(AmbientSpace.of(self.space, point).check("state['mean']", mean, point))
        elif mean is not None:
            mean = check_model(self.space, mean, "state['mean']").clone()
        for version in sorted(check_count("state['kept']", version, at_least=0) for version in state["kept"]):
            models[version] = check_model(self.space, state["kept"][version], f"state['kept'][{version}]").clone()
        stored = [*models.values()] if mean is None else [mean, *models.values()]
        # An exact average stores one model for each counted version, and a streaming average stores only their mean.
        # The latest of `count` averaged versions is at least `count` - 1, because versions start at 0.
        exact = self.kind == "exact"
        fits = count == len(models) if exact else not models and (count == 0 or mean is not None)
        if not fits or (like is None) == bool(stored) or max(models, default=count - 1) > last:
            raise ArgumentError(f"state: expected the state of a SWA of kind {self.kind}")
        shape = next((x.shape for x in stored if isinstance(x, Tensor)), self.space.shape)
        means = [
            ("state['mean']", x, torch.float64) for x in (mean if isinstance(mean, tuple) else (mean,)) if x is not None
        ]
        for name, x, dtype in [*means, *((f"state['kept'][{v}]", x, like.dtype) for v, x in models.items())]:
            fitting = isinstance(mean, tuple) or x.shape == shape
            if (x.dtype, x.device) != (dtype, like.device) or not fitting:
                raise ArgumentError(f"{name}: expected a tensor {dtype} on {like.device}, got {x.dtype} on {x.device}")
        like = None if like is None else like.expand(shape)
        with self._lock:
            self._spare_buffer = None
            self._state = _AverageState(last, count, like, mean, tuple(models.items()), truncated)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} has a lock: it cannot be copied or pickled; pass its `state()` to `load`"
        )

    @property
    def _options(self) -> dict[str, Any]:
        """The options that a stored state must share with this object."""
        names = ("kind", "start", "cycle", "offset", "periodic")
        return {name: getattr(self, name) for name in names}

    def _consistent_read(self, read: Callable[[_AverageState], T]) -> T:
        """Return `read(state)` for the current state, without waiting for a lock."""
        # `read` copies the values that it returns. An update in another thread can overwrite the mean during the copy.
        # It also replaces the state object, so the comparison detects it, and the loop calls `read` again.
        while True:
            state = self._state
            result = read(state)
            if self._state is state:
                return result

    def _with_model(self, state: _AverageState, model: Tensor) -> _AverageState:
        """Return the state after another model. The given state is not modified.

        Raises:
            ArgumentError: if differences of the model from the mean could overflow, or if no geodesic to it is found.
        """
        # An expanded scalar has the shape of the model, but the memory of a single entry.
        like = model.new_empty(()).expand(model.shape)
        count = state.count + 1
        if (
            self.space.flat
            and model.dtype == torch.float64
            and model.numel()
            and max(map(abs, torch.stack(model.aminmax()).tolist())) > MAX_ENTRY
        ):
            raise ArgumentError(
                f"model: expected entries up to {MAX_ENTRY:g}, got larger entries, whose differences can overflow"
            )
        if self.kind == "exact":
            kept = (*state.models, (state.last_version, model.clone()))
            return replace(state, count=count, like=like, models=kept)
        if state.count == 0 or state.mean is None:
            return replace(state, count=count, like=like, mean=self._to_float64(model))
        if self.space.ambient:
            # The sum is m + (Θ - m) / n, so a model that equals the mean changes nothing.
            ambient = AmbientSpace.of(self.space, model)
            mean = ambient.for_state(
                [state.mean, model], [1.0, 1 / count], minus=[None, state.mean], dtype=torch.float64
            )
            truncated = state.truncated + ambient.diagnostics["state_truncated"]
            return replace(state, count=count, like=like, mean=mean, truncated=truncated)
        return replace(state, count=count, like=like, mean=self._running_mean(state.mean, model, count))

    def _average_of(self, state: _AverageState) -> Tensor | None:
        """Return the average of a state in the dtype of the models, as a copy."""
        if state.mean is None or state.like is None:
            return None
        if isinstance(state.mean, tuple):
            return AmbientSpace.of(self.space, state.like).to_point(state.mean, state.like)
        mean: Tensor = state.mean.to(state.like.dtype, copy=True)
        return mean

    def _running_mean(self, mean: Tensor, model: Tensor, count: int) -> Tensor:
        """Return the mean of `count` models, given the mean of the first models and the last model."""
        if self.space.flat:
            # The spare buffer is removed before it is written. Otherwise, an update in a signal handler could write to
            # the same buffer.
            spare = self._spare_buffer
            self._spare_buffer = None
            out = empty_like(mean) if spare is None else spare
            update_mean(mean.view(-1), model.reshape(-1), count, out=out.view(-1))
            return out
        # On a flat space, the fraction 1 / n gives all n models the same weight.
        between = geodesic(self.space, mean, self._to_float64(model), 1.0 / count)
        try:
            return self._to_float64(check_model(self.space, between, "average"))
        except ArgumentError:
            raise ArgumentError(
                "model: expected a model with a geodesic to the average, got a model that is too far away"
            ) from None

    def _to_float64(self, model: Tensor) -> Tensor:
        """Copy a model to float64, and project it onto the space to remove the rounding errors of its dtype."""
        point = model.to(torch.float64, copy=True, memory_format=torch.contiguous_format)
        return point if self.space.flat or "project" not in self.space.capabilities else self.space._project(point)


def _clone_mean(mean: Any) -> Any:
    """Copy the mean of a state, which is a tensor, a tuple of tensors, or `None`."""
    if isinstance(mean, tuple):
        return tuple([piece.detach().clone() for piece in mean])
    return None if mean is None else mean.clone()


def update_mean(
    mean: Float[Tensor, " P"], model: Float[Tensor, " P"], count: int, *, out: Float[Tensor, " P"]
) -> Float[Tensor, " P"]:
    r"""Add a model to the running mean of the previous models, and write the new mean to `out`.

    For the mean $m$ of $n - 1$ models and the n-th model $\Theta$, the new mean is $m + (\Theta - m) / n$. The function
    rounds after each operation of this formula, as `torch.optim.swa_utils.AveragedModel` does. It processes the model
    in chunks, so it needs little temporary memory.

    Args:
        mean: the mean $m$ (P,).
        model: the n-th model $\Theta$ (P,).
        count: the number $n$ of models.
        out: the tensor (P,) for the result.

    Example:
        >>> mean = torch.tensor([1.0], dtype=torch.float64)
        >>> update_mean(mean, torch.tensor([4.0]), 3, out=torch.empty_like(mean))
        tensor([2.], dtype=torch.float64)
    """
    # A single linear combination would multiply by 1/n instead of dividing by n, which rounds twice.
    scratch = mean.new_empty(min(CHUNK_SIZE, len(mean)))
    for low in range(0, len(mean), CHUNK_SIZE):
        piece = mean[low : low + CHUNK_SIZE]
        step = combine(None, [model[low : low + CHUNK_SIZE]], [1.0], minus=piece, out=scratch[: len(piece)])
        combine(piece, [step.div_(count)], [1.0], out=out[low : low + CHUNK_SIZE])
    return out
