"""A parser of specs, `name:option=value,option=value`, for everything that has a name."""

import importlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from manifoldagg._validation import closest_match
from manifoldagg.errors import ArgumentError, ManifoldAggError

__all__ = [
    "OptionReaders",
    "Reader",
    "Spec",
    "build",
    "choose",
    "error_context",
    "import_object",
    "parse_kwargs",
    "parse_literal",
    "parse_spec",
    "parse_specs",
    "reader",
]

T = TypeVar("T")
LITERALS = {"true": True, "false": False, "none": None, "inf": math.inf}


@dataclass(frozen=True)
class Spec:
    """A name and its unparsed options.

    Attributes:
        name: what is meant.
        options: by name; one without a name, as in `replay:trace.csv`, has the name `""` and is the first there is.

    Example:
        >>> str(Spec("asyncbezier", {"degree": "3"}))
        'asyncbezier:degree=3'
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        written = ",".join(f"{option}={text}" if option else text for option, text in self.options.items())
        return f"{self.name}:{written}" if written else self.name


Reader: TypeAlias = Callable[[str, Mapping[str, str]], Any]
"""Makes a value of the options that follow its name; the first argument says where, for complaints."""
OptionReaders: TypeAlias = Mapping[str, Mapping[str, Reader]]
"""For an option whose value is an object: the names that it can have."""


def parse_specs(where: str, text: str) -> list[Spec]:
    """Parse a comma-separated list of names with options; `option=value` belongs to the name before it.

    Args:
        where: names the list in complaints.
        text: such as `"fedasync,asyncbezier:threshold=auto,degree=3,fedgs"`.

    Raises:
        ArgumentError: if there is no name, an option comes before any, or twice.

    Example:
        >>> [str(spec) for spec in parse_specs("methods", "fedasync, asyncbezier:threshold=auto, degree=3, fedgs")]
        ['fedasync', 'asyncbezier:threshold=auto,degree=3', 'fedgs']
    """
    found: list[tuple[str, dict[str, str]]] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        name, _, rest = piece.partition(":")
        if "=" in name:
            if not found:
                raise ArgumentError(f"{where}: expected a name before its options, got {text!r}")
            rest = piece
        elif not name.strip():
            raise ArgumentError(f"{where}: expected a name before the colon, got {piece!r}")
        else:
            found.append((name.strip(), {}))
            if not rest.strip():
                continue
        first, equals, written = map(str.strip, rest.partition("="))
        option, written = (first, written) if equals else ("", first)
        name, options = found[-1]
        if option in options:
            raise ArgumentError(f"{where}: {name}: {option} is given twice")
        options[option] = written
    if not found:
        raise ArgumentError(f"{where}: expected a name, got {text!r}")
    return [Spec(name, options) for name, options in found]


def parse_spec(where: str, text: str) -> Spec:
    """Parse one name with its options.

    Raises:
        ArgumentError: as [`parse_specs`][manifoldagg.simulation.spec_parser.parse_specs]; if there are several names.

    Example:
        >>> parse_spec("delays", "exponential:mean=10")
        Spec(name='exponential', options={'mean': '10'})
    """
    first, *others = parse_specs(where, text)
    if others:
        raise ArgumentError(f"{where}: expected one name with its options, got a second one: {others[0]}")
    return first


def parse_literal(text: str) -> Any:
    """Parse an int, a float, `true`, `false`, `none`, `inf`, or a tuple joined by `+`; else return the text.

    Example:
        >>> [parse_literal(text) for text in ("3", "1e-3", "true", "none", "-inf", "4+2", "auto", "rates.csv")]
        [3, 0.001, True, None, -inf, (4, 2), 'auto', 'rates.csv']
    """
    if text.lower() in LITERALS:
        return LITERALS[text.lower()]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    parts = tuple(map(parse_literal, text.split("+"))) if "+" in text else ()
    return parts if parts and all(type(part) in (int, float) for part in parts) else text


def parse_kwargs(
    where: str,
    factory: Callable[..., Any],
    options: Mapping[str, str],
    *,
    option_readers: OptionReaders | None = None,
    excluded: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Parse options into keyword arguments for `factory`.

    An option with a dot, `staleness.a=0.9`, is one of the value of `staleness`: of the one that is named beside it, or
    of the default.

    Args:
        where: what a complaint begins with.
        factory: a class or a function, whose signature says which options there are. What is annotated as a string or a
            path is taken as it was written.
        options: as they were written.
        option_readers: what the names mean that values of some options have.
        excluded: parameters that are not options.
        defaults: arguments where nothing was written.

    Raises:
        ArgumentError: naming an option that is none, and the nearest that is; or one that is missing.

    Example:
        >>> from manifoldagg.federated.clients import Local
        >>> parse_kwargs("local", Local, {"epochs": "4", "rate": "1e-3"})
        {'epochs': 4, 'rate': 0.001}
        >>> parse_kwargs("local", Local, {"epoch": "4"})
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: local: no option 'epoch'; did you mean epochs?
    """
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(factory).parameters.items()
        if name not in excluded and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }
    given = dict(_default_arguments(factory) | dict(defaults or {}))
    written: dict[str, str] = {}
    within: dict[str, dict[str, str]] = {}
    for option, text in options.items():
        head, dot, tail = option.partition(".")
        if not option and parameters:
            head = next(iter(parameters))
        choose(where, "option", head, parameters)
        if dot and not tail:
            raise ArgumentError(f"{where}: {head}: expected one of its options behind the dot, got {option!r}")
        if dot:
            within.setdefault(head, {})[tail] = text
        elif head in written:
            raise ArgumentError(f"{where}: {head} is given twice")
        else:
            written[head] = text
    result = dict(defaults or {})
    for option in [*written, *(head for head in within if head not in written)]:
        here = f"{where}: {option}"
        inner = within.get(option, {})
        readers = (option_readers or {}).get(option, {})
        if option not in written:
            before: Any = given.get(option)
            if not hasattr(before, "__dataclass_fields__"):
                raise ArgumentError(f"{here}: expected its name")
            changed = parse_kwargs(here, type(before), inner, option_readers=option_readers)
            with error_context(here):
                result[option] = replace(before, **changed)
            continue
        text = written[option]
        if text in readers:
            result[option] = readers[text](here, inner)
        elif inner:
            raise ArgumentError(f"{here}: {text} has no options of its own")
        else:
            plain = parameters[option].annotation in (str, Path, Path | str)
            read = text if plain else parse_literal(text)
            if readers and isinstance(read, str) and not plain:
                if type(given.get(option)) in (int, float) and closest_match(text, readers) is None:
                    raise ArgumentError(f"{here}: expected a number, or one of {', '.join(readers)}; got {text!r}")
                choose(where, option, text, readers)
            result[option] = read
    missing = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing := [name for name in missing if name not in result]:
        raise ArgumentError(f"{where}: expected {', '.join(f'{name}=...' for name in missing)}")
    return result


def build(
    where: str,
    factory: Callable[..., T],
    options: Mapping[str, str],
    *,
    option_readers: OptionReaders | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """What `factory` makes of options that were written, as
    [`parse_kwargs`][manifoldagg.simulation.spec_parser.parse_kwargs].

    Raises:
        ArgumentError: also for values that `factory` refuses.

    Example:
        >>> from manifoldagg.simulation.delays import Exponential
        >>> build("delays: exponential", Exponential, {"mean": "10"})
        Exponential(mean=10.0)
    """
    given = parse_kwargs(where, factory, options, option_readers=option_readers, defaults=defaults)
    with error_context(where):
        return factory(**given)


def reader(factory: Callable[..., Any], *, option_readers: OptionReaders | None = None, **defaults: Any) -> Reader:
    """Return the reader that builds with `factory`, for `option_readers`."""

    def read(where: str, options: Mapping[str, str]) -> Any:
        return build(where, factory, options, option_readers=option_readers, defaults=defaults)

    return read


def choose(where: str, noun: str, name: str, choices: Collection[str]) -> str:
    """Return `name`, which must be one of `choices`.

    Raises:
        ArgumentError: naming the nearest of them, or all where none is near.

    Example:
        >>> choose("methods", "method", "fedasink", ("fedasync", "fedgs"))
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: methods: no method 'fedasink'; did you mean fedasync?
    """
    if name in choices:
        return name
    near = closest_match(name, choices)
    hint = f"did you mean {near}?" if near else f"there are {', '.join(choices)}" if choices else "there are none"
    raise ArgumentError(f"{where}: no {noun} {name!r}; {hint}")


def import_object(where: str, module: str, name: str, alternative: str) -> Any:
    """Import an object from a user's module by name.

    Args:
        where: what a complaint begins with.
        module: that can be imported.
        name: in it.
        alternative: what has a name without a module.

    Raises:
        ArgumentError: if there is no such module, it imports one that is not there, or has nothing of that name.

    Example:
        >>> import_object("data", "math", "tau", "a data set")
        6.283185307179586
        >>> import_object("data", "maths", "tau", "a data set")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: data: neither a data set nor a module that can be imported
    """
    try:
        # One with a dot in front is relative to nothing, such as the path of a file.
        found = None if module.startswith(".") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise ArgumentError(f"{where}: {error}") from error
        found = None
    if found is None:
        raise ArgumentError(f"{where}: neither {alternative} nor a module that can be imported")
    if not hasattr(found, name):
        near = closest_match(name, vars(found))
        raise ArgumentError(
            f"{where}: the module has nothing of that name" + (f"; did you mean {near}?" if near else "")
        )
    return getattr(found, name)


@contextmanager
def error_context(where: str, *others: type[Exception]) -> Iterator[None]:
    """Prefix the messages of this package's exceptions, and of the given ones, with `where`."""
    kinds: tuple[type[Exception], ...] = (ManifoldAggError, *others)
    try:
        yield
    except kinds as error:
        raise ArgumentError(f"{where}: {error}") from error


def _default_arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """What the arguments of `factory` are where they are not given."""
    signature = inspect.signature(factory).parameters.items()
    found = {name: parameter.default for name, parameter in signature if parameter.default is not parameter.empty}
    if is_dataclass(factory):
        # The signature has a mark in place of a default that is made.
        found |= {one.name: one.default_factory() for one in fields(factory) if one.default_factory is not MISSING}
    return found
