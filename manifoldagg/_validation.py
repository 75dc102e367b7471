"""Checks of the arguments of public functions.

The first parameter of each check is the *name* of the argument. If the check fails, the error message contains this
name, the expected value and the actual value.
"""

import difflib
import inspect
import math
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import MappingProxyType
from typing import Any, ParamSpec, SupportsFloat, SupportsIndex, TypeVar

import numpy as np
import torch
from torch import Tensor

from manifoldagg._threads import prefers_numpy
from manifoldagg.errors import ArgumentError

__all__ = [
    "KeywordHints",
    "check_choice",
    "check_count",
    "check_decay",
    "check_finite",
    "check_instance",
    "check_keywords",
    "check_number",
    "check_shape",
    "check_vector",
    "closest_match",
    "is_finite",
    "keywords_of",
    "one_line",
    "other_type_hint",
    "rename_argument",
    "renamed_arguments",
    "short_repr",
    "suggests_keywords",
    "warn_caller",
]

MAX_REPR_LENGTH = 100
"""The maximum number of characters of a value in a message."""
HUGE_INT_BITS = 128
"""Messages omit the digits of integers with more bits, because Python refuses to convert very long integers."""

INTERNAL_PACKAGES = ("manifoldagg", "beartype", "jaxtyping", "torch")
"""The packages that `warn_caller` skips when it searches for the source line to report."""

P = ParamSpec("P")
T = TypeVar("T")


def short_repr(value: Any, max_length: int = MAX_REPR_LENGTH) -> str:
    """Return a short representation of a value for an error message.

    - The representation is one line of at most `max_length` characters.
    - Models, tensors and containers of them are represented by their type and size.
    - If the `repr` of the value raises an exception, the result contains only the name of the type.

    Example:
        >>> short_repr("32"), short_repr(b"32"), short_repr(10**400), short_repr([-(10**5000)])
        ("'32'", "b'32'", 'a huge int', 'a huge list')
        >>> model = torch.nn.Linear(8, 3)
        >>> short_repr(model), short_repr(model.state_dict()), short_repr(model.weight)
        ('Linear with 27 parameters', 'OrderedDict of 2 tensors', 'Parameter of shape (3, 8)')
    """
    kind = type(value)
    if issubclass(kind, int) and int.bit_length(value) > HUGE_INT_BITS:
        return one_line(f"a huge {'negative ' if int.__lt__(value, 0) else ''}{kind.__name__}", max_length)
    try:
        default: Any = object.__repr__  # its result contains a memory address
        is_default = kind.__repr__ is default
        text = f"a {kind.__name__}" if is_default else _summary(value) or str.__str__(repr(value))
        if "\n" in text:  # an object that contains a module or a tensor
            text = f"a {kind.__name__}"
        elif len(text) > max_length and issubclass(kind, Mapping):
            text = f"{kind.__name__} of {len(value):,} entries"
    except ValueError:  # Python limits the number of digits of a converted integer
        text = f"a huge {kind.__name__}"
    except Exception:  # a user-defined `__repr__` may raise any exception
        text = f"a {kind.__name__}"
    return one_line(text, max_length)


def _summary(value: Any) -> str:
    """Describe the type and size of a value, for example "Tensor of shape (3, 8)".

    The result is "" for values other than modules, tensors, arrays, and containers of these objects.
    """
    kind = type(value)
    if issubclass(kind, torch.nn.Module):
        return f"{kind.__name__} with {sum(map(Tensor.numel, value.parameters())):,} parameters"
    if issubclass(kind, Tensor | np.ndarray):
        # A single number has no dimensions, and its `repr` is short.
        return f"{kind.__name__} of shape {tuple(value.shape)}" if value.ndim else ""
    if not issubclass(kind, Mapping | list | tuple | set | frozenset):
        return ""
    entries = [*value.values()] if issubclass(kind, Mapping) else [*value]
    kinds = [type(entry) for entry in entries]
    nouns = {torch.nn.Module: "modules", Tensor: "tensors", np.ndarray: "arrays"}
    for base, noun in nouns.items():
        if kinds and all(issubclass(entry, base) for entry in kinds):
            return f"{kind.__name__} of {len(kinds):,} {noun if len(kinds) > 1 else noun[:-1]}"
    if any(map(_summary, entries)):
        return f"{kind.__name__} of {len(kinds):,} {'entries' if len(kinds) > 1 else 'entry'}"
    return ""


def one_line(text: str, max_length: int = MAX_REPR_LENGTH) -> str:
    """Convert a text to printable characters, and truncate it to `max_length` characters."""
    if not text.isprintable():
        text = repr(text[:max_length])[1:-1]
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def check_number(
    name: str,
    value: SupportsFloat,
    *,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
) -> float:
    """Check that `value` is a finite number in the given range, and return it as a float.

    Raises:
        ArgumentError: if `value` is not a number, is not finite, or is outside the range.

    Example:
        >>> check_number("rate", 0.5, above=0)
        0.5
        >>> check_number("rate", -1, above=0)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: rate: expected a finite number > 0, got -1
    """
    try:
        # `float` also parses strings and byte buffers, but a caller who passes one has probably made a mistake.
        if isinstance(value, str | bytes | bytearray | memoryview | bool):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isfinite(number) and at_least <= number <= at_most and number > above:
        return number
    bounds = [f"> {above:g}"] * (above > -math.inf) + [f">= {at_least:g}"] * (at_least > -math.inf)
    bounds += [f"<= {at_most:g}"] * (at_most < math.inf)
    expected = " ".join(["a finite number", " and ".join(bounds)]).strip()
    raise ArgumentError(f"{name}: expected {expected}, got {short_repr(value)}")


def check_decay(name: str, value: SupportsFloat) -> float:
    """Check that `value` is a number in [0, 1), for example the decay of a moving average. Return it as a float.

    Raises:
        ArgumentError: if `value` is not a number or is outside [0, 1).

    Example:
        >>> check_decay("beta", 0.9)
        0.9
    """
    if (number := check_number(name, value, at_least=0)) >= 1:
        raise ArgumentError(f"{name}: expected a number in [0, 1), got {short_repr(value)}")
    return number


def check_count(name: str, value: SupportsIndex, *, at_least: int = 1) -> int:
    """Check that `value` is an integer and at least `at_least`, and return it as an int.

    Raises:
        ArgumentError: if `value` is not an integer or is too small.

    Example:
        >>> check_count("clients", 30)
        30
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}: expected an integer >= {at_least}, got {short_repr(value)}") from None
    if number < at_least:
        raise ArgumentError(f"{name}: expected an integer >= {at_least}, got {short_repr(value)}")
    return number


def check_choice(name: str, value: T, choices: Collection[T]) -> T:
    """Check that `value` is one of `choices`, and return it.

    Raises:
        ArgumentError: if `value` is not one of `choices`. The message lists the choices and suggests the closest one.

    Example:
        >>> check_choice("data", "digit", ("digits", "letters"))
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: data: expected one of digits, letters; got 'digit': did you mean digits?
    """
    for choice in choices:
        if isinstance(value, type(choice)) and value == choice:
            return value
    near = closest_match(value, choices)
    hint = f": did you mean {near}?" if near is not None else ""
    raise ArgumentError(f"{name}: expected one of {', '.join(map(str, choices))}; got {short_repr(value)}{hint}")


def check_instance(name: str, value: object, kind: type[T], hint: str = "") -> T:
    """Check that `value` is an instance of `kind`, and return it.

    Args:
        name: the name of the argument.
        value: the value of the argument.
        kind: the expected class.
        hint: code that the error message suggests. With "", the message suggests nothing.

    Raises:
        ArgumentError: if `value` is not an instance of `kind`.

    Example:
        >>> check_instance("rate", "0.5", float, "0.5")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: rate: expected a float, got '0.5'; write 0.5
    """
    if isinstance(value, kind):
        return value
    # The representation of any other object can be very long, for example if the object contains tensors.
    given = short_repr(value) if isinstance(value, str | bool | type | None) else type(value).__name__
    raise ArgumentError(f"{name}: expected a {kind.__name__}, got {given}" + (f"; write {hint}" if hint else ""))


def closest_match(word: object, choices: Collection[object]) -> str | None:
    """Return the string in `choices` whose spelling is closest to `word`, or `None` if no string is similar.

    Example:
        >>> closest_match("fedasink", ("fedgs", "fedasync"))
        'fedasync'
    """
    if not isinstance(word, str):
        return None
    known = {choice.lower(): choice for choice in choices if isinstance(choice, str)}
    found = difflib.get_close_matches(word.lower(), known, n=1)
    return known[found[0]] if found else None


def other_type_hint(value: object, known: Collection[object]) -> str:
    """Suggest the element of `known` that differs from `value` only in its type, such as `"1"` instead of `1`.

    The suggestion is a part of an error message. If `known` contains no such element, the result is "".

    Example:
        >>> other_type_hint(1, {"1": 10}), other_type_hint("2", {"1": 10})
        (" (int); did you mean '1' (str)?", '')
    """
    other: object = None
    if type(value) is int:
        other = str(value) if value.bit_length() <= HUGE_INT_BITS else None
    elif type(value) is str and re.fullmatch("-?[0-9]{1,38}", value):
        other = int(value)
    if other is None or str(other) != str(value) or other not in known:
        return ""
    return f" ({type(value).__name__}); did you mean {other!r} ({type(other).__name__})?"


def check_keywords(
    name: str, keywords: Collection[str], known: Collection[str], moved: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that a function accepts the keywords of a call.

    Args:
        name: the name of the function.
        keywords: the keywords of the call.
        known: the keywords that the function accepts.
        moved: hints for keywords that the function does not accept, by keyword. A hint replaces the suggestion in the
            error message.

    Raises:
        TypeError: if a keyword is unknown. The message suggests the closest known keyword. If none is similar, the
            message lists all known keywords.

    Example:
        >>> check_keywords("FedOrtho", ["rat"], ["transport", "rungs", "rate"])
        Traceback (most recent call last):
            ...
        TypeError: FedOrtho() got an unexpected keyword argument 'rat'; did you mean 'rate'?
    """
    for keyword in keywords:
        if keyword not in known:
            near = closest_match(keyword, known)
            hint = f"expected one of {', '.join(known)}" if near is None else f"did you mean {near!r}?"
            hint = moved.get(keyword, hint)
            raise TypeError(f"{name}() got an unexpected keyword argument {keyword!r}; {hint}")


@lru_cache(maxsize=256)
def keywords_of(function: Callable[..., Any]) -> tuple[str, ...] | None:
    """Return the keywords of a function or a class, or `None` if it accepts arbitrary keywords.

    Example:
        >>> keywords_of(check_keywords)
        ('name', 'keywords', 'known', 'moved')
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return _named_parameters(function)


def _named_parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(function).parameters.values()
    return tuple(p.name for p in parameters if p.kind in named and p.name not in ("self", "cls"))


def suggests_keywords(
    name: str, *forwards_to: Callable[..., Any], moved: Mapping[str, str] = MappingProxyType({})
) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that improves the error message for an unknown keyword argument.

    If a caller of the decorated function misspells a keyword, the `TypeError` suggests the known keyword with the
    closest spelling.

    Args:
        name: the name of the decorated function in the error message.
        *forwards_to: functions to which the decorated function passes its other keywords.
        moved: hints for keywords that the function does not accept, as in `check_keywords`.

    Example:
        >>> @suggests_keywords("Server")
        ... def start(*, max_staleness=None): ...
        >>> start(max_stalenes=3)
        Traceback (most recent call last):
            ...
        TypeError: Server() got an unexpected keyword argument 'max_stalenes'; did you mean 'max_staleness'?
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        known = dict.fromkeys(name for source in (function, *forwards_to) for name in _named_parameters(source))

        @wraps(function)
        def checked(*args: P.args, **keywords: P.kwargs) -> T:
            if not keywords.keys() <= known.keys():
                check_keywords(name, keywords, known, moved)
            return function(*args, **keywords)

        return checked

    return decorate


class KeywordHints:
    """Base class for dataclasses that improves the error message for an unknown keyword argument.

    If a caller of the constructor misspells a keyword, the `TypeError` suggests the known keyword with the closest
    spelling.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Momentum(KeywordHints):
        ...     beta: float = 0.9
        >>> Momentum(beat=0.5)
        Traceback (most recent call last):
            ...
        TypeError: Momentum() got an unexpected keyword argument 'beat'; did you mean 'beta'?
    """

    def __new__(cls, *args: Any, **options: Any) -> Any:
        # The check is not in `__init__`, so that the generated `__init__` and its signature stay unchanged. `copy` and
        # `pickle` call `__new__` without arguments, so they skip the check.
        known = keywords_of(cls.__init__) if options else None
        if known is not None:
            check_keywords(cls.__name__, options, known)
        return super().__new__(cls)


def rename_argument(message: str, names: Mapping[str, str], prefix: str = "") -> str:
    """Replace the name of an internal argument at the start of an error message with the name that the user knows.

    This is necessary if a public function calls an internal function whose arguments have other names. The mapping
    `names` contains the replacements.

    Args:
        message: an error message that starts with the name of an argument and a colon.
        names: the names of the user's arguments, by the names of the internal arguments.
        prefix: a prefix for messages about arguments that are not in `names`.

    Example:
        >>> rename_argument("points[1]: expected one model", {"points": "model"})
        'model[1]: expected one model'
        >>> rename_argument("rate: expected a finite number > 0, got 0", {"points": "model"}, "rule: ")
        'rule: rate: expected a finite number > 0, got 0'
    """
    found = re.match(r"(\w+)(\[\d+\])?(?=:)", message)
    if found and found[0] in names:
        return names[found[0]] + message[found.end() :]
    if found and found[1] in names:
        return names[found[1]] + message[found.end(1) :]
    return message if message.startswith(prefix) else prefix + message


@contextmanager
def renamed_arguments(names: Mapping[str, str], prefix: str = "") -> Iterator[None]:
    """Replace the name of an internal argument in an error message with the name that the user knows.

    A public function calls internal functions inside this `with` block. If one of them raises `ArgumentError`, the
    message contains the name of the public argument instead of the internal one.

    Args:
        names: the names of the public arguments, by the names of the internal arguments.
        prefix: a prefix for messages about arguments that are not in `names`.

    Example:
        >>> with renamed_arguments({"start": "model"}):
        ...     check_count("start", 0)
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: model: expected an integer >= 1, got 0
    """
    try:
        yield
    except ArgumentError as error:
        error.args = (rename_argument(str(error), names, prefix), *error.args[1:])
        raise


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Issue a warning that reports the line of the user's code that called the library.

    This line belongs to the innermost stack frame outside of this package, PyTorch, beartype and jaxtyping.
    """
    # A fixed `stacklevel` would be wrong, because public functions with different numbers of decorators call this
    # function.
    frame = inspect.currentframe()
    level = 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in INTERNAL_PACKAGES:
        frame = frame.f_back
        level += 1
    warnings.warn(message, category, stacklevel=level + 1)


def check_vector(name: str, values: np.ndarray | Sequence[float], *, at_least: float = -math.inf) -> np.ndarray:
    """Check that `values` is a non-empty vector of finite numbers, each of which is at least `at_least`.

    Returns:
        A copy of the vector in float64.

    Raises:
        ArgumentError: if `values` is not a non-empty vector of numbers, or if an entry is not finite or is below
            `at_least`. For an invalid entry, the message contains the index of the first one.

    Example:
        >>> check_vector("rates", [1, 2.5]).tolist()
        [1.0, 2.5]
    """
    try:
        x = np.array(values)
        if x.dtype.kind not in "fiu":
            raise TypeError
        x = x.astype(np.float64)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(f"{name}: expected real numbers, got {short_repr(values)}") from None
    if x.ndim != 1 or x.size == 0:
        raise ArgumentError(f"{name}: expected a non-empty vector, got shape {x.shape}")
    for i in np.flatnonzero(~(np.isfinite(x) & (x >= at_least)))[:1]:
        check_number(f"{name}[{i}]", float(x[i]), at_least=at_least)
    return x


def check_shape(name: str, tensor: Tensor, *shape: int | None, batch: bool = False) -> Tensor:
    """Check that `tensor` is a dense floating-point tensor of the given shape, and return it.

    Args:
        name: the name of the argument.
        tensor: the value of the argument.
        *shape: the expected length of each axis. `None` accepts any length.
        batch: whether leading batch axes may precede `shape`.

    Raises:
        ArgumentError: if `tensor` is not a dense floating-point tensor, or if its shape differs.
    """
    # `isinstance` would also accept an object that overrides its attribute `__class__`.
    real = issubclass(type(tensor), Tensor)
    if not real or not tensor.dtype.is_floating_point:
        given = tensor.dtype if real else type(tensor).__name__
        raise ArgumentError(f"{name}: expected a floating tensor of {_describe_shape(shape, batch)}, got {given}")
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "on the meta device" if tensor.is_meta else f"with the layout {tensor.layout}"
        raise ArgumentError(f"{name}: expected a dense tensor with values, got a tensor {what}")
    extra = tensor.ndim - len(shape)
    fits = extra >= 0 if batch else extra == 0
    for n, m in zip(shape, tensor.shape[max(extra, 0) :], strict=False):
        fits = fits and n in (None, m)
    if not fits:
        raise ArgumentError(f"{name}: expected {_describe_shape(shape, batch)}, got {tuple(tensor.shape)}")
    return tensor


def _describe_shape(shape: tuple[int | None, ...], batch: bool) -> str:
    listed = ", ".join("any" if n is None else str(n) for n in shape)
    return f"{'trailing shape' if batch else 'shape'} ({listed})"


def check_finite(name: str, tensor: Tensor) -> Tensor:
    """Check that all entries of `tensor` are finite, and return it.

    The check reads the tensor once or twice. It copies only tensors of 8-bit floating-point dtypes.

    Raises:
        ArgumentError: if an entry is not finite. The message contains the value and the index of the first such entry.
    """
    if not is_finite(tensor):
        where = _first_nonfinite(tensor)
        raise ArgumentError(f"{name}: expected finite values, got {tensor[where].item()} at {where}")
    return tensor


def _first_nonfinite(tensor: Tensor) -> tuple[int, ...]:
    """Return the index of the first entry that is not finite, by bisection along each axis."""
    start = [0] * tensor.ndim
    for dim in range(tensor.ndim):
        while tensor.shape[dim] > 1 and tensor.numel() > 2**14:
            half = tensor.shape[dim] // 2
            first = tensor.narrow(dim, 0, half)
            if not is_finite(first):
                tensor = first
                continue
            start[dim] += half
            tensor = tensor.narrow(dim, half, tensor.shape[dim] - half)
    within = (~tensor.isfinite()).nonzero()[0].tolist()
    return tuple(map(operator.add, start, within))


def is_finite(*tensors: Tensor) -> bool:
    """Return whether all entries of all tensors are finite. An empty tensor is finite."""
    for tensor in tensors:
        # If an entry is NaN, the minimum and maximum are NaN. If an entry is infinite, one of them is infinite.
        if prefers_numpy(tensor):
            array = tensor.detach().numpy()
            ends = array.min(), array.max()
        elif tensor.numel():
            # `aminmax` does not support the float8 dtypes.
            values = tensor.float() if tensor.itemsize == 1 and tensor.is_floating_point() else tensor
            # If the sum is finite, all entries are finite. The sum takes a third of the time of `aminmax`. If the sum
            # is not finite, `aminmax` must decide, because a sum of finite entries can overflow.
            if values.is_floating_point() and math.isfinite(values.detach().sum().item()):
                continue
            low, high = values.detach().aminmax()
            ends = low.item(), high.item()
        else:
            continue
        if not all(map(math.isfinite, ends)):
            return False
    return True
