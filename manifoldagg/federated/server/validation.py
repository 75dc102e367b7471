"""The intake of a server: what a first model and a payload must be."""

import heapq
import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_finite, check_shape, closest_match, one_line, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.limits import Checks
from manifoldagg.federated.types import Payload, Rule, check_rule_protocol
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold, ParameterSpace, check_point
from manifoldagg.manifolds.layout import MASTER_DTYPES, Entry
from manifoldagg.manifolds.manifold import check_is_manifold
from manifoldagg.manifolds.wrapper_prefixes import wrapper_hint

__all__ = [
    "Form",
    "admit",
    "blame",
    "by_name",
    "check_names",
    "check_rule",
    "check_samples",
    "check_start",
    "stored",
]

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


def check_rule(rule: Rule) -> Rule:
    """Return `rule` if it is an instance of a rule.

    Raises:
        ArgumentError: if it is a name, naming the class that was probably meant, or if it does not have the methods of
            a [`Rule`][manifoldagg.federated.Rule].
    """
    if isinstance(rule, str):
        from manifoldagg.federated import rules  # a few dozen modules, which only this message needs

        near = closest_match(rule, rules.__all__)
        hint = "" if near is None else f": did you mean rules.{near}(...)?"
        raise ArgumentError(f"rule: expected an instance of one of manifoldagg.federated.rules, got {rule!r}{hint}")
    return check_rule_protocol(rule)


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
    if not _is_a(payload, Payload):
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
    check_is_manifold(space, "Server.of(model, rule)")
    given: object = start
    if isinstance(given, torch.nn.Module | Mapping):
        hint = "write Server.of(model, rule), or space.point(model)"
        raise ArgumentError(f"start: expected a point, got {type(given).__name__}: {hint}")
    check_finite("start", check_shape("start", start, *space.axes))
    if not start.numel():
        raise ArgumentError("start: expected a model with parameters, got an empty one")
    dtypes = (space.dtype,) if isinstance(space, ParameterSpace) else MASTER_DTYPES
    check_choice("start: dtype", start.dtype, dtypes)
    if not space.flat:
        check_point(space, start, name="start")
    return start.detach().clone(memory_format=torch.contiguous_format)


def _sound(form: Form, name: str, points: Tensor) -> Tensor:
    """Vectors that lie on the manifold."""
    if form.unread:
        return points
    check_finite(name, points)
    return points if form.space.flat else check_point(form.space, points, name=name)


def _is_a(given: object, kind: type) -> bool:
    """By its type: what an object says of its class may be untrue, or raise."""
    return issubclass(type(given), kind)


def _answered(name: str, ask: Callable[[], T]) -> T:
    """What an object with code of its own says; what it raises is its own fault."""
    try:
        return ask()
    except Exception as error:
        raise ArgumentError(f"{name}: expected one that can be read; its code raised {type(error).__name__}") from error


def _vectors(form: Form, name: str, given: Any, *batch: int | None) -> Tensor:
    """Plain dense vectors (*batch, *shape), of the server's dtype and on its device."""
    tensor = stored(name, given) if _is_a(given, Tensor) else given
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
        raise ArgumentError(f"samples: expected an integer from 1 to {most}, got {short_repr(given)}")
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
    """A finite float. Not through `check_number`, which lets what the number's own code raises come out."""
    number = given if type(given) is float else _answered(name, lambda: _real(given))
    if not math.isfinite(number):
        raise ArgumentError(f"{name}: expected a finite number, got {short_repr(given)}")
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
        real = _is_a(tensor, Tensor)
        if real:
            tensor = _plain(name, tensor)
        if not real or tensor.dtype != entry.dtype:
            what = tensor.dtype if real else type(tensor).__name__
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
    if not all(map(Tensor.is_contiguous, brought)) or needs_autograd_path(brought):
        return False
    stored = map(torch.UntypedStorage.nbytes, map(Tensor.untyped_storage, brought))
    used = map(operator.add, map(Tensor.storage_offset, brought), sizes)
    return all(map(operator.ge, stored, map(operator.mul, used, widths)))


def stored(name: str, given: Tensor) -> Tensor:
    """A plain tensor that has values. Nested ones have no shape to ask for; freed storage has nothing."""
    tensor = _plain(name, given)
    if needs_autograd_path([tensor]):
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
    if not _is_a(given, Mapping):
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
            raise ArgumentError(f"{name}: {problem}: {_listed(odd)}{wrapper_hint(names, expected)}")


def _listed(names: Collection[object]) -> str:
    """The first of these names, and how many more there are."""
    further = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(heapq.nsmallest(LISTED, map(_short, names))) + further


def _short(name: Any) -> str:
    """A name, without quotes, that can be printed."""
    return one_line(str.__str__(name), 40) if _is_a(name, str) else short_repr(name, 40)
