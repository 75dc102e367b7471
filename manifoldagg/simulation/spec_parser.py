"""A parser of specs, `name:option=value,option=value`, for everything that has a name."""

import importlib.util
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from manifoldagg._validation import closest_match
from manifoldagg.errors import ArgumentError, ManifoldAggError

__all__ = [
    "MODULE_NAME",
    "OptionReaders",
    "Reader",
    "Spec",
    "build",
    "choose",
    "error_context",
    "import_object",
    "is_importable",
    "merge_module_name",
    "parse_kwargs",
    "parse_literal",
    "parse_spec",
    "parse_specs",
    "reader",
    "user_object",
]

T = TypeVar("T")
MODULE_NAME = "module:name"
"""The key of the reader for objects in a module of the user, which reads the text itself as the option `""`."""
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

    An option with a dot, `staleness.a=0.9`, is an option of the value of `staleness`: of the named value, or of the
    default. If the readers of an option include `MODULE_NAME`, its value may also be `module:name`.

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
            changed = _replaced_fields(here, before, inner, option_readers)
            with error_context(here):
                result[option] = type(before)(**changed)
            continue
        text = written[option]
        if ":" in text and MODULE_NAME in readers:
            result[option] = _read_with_colon(here, text, inner, readers)
        elif text in readers:
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
        where: the start of an error message.
        module: the name of the module.
        name: the name in the module.
        alternative: what a name without a module means.

    Raises:
        ArgumentError: if the module or one of its imports does not exist, or the module does not define the name.

    Example:
        >>> import_object("data", "math", "tau", "a data set")
        6.283185307179586
        >>> import_object("data", "maths", "tau", "a data set")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: data: expected a data set or an importable module, got 'maths'
    """
    try:
        # The name of a relative import, such as the path of a file, begins with a dot.
        found = None if module.startswith(".") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise ArgumentError(f"{where}: {error}") from error
        found = None
    if found is None:
        raise ArgumentError(f"{where}: expected {alternative} or an importable module, got {module!r}")
    if not hasattr(found, name):
        near = closest_match(name, vars(found))
        hint = f"; did you mean {near}?" if near else ""
        raise ArgumentError(f"{where}: expected a name that the module {module} defines, got {name!r}{hint}")
    return getattr(found, name)


def is_importable(module: str) -> bool:
    """Return whether a module of that name exists.

    Example:
        >>> is_importable("math"), is_importable("maths"), is_importable("./math")
        (True, False, False)
    """
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def merge_module_name(where: str, chosen: Spec) -> Spec:
    """Return `module:name` as the name of a spec, with the options after another colon.

    A spec without a name after the colon is unchanged.

    Raises:
        ArgumentError: if an option is given twice.

    Example:
        >>> merge_module_name("methods", parse_spec("methods", "my_module:Signs:rate=0.1"))
        Spec(name='my_module:Signs', options={'rate': '0.1'})
    """
    if not chosen.options:
        return chosen
    (option, text), *others = chosen.options.items()
    name, colon, rest = map(str.strip, (option or text).partition(":"))
    if option and not colon:
        return chosen
    whole = f"{chosen.name}:{name}"
    first = {rest: text} if option else {"": rest} if rest else {}
    if twice := first.keys() & dict(others):
        raise ArgumentError(f"{where}: {whole}: {twice.pop()} is given twice")
    return Spec(whole, first | dict(others))


def user_object(
    where: str,
    text: str,
    options: Mapping[str, str],
    *,
    noun: str,
    num_arguments: int = 0,
    option_readers: OptionReaders | None = None,
) -> Any:
    """Return the object `module:name` in a module of the user, with options.

    | the object | the result |
    | --- | --- |
    | a class, or a function that makes an object | its result with the options as keyword arguments |
    | a function with `num_arguments` required arguments, if that is not 0 | the function, with the options bound |
    | any other object | the object; the options replace fields of a dataclass |

    Args:
        where: the start of an error message.
        text: `module:name`.
        options: the options as text.
        noun: what the object is, such as `"a correction"`.
        num_arguments: the number of arguments with which the library calls a function.
        option_readers: as in [`parse_kwargs`][manifoldagg.simulation.spec_parser.parse_kwargs].

    Raises:
        ArgumentError: as `import_object` and `build`; if the object rejects the options.

    Example:
        >>> user_object("staleness", "manifoldagg.federated.staleness:Hinge", {"a": "5"}, noun="a weight")
        Hinge(a=5, b=4.0)
    """
    module, _, name = text.partition(":")
    found = import_object(where, module.strip(), name.strip(), noun)
    if not (isinstance(found, type | partial) or inspect.isroutine(found)):
        kind: Any = type(found)
        if not options:
            return found
        if not is_dataclass(found):
            raise ArgumentError(f"{where}: expected no options, as {text} is neither a class nor a dataclass")
        given = _replaced_fields(where, found, options, option_readers)
        with error_context(where, TypeError, ValueError):
            return kind(**given)
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        raise ArgumentError(f"{where}: expected a class or a function with a signature, got {text}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one.name for one in parameters if one.default is one.empty and one.kind in kinds]
    if num_arguments and not isinstance(found, type) and len(required) == num_arguments:
        bound = parse_kwargs(where, found, options, option_readers=option_readers, excluded=required)
        return partial(found, **bound) if bound else found
    given = parse_kwargs(where, found, options, option_readers=option_readers)
    with error_context(where, TypeError, ValueError):
        return found(**given)


@contextmanager
def error_context(where: str, *others: type[Exception]) -> Iterator[None]:
    """Prefix the messages of this package's exceptions, and of the given ones, with `where`."""
    kinds: tuple[type[Exception], ...] = (ManifoldAggError, *others)
    try:
        yield
    except kinds as error:
        raise ArgumentError(f"{where}: {error}") from error


def _replaced_fields(
    where: str, instance: Any, options: Mapping[str, str], option_readers: OptionReaders | None
) -> dict[str, Any]:
    """Return the fields of a dataclass as keyword arguments, with options in place of some of them."""
    before = {one.name: getattr(instance, one.name) for one in fields(instance) if one.init}
    return parse_kwargs(where, type(instance), options, option_readers=option_readers, defaults=before)


def _read_with_colon(where: str, text: str, options: Mapping[str, str], readers: Mapping[str, Reader]) -> Any:
    """Read `module:name`, or a known name with its first option, such as `csv:measured.csv`."""
    name, _, first = map(str.strip, text.partition(":"))
    if name in readers:
        return readers[name](where, {"": first, **options})
    if closest_match(name, readers) is not None and not is_importable(name):
        choose(where, "name", name, readers)
    return readers[MODULE_NAME](where, {"": text, **options})


def _default_arguments(factory: Callable[..., Any]) -> dict[str, Any]:
    """What the arguments of `factory` are where they are not given."""
    signature = inspect.signature(factory).parameters.items()
    found = {name: parameter.default for name, parameter in signature if parameter.default is not parameter.empty}
    if is_dataclass(factory):
        # The signature has a mark in place of a default that is made.
        found |= {one.name: one.default_factory() for one in fields(factory) if one.default_factory is not MISSING}
    return found
