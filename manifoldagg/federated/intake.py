"""The intake of a server: what a first model and a payload must be, and how far it may go."""

import heapq
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_choice, check_count, check_finite, check_number, check_shape
from manifoldagg.federated.contract import Payload, Update
from manifoldagg.federated.weights import MOST
from manifoldagg.kernels import combine
from manifoldagg.kernels.rows import is_transformed
from manifoldagg.manifolds import Manifold, ParameterSpace, check_point
from manifoldagg.manifolds.ambient import Ambient
from manifoldagg.manifolds.formulas import norm
from manifoldagg.manifolds.layout import MASTER_DTYPES, Entry
from manifoldagg.manifolds.names import wrapping

__all__ = [
    "UNLIMITED",
    "Checks",
    "Form",
    "admit",
    "blame",
    "by_name",
    "check_names",
    "check_samples",
    "check_start",
    "norm_of",
    "scaled_back",
    "stored",
]

WIDEST = 10**6
"""The longest window of norms: a median over it is taken with every update."""
LISTED = 5
"""How many wrong names a refusal lists."""
NESTED = attrgetter("is_nested")
DTYPE = attrgetter("dtype")
SHAPE = attrgetter("shape")
DEVICE = attrgetter("device")
LAYOUT = attrgetter("layout")
FIELDS = attrgetter("points", "samples", "tensors", "numbers", "buffers", "base")
WRAPPED = torch._C._functorch.is_functorch_wrapped_tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Checks:
    r"""Limits on what a client may send; what is beyond them is refused, or scaled back.

    The norm of an update is the largest distance of its points from its base, $\max_i d(\Theta^t, \varphi_i)$. An
    update of norm r that is clipped to c is $\exp_{\Theta^t}(\lambda \log_{\Theta^t} \varphi_i)$ with
    $\lambda = \min(1, c / r)$, one $\lambda$ for all its points: on a flat space
    $\Theta^t + \lambda (\varphi_i - \Theta^t)$. The rule sees nothing else of it, but for further tensors that it asks
    for, which no norm is taken of. Its receipt says `clipped`, its row in the history what $\lambda$ was: `clip`.

    The cosine of an update is that of $v = \log_{\Theta^t} \varphi_n$ and the drift $g = \log_{\Theta^t} \Theta^\tau$,
    which is what other clients did since, in the metric at $\Theta^t$. Of an update that is not late it says nothing:
    such pass, as do those of no length.

    Args:
        max_norm: the largest norm.
        norm_factor: the largest norm in medians of the norms that were accepted lately.
        norm_window: how many accepted norms are lately; of clipped updates what was left of them.
        norm_after: how many there must be before `norm_factor` or `clip_factor` holds.
        clip: scale back to this norm what is longer.
        clip_factor: scale back to so many of those medians. With both the smaller one counts.
        min_cosine: the smallest cosine, in [-1, 1].
        max_samples: the largest sample count.
        samples_factor: how many medians of what at least five other clients have told a sample count is worth. Of what
            is beyond, the update's weight knows nothing, and its receipt says `clipped`. `None` for no limit.
        max_points: how many control points an update may have: the cost of a step grows with their square and more.

    Raises:
        ArgumentError: naming the limit that is out of range.

    Source: clipping as in Sun et al. 2019 (Can You Really Backdoor Federated Learning?), section 4.

    Cost: where a norm or a cosine is asked for, a reading of the update's points and base (and of the model for
    `min_cosine`) before the rule reads them; an update that is clipped is read and written once more.

    Example:
        >>> Checks(norm_factor=10.0).refuse(25.0, accepted=[1.0, 2.0, 3.0, 2.0, 2.0])
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: points: expected a norm <= 20 (10 x the median of those accepted), got 25
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

    def __post_init__(self) -> None:
        for name in ("max_norm", "norm_factor", "clip", "clip_factor"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0)
        if self.min_cosine is not None:
            check_number("min_cosine", self.min_cosine, at_least=-1, at_most=1)
        if self.samples_factor is not None:
            check_number("samples_factor", self.samples_factor, at_least=1)
        for name in ("norm_window", "norm_after", "max_samples", "max_points"):
            check_count(name, getattr(self, name))
        if self.max_samples > MOST:
            raise ArgumentError("max_samples: expected at most 2^53")
        if self.norm_window > WIDEST:
            raise ArgumentError(f"norm_window: expected at most {WIDEST}")
        if self.norm_after > self.norm_window:
            raise ArgumentError(f"norm_after: expected at most norm_window = {self.norm_window}, got {self.norm_after}")

    @cached_property
    def clips(self) -> bool:
        """Whether an update may be scaled back."""
        return self.clip is not None or self.clip_factor is not None

    @cached_property
    def measured(self) -> bool:
        """Whether the norm of an update, or its cosine, is asked for."""
        limits = (self.max_norm, self.norm_factor, self.min_cosine)
        return self.clips or any(limit is not None for limit in limits)

    def check_space(self, space: Manifold) -> None:
        """That what is asked for has a meaning on a space.

        Raises:
            ArgumentError: naming what it lacks.
        """
        if space.flat or space.ambient or not self.measured:
            return
        lacks = sorted(({"inner", "log"} | ({"exp"} if self.clips else set())) - space.capabilities)
        if lacks:
            raise ArgumentError(f"checks: norms need {', '.join(lacks)}, which {space} does not have")

    def passed(
        self, space: Manifold, update: Update, accepted: tuple[float, ...]
    ) -> tuple[Update, float, tuple[float, ...]]:
        r"""The update that a rule is given, $\lambda$, and the norms accepted lately with that of this one.

        Raises:
            ArgumentError: naming the limit that the update is over.
        """
        late = self.min_cosine is not None and update.staleness > 0
        length, cosine = _reach(space, update.base, update.points, update.current if late else None)
        self.refuse(length, accepted)
        if self.min_cosine is not None and cosine < self.min_cosine:
            raise ArgumentError(f"points: expected a cosine with the drift >= {self.min_cosine:g}, got {cosine:g}")
        limit = self.limit(accepted)
        kept = 1.0 if length <= limit else limit / length
        if kept < 1:
            update = replace(update, points=scaled_back(space, update.base, update.points, kept))
        return update, kept, (*accepted, min(length, limit))[-self.norm_window :]

    def limit(self, accepted: Sequence[float]) -> float:
        """To which norm updates are scaled back, where these were accepted lately; infinite where to none.

        Example:
            >>> checks = Checks(clip=5.0, clip_factor=2.0, norm_after=3)
            >>> checks.limit([1.0, 2.0]), checks.limit([1.0, 2.0, 3.0]), checks.limit([1.0, 3.0, 4.0])
            (5.0, 4.0, 5.0)
        """
        fixed = math.inf if self.clip is None else self.clip
        if self.clip_factor is None or len(accepted) < self.norm_after:
            return fixed
        # As in `refuse`: a median of 0 says nothing.
        return min(fixed, self.clip_factor * float(np.median(accepted)) or math.inf)

    def refuse(self, norm: float, accepted: Sequence[float]) -> None:
        """Say no to a norm over a limit, or to one that is no number.

        Raises:
            ArgumentError: naming the limit.
        """
        check_number("points: norm", norm)
        if self.max_norm is not None and norm > self.max_norm:
            raise ArgumentError(f"points: expected a norm <= {self.max_norm:g}, got {norm:g}")
        if self.norm_factor is None or len(accepted) < self.norm_after:
            return
        limit = self.norm_factor * float(np.median(accepted))
        # A median of 0 says nothing about what an update of another size should be.
        if norm > limit > 0:
            why = f"{self.norm_factor:g} x the median of those accepted"
            raise ArgumentError(f"points: expected a norm <= {limit:g} ({why}), got {norm:g}")


UNLIMITED = Checks()


@dataclass(frozen=True)
class Form:
    """What the payloads of one server look like.

    Args:
        space: of the points.
        dtype: of the points.
        device: where the server works.
        tensors: further tensors by name, and how many points each holds; `None` for one.
        numbers: names of further numbers.
        buffers: that a client sends.
        checks: the most samples and control points that are believed.
        rows: whether the rule reads of points and base no more than a Gram matrix and a combination, on a flat space.
            Neither is finite where they are not: so nobody reads them first, and `blame` says what it was.
        measured: of what else it says the same: `"points"`, and the names of tensors.
    """

    space: Manifold
    dtype: torch.dtype
    device: torch.device
    tensors: Mapping[str, int | None]
    numbers: tuple[str, ...]
    buffers: tuple[Entry, ...]
    checks: Checks
    rows: bool = False
    measured: frozenset[str] = frozenset()

    @property
    def unread(self) -> bool:
        """Whether nobody looks first at whether points and base are finite."""
        return self.rows or "points" in self.measured

    @cached_property
    def axes(self) -> list[int | None]:
        """The shape of one point."""
        return self.space.axes

    @cached_property
    def buffers_like(self) -> tuple[list[str], list[torch.dtype], list[tuple[int, ...]], list[int], list[int]]:
        """Names, dtypes, shapes, sizes and bytes a number of the buffers."""
        names = [entry.name for entry in self.buffers]
        dtypes = [entry.dtype for entry in self.buffers]
        shapes = [entry.shape for entry in self.buffers]
        sizes = [entry.size for entry in self.buffers]
        return names, dtypes, shapes, sizes, [dtype.itemsize for dtype in dtypes]


def admit(form: Form, payload: Payload, *, based: bool) -> Payload:
    """The payload as the server reads it: plain tensors on its device, plain numbers, nothing else.

    What a payload is made of may be of classes with code of their own, which may raise, or say something else each time
    that it is asked. Nothing of that gets further than this.

    Args:
        form: what it must look like.
        payload: as it came. It is not written; tensors that are right already are not copied. With `form.rows`, what
            follows says whether points and base are finite.
        based: whether it must bring its base.

    Raises:
        ArgumentError: naming the field that does not fit, first of all.
    """
    if not isinstance(payload, Payload):
        raise ArgumentError(f"payload: expected a Payload, got {type(payload).__name__}")
    given, samples, tensors, numbers, buffers, base = _answered("payload", lambda: FIELDS(payload))
    points = _vectors(form, "points", given, None)
    # Before anybody reads them: they may be so many that nobody could.
    count = points.shape[0]
    most = form.checks.max_points
    if count == 0:
        listed = ", ".join(map(str, ("n", *form.space.shape)))
        raise ArgumentError(f"points: expected ({listed}) with n >= 1, got {tuple(points.shape)}")
    if count > most:
        raise ArgumentError(f"points: expected at most {most} control points, got {count}")
    if based != (base is not None):
        expected = "the point that the client started from, which the server has not kept"
        raise ArgumentError(f"base: expected {expected if based else 'none, the server has kept it'}")
    return Payload(
        points=_sound(form, "points", points),
        samples=check_samples(samples, form.checks.max_samples),
        tensors=_tensors(form, tensors),
        numbers=_numbers(form, numbers),
        buffers=_buffers(form, buffers),
        base=_sound(form, "base", _vectors(form, "base", base)) if based else None,
    )


def blame(form: Form, payload: Payload) -> None:
    """Say what of an admitted payload was not looked at and is not finite, if it was that on which an update failed.

    Raises:
        ArgumentError: naming the field, as `admit` does where it looks.
    """
    if form.unread:
        check_finite("points", payload.points)
        if payload.base is not None:
            check_finite("base", payload.base)
    for name in form.measured & payload.tensors.keys():
        check_finite(f"tensors: {name}", payload.tensors[name])


def check_start(space: Manifold, start: Tensor) -> Tensor:
    """A first model, of its own memory: of a master dtype, finite, on the manifold.

    Raises:
        ArgumentError: naming what does not fit.
    """
    for name, given, kind in (("space", space, "a manifold"), ("start", start, "a point")):
        if isinstance(given, torch.nn.Module | Mapping):
            what = type(given).__name__
            hint = "write Server.of(model, rule)" + (", or space.point(model)" if name == "start" else "")
            raise ArgumentError(f"{name}: expected {kind}, got {what}: {hint}")
    if not isinstance(space, Manifold):
        raise ArgumentError(f"space: expected a manifold, got {type(space).__name__}")
    check_finite("start", check_shape("start", start, *space.axes))
    if not start.numel():
        raise ArgumentError("start: expected a model with parameters, got an empty one")
    dtypes = (space.dtype,) if isinstance(space, ParameterSpace) else MASTER_DTYPES
    check_choice("start: dtype", start.dtype, dtypes)
    if not space.flat:
        check_point(space, start, name="start")
    return start.detach().clone(memory_format=torch.contiguous_format)


def norm_of(space: Manifold, base: Tensor, points: Tensor) -> float:
    r"""$\max_i d(\Theta^t, \varphi_i)$; infinite where there is no such number."""
    return _reach(space, base, points, None)[0]


def scaled_back(space: Manifold, base: Tensor, points: Tensor, kept: float) -> Tensor:
    r"""The points $\exp_{\Theta^t}(\lambda \log_{\Theta^t} \varphi_i)$ of an update that is scaled back.

    On a flat space each number is rounded once. Where leaves are of low rank it is the point nearest to the sum; as
    that may lie twice as far from the base, $\lambda$ is halved where it is farther than it was to be.

    Args:
        space: of the points.
        base: $\Theta^t$ (P,).
        points: $\varphi_i$ (n, P), which are not written.
        kept: $\lambda$ in (0, 1).
    """
    if space.flat:
        scaled = torch.empty_like(points, memory_format=torch.contiguous_format)
        start = base.flatten()
        for row, out in zip(points.flatten(1), scaled.flatten(1), strict=True):
            combine(start, [row], [kept], minus=[start], out=out)
        return scaled
    if not space.ambient:
        starts = base.expand_as(points)
        moved = space._exp(starts, kept * space._log(starts, points))
        return space._project(moved) if "project" in space.capabilities else moved
    goal = kept * norm_of(space, base, points)
    nearest = _nearest(space, base, points, kept)
    if norm_of(space, base, nearest) > goal * (1 + torch.finfo(points.dtype).eps):
        nearest = _nearest(space, base, points, kept / 2)
    return nearest


def _nearest(space: Manifold, base: Tensor, points: Tensor, kept: float) -> Tensor:
    """For each point the one of low rank that is nearest to where it would be scaled back to."""
    return torch.stack([Ambient.of(space, base).combine(base, [row], [kept], minus=[base]) for row in points])


def _reach(space: Manifold, base: Tensor, points: Tensor, current: Tensor | None) -> tuple[float, float]:
    r"""The norm of an update, infinite where there is no such number; and where `current` is given its cosine with the
    drift, NaN where one of them is zero.
    """
    ends = points if current is None else [*points, current]
    if space.flat or space.ambient:
        rows = [*ends] if space.ambient else [row.flatten() for row in ends]
        start = base if space.ambient else base.flatten()
        inner = Ambient.of(space, base).gram(rows, minus=[start] * len(rows))[0]
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


def _sound(form: Form, name: str, points: Tensor) -> Tensor:
    """Vectors that lie on the manifold."""
    if form.unread:
        return points
    check_finite(name, points)
    return points if form.space.flat else check_point(form.space, points, name=name)


def _answered(name: str, ask: Callable[[], T]) -> T:
    """What an object with code of its own says; what it raises is its own fault."""
    try:
        return ask()
    except Exception as error:
        raise ArgumentError(f"{name}: expected one that can be read; its code raised {type(error).__name__}") from error


def _vectors(form: Form, name: str, given: Any, *batch: int | None) -> Tensor:
    """Plain dense vectors (*batch, *shape), of the server's dtype and on its device."""
    tensor = stored(name, given) if isinstance(given, Tensor) else given
    check_shape(name, tensor, *batch, *form.axes)
    if tensor.dtype != form.dtype:
        raise ArgumentError(f"{name}: expected {form.dtype}, got {tensor.dtype}")
    return tensor.to(form.device)


def _plain(name: str, tensor: Tensor) -> Tensor:
    """Without a derivative and of no subclass; itself where it is so already."""
    if type(tensor) is not Tensor:
        # What dispatches by itself, such as a fake or a distributed tensor, has no memory of its own to read.
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            raise ArgumentError(f"{name}: expected a plain tensor with values, got a {type(tensor).__name__}")
        with torch._C.DisableTorchFunctionSubclass():
            tensor = Tensor.as_subclass(tensor, Tensor)
    if WRAPPED(tensor):
        raise ArgumentError(f"{name}: expected values; a server step is taken outside of functorch transforms")
    return tensor.detach() if tensor.requires_grad else tensor


def check_samples(given: Any, most: int) -> int:
    """How many samples a client tells, as a plain integer.

    Raises:
        ArgumentError: if it is none from 1 to `most`.
    """
    number = given if type(given) is int else _answered("samples", lambda: _integer(given))
    if number is None or not 1 <= number <= most:
        raise ArgumentError(f"samples: expected an integer from 1 to {most}, got {_short(given)}")
    return number


def _integer(given: Any) -> int | None:
    """An integer that says the same however it is asked; `None` for anything else."""
    if isinstance(given, bool) or not isinstance(given, int | Integral):
        return None
    # The first gives an integer, but of which class, the second a plain one.
    number = int.__index__(operator.index(given))
    return number if int(given) == given.__index__() == number else None


def _tensors(form: Form, given: Any) -> dict[str, Tensor]:
    given = _named("tensors", given, form.tensors)
    brought = {}
    for name, count in form.tensors.items():
        field = f"tensors: {name}"
        brought[name] = _vectors(form, field, given[name], *([] if count is None else [count]))
        if name not in form.measured:
            check_finite(field, brought[name])
    return brought


def _numbers(form: Form, given: Any) -> dict[str, float]:
    given = _named("numbers", given, form.numbers)
    return {name: _number(f"numbers: {name}", given[name]) for name in form.numbers}


def _number(name: str, given: Any) -> float:
    """A finite float. Not through `check_number`, whose message may be as long as the number."""
    number = given if type(given) is float else _answered(name, lambda: _real(given))
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: expected a finite number, got {_short(given)}")
    return number


def _real(given: Any) -> float:
    """A number, infinite where it is too large; NaN for anything else."""
    if isinstance(given, bool) or not isinstance(given, Real):
        return math.nan
    try:
        return float(given)
    except OverflowError:
        return math.inf


def _buffers(form: Form, given: Any) -> dict[str, Tensor]:
    names, *_ = form.buffers_like
    given = _named("buffers", given, names)
    if not names:
        return {}
    brought = dict(zip(names, map(given.__getitem__, names), strict=True))
    if _is_fit(form, [*brought.values()]):
        return brought
    for entry in form.buffers:
        name = f"buffers: {entry.name}"
        tensor = brought[entry.name]
        if isinstance(tensor, Tensor):
            tensor = _plain(name, tensor)
        if not isinstance(tensor, Tensor) or tensor.dtype != entry.dtype:
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ArgumentError(f"{name}: expected a tensor of {entry.dtype}, got {what}")
        tensor = stored(name, tensor)
        if tuple(tensor.shape) != entry.shape:
            raise ArgumentError(f"{name}: expected shape {entry.shape}, got {tuple(tensor.shape)}")
        brought[entry.name] = tensor.to(form.device)
    return brought


def _is_fit(form: Form, brought: Sequence[Any]) -> bool:
    """Whether buffers are as they should be and nothing needs to be done to them.

    Models have hundreds: what is asked of all of them is asked in one go, attribute by attribute, not one by one.
    """
    _, dtypes, shapes, sizes, widths = form.buffers_like
    if not set(map(type, brought)) <= {Tensor} or any(map(NESTED, brought)) or any(map(WRAPPED, brought)):
        return False
    if list(map(DTYPE, brought)) != dtypes or list(map(SHAPE, brought)) != shapes:
        return False
    if not set(map(DEVICE, brought)) <= {form.device} or not set(map(LAYOUT, brought)) <= {torch.strided}:
        return False
    if not all(map(Tensor.is_contiguous, brought)) or is_transformed(brought):
        return False
    stored = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, brought))
    used = map(operator.add, map(Tensor.storage_offset, brought), sizes)
    return all(map(operator.ge, stored, map(operator.mul, used, widths)))


def stored(name: str, given: Tensor) -> Tensor:
    """A plain tensor that has values. Nested ones have no shape to ask for; freed storage has nothing."""
    tensor = _plain(name, given)
    if is_transformed([tensor]):
        raise ArgumentError(f"{name}: expected values; a server step is taken outside of functorch transforms")
    if tensor.is_nested:
        raise ArgumentError(f"{name}: expected a dense tensor with values, got a nested one")
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else tensor.layout
        raise ArgumentError(f"{name}: expected a dense tensor with values, got one {what}")
    if tensor.is_contiguous():
        last = tensor.storage_offset() + tensor.numel() - 1
    else:
        last = tensor.storage_offset() + sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() and tensor.untyped_storage().nbytes() < (last + 1) * tensor.itemsize:
        raise ArgumentError(f"{name}: expected a dense tensor with values, got one whose storage was freed")
    return tensor


def by_name(name: str, given: Any) -> dict[str, Any]:
    """What a mapping has under its names.

    Raises:
        ArgumentError: if it is no mapping from names, or cannot be read.
    """
    if not isinstance(given, Mapping):
        raise ArgumentError(f"{name}: expected a mapping from names, got {type(given).__name__}")
    found: dict[Any, Any] = given if type(given) is dict else _answered(name, lambda: dict(given))
    if set(map(type, found)) <= {str}:
        return found
    others = [key for key in found if not isinstance(key, str)]
    if others:
        raise ArgumentError(f"{name}: unknown: {_listed(others)}")
    # Names of a class with code of its own, as plain ones.
    return {str.__str__(key): value for key, value in found.items()}


def _named(name: str, given: Any, expected: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """What a mapping has under exactly the names that are expected."""
    found = by_name(name, given)
    if found or expected:
        check_names(name, found, expected, expected)
    return found


def check_names(name: str, found: Collection[str], expected: Collection[str], known: Collection[str]) -> None:
    """All that are expected, and none but those that are known.

    Raises:
        ArgumentError: naming the first that are missing, or unknown.
    """
    names = set(found)
    for problem, odd in (("missing", set(expected) - names), ("unknown", names - set(known))):
        if odd:
            raise ArgumentError(f"{name}: {problem}: {_listed(odd)}{wrapping(names, expected)}")


def _listed(names: Collection[object]) -> str:
    """The first of these names, and how many more there are."""
    further = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(heapq.nsmallest(LISTED, map(_short, names))) + further


def _short(value: object) -> str:
    """A value in a few words that can be printed; an integer of thousands of digits has none, nor has what fails."""
    try:
        text = str.__str__(value if isinstance(value, str) else repr(value))
    except ValueError:
        text = f"a huge {type(value).__name__}"
    except Exception:  # whatever its own code raises
        text = f"a {type(value).__name__}"
    if not text.isprintable():
        text = repr(text[:40])[1:-1]
    return text if len(text) <= 40 else f"{text[:37]}..."
