"""Parser for specs. A spec such as `name:option=value,option=value` selects an object by name and sets its options.

If a function in this module has an argument `where`, its error messages start with the text of this argument.
"""

import ast
import importlib.util
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from manifoldagg._validation import closest_match, short_repr
from manifoldagg.errors import ArgumentError, ManifoldAggError

__all__ = [
    "MODULE_NAME",
    "OptionReaders",
    "Reader",
    "Spec",
    "bind",
    "build",
    "choose",
    "error_context",
    "field_values",
    "import_object",
    "parse_kwargs",
    "parse_literal",
    "parse_spec",
    "parse_specs",
    "parse_value",
    "reader",
    "user_reader",
]

T = TypeVar("T")
MODULE_NAME = "module:name"
"""The key of the reader for objects in user modules. The reader receives the name as the option `MODULE_NAME`."""
WORDS = {"true": True, "false": False, "none": None, "inf": math.inf, "-inf": -math.inf}


@dataclass(frozen=True)
class Spec:
    """The parsed form of a text such as `fedasync:rate=0.5`, which selects an object by name and sets its options.

    Attributes:
        name: the name, or `module:name` for an object in a user's module.
        options: the text of each option, by the name of the option. An option without a name, such as `trace.csv` in
            `replay:trace.csv`, has the key `""`.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        written = ",".join(f"{option}={text}" if option else text for option, text in self.options.items())
        return f"{self.name}:{written}" if written else self.name


Reader: TypeAlias = Callable[[str, Mapping[str, str]], Any]
"""A function that builds a value. Its arguments are the start of an error message, and the options of the value."""
OptionReaders: TypeAlias = Mapping[str, Mapping[str, Reader]]
"""The readers of the options whose values are objects, by the names of the values."""


def parse_specs(where: str, text: str, known: Collection[str] | None = None) -> list[Spec]:
    """Parse a comma-separated list of names, each of which may have options.

    A colon separates a name from its first option. After a comma, `option=value` adds an option to the current name,
    and any other text starts the next name. For example, `asyncbezier:threshold=auto,degree=3,fedgs` contains
    `asyncbezier` with two options, and `fedgs` without options.

    Args:
        where: the start of error messages.
        text: the text of the list.
        known: the names that can be selected. With this argument, the list may also contain objects in a user's module,
            as in `module:name:option=value`.

    Raises:
        ArgumentError: if the text contains no name, an option precedes the first name, or an option is given twice.

    Example:
        >>> [str(spec) for spec in parse_specs("methods", "fedasync, asyncbezier:threshold=auto, degree=3, fedgs")]
        ['fedasync', 'asyncbezier:threshold=auto,degree=3', 'fedgs']
        >>> parse_specs("methods", "my_module:Signs:rate=0.1", known=["fedgs"])
        [Spec(name='my_module:Signs', options={'rate': '0.1'})]
    """
    found: list[tuple[str, dict[str, str]]] = []
    for piece in filter(None, map(str.strip, text.split(","))):
        name, _, rest = map(str.strip, piece.partition(":"))
        if not name:
            raise ArgumentError(f"{where}: expected a name before the colon, got {piece!r}")
        if "=" in name:
            rest = piece
        else:
            attribute, _, further = map(str.strip, rest.partition(":"))
            if known is not None and attribute and "=" not in attribute and _is_module(name, known):
                name, rest = f"{name}:{attribute}", further
            found.append((name, {}))
        if not found:
            raise ArgumentError(f"{where}: expected a name before its options, got {text!r}")
        if rest:
            option, equals, value = map(str.strip, rest.partition("="))
            option, value = (option, value) if equals else ("", option)
            name, options = found[-1]
            if option in options:
                raise ArgumentError(f"{where}: {name}: {option} is given twice")
            options[option] = value
    if not found:
        raise ArgumentError(f"{where}: expected a name, got {text!r}")
    return [Spec(name, options) for name, options in found]


def parse_spec(where: str, text: str, known: Collection[str] | None = None) -> Spec:
    """Parse a single name with its options. The arguments are those of `parse_specs`."""
    first, *others = parse_specs(where, text, known)
    if others:
        raise ArgumentError(f"{where}: expected one name with its options, got a second one: {others[0]}")
    return first


def parse_literal(text: str) -> Any:
    """Parse a number, `true`, `false`, `none`, `inf`, or several numbers joined by `+`.

    Several numbers become a tuple. Any other text is returned unchanged.

    Example:
        >>> [parse_literal(text) for text in ("3", "1e-3", "true", "none", "-inf", "4+2", "auto", "rates.csv")]
        [3, 0.001, True, None, -inf, (4, 2), 'auto', 'rates.csv']
    """
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    for written in (text, text.replace("+", ",")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python warns of literals such as `1if`.
                value = ast.literal_eval(written)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        parts = value if isinstance(value, tuple) else (value,)
        if parts and all(type(part) in (int, float) for part in parts):
            return value
    return text


def parse_kwargs(
    where: str,
    factory: Callable[..., Any],
    options: Mapping[str, str],
    *,
    option_readers: OptionReaders | None = None,
    excluded: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Parse the text of options into keyword arguments for `factory`, a class or a function.

    The value of an option can be an object that has options of its own. For example, `staleness=hinge` selects the
    object `hinge` for the option `staleness`, and `staleness.a=0.9` sets the option `a` of this object. Without
    `staleness=hinge`, `staleness.a=0.9` sets the option `a` of the default object.

    Args:
        where: the start of an error message.
        factory: a class or a function. If it annotates an option as a string or a path, that text is not parsed.
        options: the text of each option.
        option_readers: the readers of options whose values are objects.
        excluded: parameters that are not options.
        defaults: arguments for options that are not given.

    Raises:
        ArgumentError: if an option is unknown (the message suggests the nearest option), or if a required option is
            missing.

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
    # For each parameter, the text of its value has the key "", and its own options have their names.
    given: dict[str, dict[str, str]] = {}
    for option, text in options.items():
        name, dot, inner = (option or next(iter(parameters), "")).partition(".")
        choose(where, "option", name, parameters)
        if dot and not inner:
            raise ArgumentError(f"{where}: {name}: expected one of its options behind the dot, got {option!r}")
        if inner in given.setdefault(name, {}):
            raise ArgumentError(f"{where}: {name} is given twice")
        given[name][inner] = text
    result = dict(defaults or {})
    for name, texts in given.items():
        default = result[name] if name in result else _default(factory, parameters[name])
        result[name] = _parse_option(where, parameters[name], texts, default, option_readers or {})
    required = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
    if missing := [name for name in required if name not in result]:
        raise ArgumentError(f"{where}: expected {', '.join(f'{name}=...' for name in missing)}")
    return result


def _parse_option(
    where: str, parameter: inspect.Parameter, texts: Mapping[str, str], default: Any, option_readers: OptionReaders
) -> Any:
    """Parse the text of a parameter, which has the key "". Without it, apply the options to the default object."""
    here = f"{where}: {parameter.name}"
    readers = option_readers.get(parameter.name, {})
    options = dict(texts)
    text = options.pop("", None)
    if text is None:
        if not is_dataclass(default):
            raise ArgumentError(f"{here}: expected its name")
        kind: Any = type(default)
        return build(here, kind, options, option_readers=option_readers, defaults=field_values(default))
    name, colon, first = map(str.strip, text.partition(":"))
    if name in readers:
        return readers[name](here, {"": first, **options} if colon else options)
    if colon and MODULE_NAME in readers:
        if not _is_module(name, readers):
            choose(where, parameter.name, name, readers)
        return readers[MODULE_NAME](here, {MODULE_NAME: text, **options})
    if options:
        raise ArgumentError(f"{here}: {text} has no options of its own")
    if parameter.annotation in (str, Path, Path | str):
        return text
    value = parse_literal(text)
    if readers and isinstance(value, str):
        if type(default) in (int, float) and closest_match(text, readers) is None:
            raise ArgumentError(f"{here}: expected a number, or one of {', '.join(readers)}; got {text!r}")
        choose(where, parameter.name, text, readers)
    return value


def _default(factory: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the default of a parameter. The signature of a dataclass shows a placeholder for a default factory."""
    field_factories = {one.name: one.default_factory for one in fields(factory)} if is_dataclass(factory) else {}
    make = field_factories.get(parameter.name, MISSING)
    return parameter.default if make is MISSING else make()


def build(
    where: str,
    factory: Callable[..., T],
    options: Mapping[str, str],
    *,
    option_readers: OptionReaders | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Call `factory` with the keyword arguments that `parse_kwargs` returns.

    If `factory` rejects a value, the function raises an `ArgumentError`.
    """
    given = parse_kwargs(where, factory, options, option_readers=option_readers, defaults=defaults)
    with error_context(where, TypeError, ValueError):
        return factory(**given)


def bind(
    where: str,
    function: Callable[..., Any],
    options: Mapping[str, str],
    later: Collection[str],
    option_readers: OptionReaders | None = None,
) -> "partial[Any]":
    """Return `function` with the keyword arguments that `parse_kwargs` returns.

    The parameters `later` are not options. The caller passes them in each call of the result.
    """
    return partial(function, **parse_kwargs(where, function, options, excluded=later, option_readers=option_readers))


def reader(factory: Callable[..., Any], *, option_readers: OptionReaders | None = None, **defaults: Any) -> Reader:
    """Return a reader that builds a value with `factory`."""

    def read(where: str, options: Mapping[str, str]) -> Any:
        return build(where, factory, options, option_readers=option_readers, defaults=defaults)

    return read


def parse_value(where: str, text: str, readers: Mapping[str, Reader], noun: str = "") -> Any:
    """Build an object from a spec, which is a name with options such as `name:option=value`.

    Args:
        where: the start of error messages.
        text: the spec.
        readers: for each name, a function that builds the object from its options. If the key `MODULE_NAME` exists, the
            name in the spec may also be `module:name`, an object in a user's module.
        noun: the kind of object in the message about an unknown name. The default is `where`.

    Raises:
        ArgumentError: if the spec is invalid. If the name is unknown, the message suggests the nearest known name.
    """
    chosen = parse_spec(where, text, readers)
    here = f"{where}: {chosen.name}"
    if ":" in chosen.name:
        return readers[MODULE_NAME](here, {MODULE_NAME: chosen.name, **chosen.options})
    return readers[choose(where, noun or where, chosen.name, readers)](here, chosen.options)


def choose(where: str, noun: str, name: str, choices: Collection[str]) -> str:
    """Return `name` if it is one of the choices, and otherwise raise an `ArgumentError`.

    The error message suggests the most similar choice. If no choice is similar, the message lists all choices.

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


def import_object(where: str, text: str, noun: str) -> Any:
    """Import the object `module:name` from a user's module.

    If the module or the name does not exist, the function raises an `ArgumentError`. `noun` is the description of the
    expected object in the error message, such as "a data set".

    Example:
        >>> import_object("data", "math:tau", "a data set")
        6.283185307179586
        >>> import_object("data", "maths:tau", "a data set")
        Traceback (most recent call last):
            ...
        manifoldagg.errors.ArgumentError: data: expected a data set or an importable module, got 'maths'
    """
    module, _, name = map(str.strip, text.partition(":"))
    try:
        # The name of a relative import, such as the path of a file, begins with a dot.
        found = None if module.startswith(".") else importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise ArgumentError(f"{where}: {error}") from error
        found = None
    if found is None:
        raise ArgumentError(f"{where}: expected {noun} or an importable module, got {module!r}")
    if not hasattr(found, name):
        near = closest_match(name, vars(found))
        hint = f"; did you mean {near}?" if near else ""
        raise ArgumentError(f"{where}: expected a name that the module {module} defines, got {name!r}{hint}")
    return getattr(found, name)


def user_reader(
    noun: str, kind: Any = object, *, num_arguments: int = 0, option_readers: OptionReaders | None = None
) -> dict[str, Reader]:
    """Return a reader for objects in a user's module.

    A reader is a function that builds a value from options. This reader imports the object `module:name`. The value
    depends on the object:

    - A class or a function is called with the options as keyword arguments. The value is the result.
    - If `num_arguments` is positive, functions with this number of required arguments are an exception. The value is
      the function itself, with the options as fixed keyword arguments.
    - For an instance of a dataclass, the value is a copy of the instance in which the options replace fields.
    - For any other object, the value is the object, and options are not allowed.

    Args:
        noun: the description of the expected value in error messages, such as "a correction".
        kind: the class of the value. The reader raises an `ArgumentError` for other values.
        num_arguments: the number of required arguments if the value may also be a function, otherwise 0.
        option_readers: the readers of options whose values are objects.

    Returns:
        A dictionary with the reader under the key `MODULE_NAME`, which can be merged with readers of other names.

    Example:
        >>> read = user_reader("a weight")[MODULE_NAME]
        >>> read("staleness", {MODULE_NAME: "manifoldagg.federated.staleness:Hinge", "a": "5"})
        Hinge(a=5, b=4.0)
    """

    def read(where: str, options: Mapping[str, str]) -> Any:
        given = dict(options)
        text = given.pop(MODULE_NAME)
        made = _make(where, import_object(where, text, noun), text, given, num_arguments, option_readers)
        if not (isinstance(made, kind) or (num_arguments and callable(made) and not isinstance(made, type))):
            got = f"the class {made.__name__}" if isinstance(made, type) else short_repr(made)
            raise ArgumentError(f"{where}: expected {noun}, or a class or function that makes one, got {got}")
        return made

    return {MODULE_NAME: read}


def _make(
    where: str, found: Any, text: str, options: Mapping[str, str], num_arguments: int, readers: OptionReaders | None
) -> Any:
    """Apply the options to an object of the user, as in the list of `user_reader`."""
    if not (isinstance(found, type | partial) or inspect.isroutine(found)):
        if not options:
            return found
        if not is_dataclass(found):
            raise ArgumentError(f"{where}: expected no options, as {text} is neither a class nor a dataclass")
        kind: Any = type(found)
        return build(where, kind, options, option_readers=readers, defaults=field_values(found))
    try:
        parameters = inspect.signature(found).parameters.values()
    except ValueError:
        raise ArgumentError(f"{where}: expected a class or a function with a signature, got {text}") from None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [one.name for one in parameters if one.default is one.empty and one.kind in kinds]
    if num_arguments and not isinstance(found, type) and len(required) == num_arguments:
        return bind(where, found, options, required, readers) if options else found
    return build(where, found, options, option_readers=readers)


def _is_module(name: str, known: Collection[str]) -> bool:
    """Return whether the name before a colon is a module, and not a misspelled known name."""
    if name in known or closest_match(name, known) is None:
        return name not in known
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError, AttributeError):
        return False


@contextmanager
def error_context(where: str, *others: type[Exception]) -> Iterator[None]:
    """Prefix the messages of this package's exceptions, and of the given ones, with `where`."""
    kinds: tuple[type[Exception], ...] = (ManifoldAggError, *others)
    try:
        yield
    except kinds as error:
        raise ArgumentError(f"{where}: {error}") from error


def field_values(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass instance as keyword arguments of its class."""
    return {one.name: getattr(instance, one.name) for one in fields(instance) if one.init}
