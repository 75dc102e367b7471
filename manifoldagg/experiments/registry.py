"""Registry of methods by name: every rule with its trainer and the default options of both."""

import abc
import csv
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manifoldagg import corrections, curves
from manifoldagg._validation import check_number, short_repr
from manifoldagg.corrections import Correction
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule, Trainer, rules, schedules, staleness
from manifoldagg.federated import clients as trainers
from manifoldagg.simulation.method import Method
from manifoldagg.simulation.spec_parser import (
    MODULE_NAME,
    OptionReaders,
    Reader,
    Spec,
    build,
    choose,
    error_context,
    import_object,
    merge_module_name,
    parse_kwargs,
    parse_literal,
    parse_spec,
    parse_specs,
    reader,
    user_object,
)

__all__ = ["RULES", "TRAINERS", "MethodDefaults", "method", "methods", "parse_methods"]

TRIAL_CLIENTS = range(10_000)
"""The number of clients in a trial construction of a rule."""


class PerClients(abc.ABC):
    """A value that depends on the participating clients."""

    @abc.abstractmethod
    def __call__(self, clients: Sequence[int]) -> Any:
        """Return the value for these clients."""


@dataclass(frozen=True)
class NumClients(PerClients):
    """The number of participating clients."""

    def __call__(self, clients: Sequence[int]) -> int:
        return len(clients)


@dataclass(frozen=True)
class UniformShares(PerClients):
    """Equal shares for all clients."""

    def __call__(self, clients: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(clients, 1 / len(clients))


@dataclass(frozen=True)
class Factory(PerClients):
    """A call of `make` with options, some of which depend on the participating clients."""

    make: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, clients: Sequence[int]) -> Any:
        ready = {
            name: value(clients) if isinstance(value, PerClients) else value for name, value in self.options.items()
        }
        return self.make(**ready)


@dataclass(frozen=True)
class MethodDefaults:
    """The defaults of a rule: the name of its trainer, its options, and the trainer's options."""

    trainer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MethodTemplate:
    """The rule, the trainer and the options that a method's name refers to.

    Attributes:
        label: what it is called without options.
        rule: how it is made.
        trainer: likewise.
        rate_field: what the global rate is called; `None` where it is to stay as it is.
    """

    label: str
    rule: Factory
    trainer: Factory
    rate_field: str | None


def _rule_classes() -> dict[str, Any]:
    """The rules that there are, by name."""
    found = {name.lower(): getattr(rules, name) for name in rules.__all__}
    return {name: made for name, made in found.items() if hasattr(made, "step")}


def _trainer_classes() -> dict[str, Any]:
    """The trainers that there are, by name."""
    found = {name.lower(): getattr(trainers, name) for name in trainers.__all__}
    return {name: made for name, made in found.items() if hasattr(made, "train")}


def _load_defaults(path: Path) -> tuple[dict[str, MethodDefaults], dict[str, dict[str, Any]]]:
    """Read the default options of the rules, and of the trainers, from a TOML file."""
    tables = tomllib.loads(path.read_text())
    trainer_options: dict[str, dict[str, Any]] = {}
    for name, options in tables["trainers"].items():
        trainer_options[name] = {key: _parse_default(value, trainer_options) for key, value in options.items()}
    rule_defaults = {
        name: MethodDefaults(
            table["trainer"],
            {key: _parse_default(value, trainer_options) for key, value in table["options"].items()},
            table.get("trainer_options", {}),
        )
        for name, table in tables["rules"].items()
    }
    return rule_defaults, trainer_options


def _parse_default(value: Any, trainer_options: Mapping[str, Mapping[str, Any]]) -> Any:
    """The value of an option that a value of the TOML file stands for."""
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, str):
        return SPECIAL_DEFAULTS.get(value, value)
    if isinstance(value, dict):
        options = dict(value)
        if "rule" in options:
            return _rule_classes()[options.pop("rule")](**options)
        name = options.pop("trainer")
        return _trainer_classes()[name](**{**trainer_options[name], **options})
    return value


SPECIAL_DEFAULTS: Mapping[str, Any] = {
    "num_clients": NumClients(),
    "uniform_shares": UniformShares(),
    "adam": torch.optim.Adam,
}
"""The values of special strings in the TOML file."""
_DEFAULTS = _load_defaults(Path(__file__).with_name("defaults.toml"))
RULES: Mapping[str, MethodDefaults] = _DEFAULTS[0]
"""The default trainer and the default options of each rule in a comparison."""
TRAINERS: Mapping[str, Mapping[str, Any]] = _DEFAULTS[1]
"""The default options of each trainer in a comparison."""
RATE_FIELDS: Mapping[str, str] = {"momentum": "rule.rate", "private": "rule.rate", "adamasfl": "gamma"}
"""What a global rate is called where it is not `rate`."""


def method(text: str, rate: float | None = None) -> Method:
    """Build the named method with its options: fields of the rule or of its trainer.

    An option that both have is the rule's option. `trainer.rate` is an option of the trainer, and `trainer=` selects
    another trainer. An option whose value is an object accepts the name of the object in lower case. Options of the
    object have a dot: `staleness=hinge,staleness.a=5`, `rate=cosine,rate.start=3`, `correction=orthodyn`,
    `optimizer=sgd,optimizer.momentum=0.9`, `sharpness=sam`, `dominance=true`, `routing=uniform`.

    `module:name` is an object in a Python module of your own. As a method, it is a rule, a class or a function that
    makes a rule, or a [`Method`][manifoldagg.simulation.Method]; its options come after another colon, and its default
    trainer is that of `fedasync`. As the value of an option, it is an instance, a class, or a function that makes an
    instance: `correction=my_module:MyCorrection,correction.strength=2`. A function of one required argument is itself
    the value of `staleness`, `rate` and `steps`.

    Args:
        text: such as `"fedortho"`, `"asyncbezier:threshold=auto,degree=3"` or `"my_module:Signs:rate=0.1"`.
        rate: the global rate, if `text` does not set one.

    Raises:
        ArgumentError: if a name is unknown, with the nearest known name, or if a value is invalid.

    Example:
        >>> method("fedortho", rate=3.0).rule.rate
        3.0
        >>> chosen = method("asyncbezier:trainer=trajectory,pull_back=none,degree=3")
        >>> chosen.name, chosen.rule.pull_back, chosen.trainer.degree
        ('AsyncBezier(trainer=trajectory, pull_back=none, degree=3)', 'none', 3)
        >>> method("manifoldagg.federated.rules:FedAsync:rate=0.5").name
        'FedAsync(rate=0.5)'
    """
    (chosen,) = parse_methods([text])
    given = {} if rate is None else {_rate_option(chosen): repr(check_number("rate", rate, above=0))}
    return _build_method(chosen, {**given, **chosen.options})


def methods(names: Sequence[str] | str, rates: Sequence[str] = ()) -> list[Method]:
    """Build the named methods; each of `rates` is `"0.5"`, for all, or `"fedasync=0.5"`, for one.

    Args:
        names: each as [`method`][manifoldagg.experiments.registry.method] takes them; or all in one, separated by
            commas.
        rates: global rates, for methods whose options have none.

    Raises:
        ArgumentError: if a name is unknown, a method is given twice, or a rate is not positive.

    Example:
        >>> [method.name for method in methods("fedasync,asyncbezier:threshold=auto,degree=3,fedgs")]
        ['FedAsync', 'AsyncBezier(threshold=auto, degree=3)', 'FedGS']
    """
    listed = parse_methods(names)
    if not listed:
        raise ArgumentError(f"methods: expected some of {', '.join(_rule_classes())}; got none")
    found = {}
    chosen: list[dict[str, float]] = [{} for _ in listed]
    for entry in rates:
        name, equals, value = entry.rpartition("=")
        try:
            rate = float(value)
        except ValueError:
            raise ArgumentError(f"rate: expected a number or METHOD=NUMBER, got {entry!r}") from None
        check_number("rate", rate, above=0)
        if equals:
            choose("rate", "method", name, [one.name for one in listed])
        for one, own in zip(listed, chosen, strict=True):
            if one.name == name or not equals:
                own["rate"] = rate
    for one, own in zip(listed, chosen, strict=True):
        made = method(str(one), own.get("rate"))
        if made.name in found:
            raise ArgumentError(f"methods: {one} is given twice")
        found[made.name] = made
    return list(found.values())


def parse_methods(names: Sequence[str] | str) -> list[Spec]:
    """Split the names of methods, as `methods` takes them, into names and options.

    Example:
        >>> [spec.name for spec in parse_methods("fedasync:rate=0.5,my_module:Signs:rate=0.1")]
        ['fedasync', 'my_module:Signs']
    """
    given = parse_specs("methods", names) if isinstance(names, str) else [parse_spec("methods", name) for name in names]
    known = _rule_classes()
    return [spec if spec.name in known else merge_module_name("methods", spec) for spec in given]


def _defaults(name: str) -> MethodDefaults:
    """What a rule has where nothing is said; one that nobody has tried on the digits, plain local training."""
    return RULES.get(name, MethodDefaults("local"))


def _template(name: str, options: Mapping[str, str]) -> MethodTemplate:
    """What a name stands for; its trainer is among the options, or follows from them."""
    if ":" in name:
        return _user_method(name, options)
    made = _rule_classes()[choose("methods", "method", name, _rule_classes())]
    entry = _defaults(name)
    trainer = options.get("trainer", _trainer_name(name, options))
    training = _trainer_factory(f"methods: {name}", trainer, entry.trainer_options if trainer == entry.trainer else {})
    return MethodTemplate(made.__name__, Factory(made, entry.options), training, RATE_FIELDS.get(name, "rate"))


def _user_method(name: str, options: Mapping[str, str]) -> MethodTemplate:
    """What is meant by `module:name`: a class or a function, which make a rule, a rule, or a method."""
    where = f"methods: {name}"
    module, _, own = name.partition(":")
    found = import_object(where, module, own, "a method")
    training = _trainer_factory(where, options.get("trainer", "local"))
    if isinstance(found, Method):
        training = training if "trainer" in options else _rebuild(found.trainer)
        return MethodTemplate(found.name, _rebuild(found.rule), training, found.rate_field)
    if isinstance(found, type) or (callable(found) and not isinstance(found, Rule)):
        return MethodTemplate(own, Factory(found, {}), training, "rate")
    return MethodTemplate(own, _rebuild(found), training, "rate")


def _rebuild(value: Any) -> Factory:
    """How a value is made once more, with other options if it is a dataclass."""
    if isinstance(value, Factory):
        return value
    if not is_dataclass(value):
        return Factory(lambda: value, {})
    return Factory(type(value), {one.name: getattr(value, one.name) for one in fields(value) if one.init})


def _trainer_factory(where: str, name: str, trainer_options: Mapping[str, Any] | None = None) -> Factory:
    """Return the factory of a named trainer, or of `module:name`: a class, a function that makes one, or a trainer."""
    module, colon, own = map(str.strip, name.partition(":"))
    if colon and module not in TRAINERS:
        found = import_object(f"{where}: trainer", module, own, "a trainer")
        return Factory(found, {}) if isinstance(found, type) or inspect.isroutine(found) else _rebuild(found)
    choose(where, "trainer", name, TRAINERS)
    return Factory(_trainer_classes()[name], {**TRAINERS[name], **(trainer_options or {})})


def _build_method(chosen: Spec, options: Mapping[str, str]) -> Method:
    base = _template(chosen.name, options)
    where = f"methods: {chosen.name}"
    mine, theirs = (inspect.signature(one.make).parameters for one in (base.rule, base.trainer))
    parts: dict[str, dict[str, str]] = {"rule": {}, "trainer": {}}
    for option, text in options.items():
        head, _, tail = option.partition(".")
        if option == "trainer":
            continue
        if head == "trainer":
            if not tail:
                raise ArgumentError(f"{where}: expected an option of the trainer behind the dot, got {option!r}")
            parts["trainer"][tail] = text
        elif choose(where, "option", head, dict.fromkeys(["trainer", *mine, *theirs])) in mine:
            parts["rule"][option] = text
        else:
            parts["trainer"][option] = text
    given = ", ".join(f"{option}={text}" for option, text in chosen.options.items())
    label = f"{base.label}({given})" if given else base.label
    rate = base.rate_field or ""
    if parts["rule"].get(rate) == "cosine" and f"{rate}.start" not in parts["rule"]:
        # A shape without a height: that is what a search is for, from where the rule's own rate is.
        before = base.rule.options.get(rate, mine[rate].default if rate in mine else None)
        parts["rule"][f"{rate}.start"] = repr(before if type(before) in (int, float) else 1.0)
        rate = f"{rate}.start"
        by_hand = False
    else:
        by_hand = any(f"{option}.".startswith(f"{rate}.") for option in parts["rule"])
    defaults = dict(base.rule.options)
    weighted = parts["rule"].get("weighted", "")
    if "weighted" in defaults and weighted and parse_literal(weighted) != defaults["weighted"] and not by_hand:
        # The tuned rate belongs to the tuned weighting: without weights it would be N times too large.
        defaults.pop(rate, None)
    rule = _build_per_clients(where, base.rule.make, parts["rule"], defaults)
    if not (callable(rule) or isinstance(rule, Rule)):
        raise ArgumentError(
            f"{where}: expected a rule, a class or function that makes one, or a Method, got {short_repr(rule)}"
        )
    trainer: Trainer = build(
        where, base.trainer.make, parts["trainer"], option_readers=OPTION_READERS, defaults=base.trainer.options
    )
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"{where}: trainer: expected a trainer, or a class or function that makes one, got {short_repr(trainer)}"
        )
    return Method(label, rule, trainer, None if by_hand else rate or None)


def _trainer_name(name: str, options: Mapping[str, str]) -> str:
    """The name of the trainer that a rule has where none is named."""
    if "rule" in options:
        if options["rule"].partition(":")[0] not in _rule_classes() and ":" in options["rule"]:
            return "local"
        return _trainer_name(choose(f"methods: {name}", "rule", options["rule"], _rule_classes()), {})
    return "calibrated" if options.get("protocol") == "client" else _defaults(name).trainer


def _rate_option(chosen: Spec) -> str:
    """The option that is a method's global rate.

    Raises:
        ArgumentError: if it has none.
    """
    base = _template(chosen.name, chosen.options)
    if base.rate_field is None or base.rate_field.partition(".")[0] not in inspect.signature(base.rule.make).parameters:
        raise ArgumentError(f"rate: {chosen.name} has no rate")
    return base.rate_field


def _build_rule(name: str, where: str, options: Mapping[str, str]) -> Any:
    """A rule, or how it is made for the clients."""
    return _build_per_clients(where, _rule_classes()[name], options, _defaults(name).options)


def _build_trainer(name: str, where: str, options: Mapping[str, str]) -> Trainer:
    made: Trainer = build(
        where, _trainer_classes()[name], options, option_readers=OPTION_READERS, defaults=TRAINERS[name]
    )
    return made


def _build_per_clients(
    where: str, factory: Callable[..., Any], options: Mapping[str, str], defaults: Mapping[str, Any]
) -> Any:
    """What `factory` makes, or a `Factory` where that takes the clients; a `Factory` is tried."""
    made = Factory(factory, parse_kwargs(where, factory, options, option_readers=OPTION_READERS, defaults=defaults))
    with error_context(where, TypeError, ValueError):
        tried = made(TRIAL_CLIENTS)
    return made if any(isinstance(value, PerClients) for value in made.options.values()) else tried


def _build_dominance(where: str, options: Mapping[str, str]) -> Any:
    return _build_per_clients(where, rules.Dominance, options, {"clients": NumClients()})


def _build_optimizer(make: Callable[..., Any], where: str, options: Mapping[str, str]) -> Any:
    given = parse_kwargs(where, make, options, excluded=("params", "lr"))
    try:
        make([nn.Parameter(torch.zeros(1))], lr=1e-3, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{where}: {error}") from error
    return partial(make, **given) if given else make


def _read_shares(path: str) -> dict[int, float]:
    """The routing of a CSV file with the columns `client` and `share`, as `manifoldagg route` writes it."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            return {int(row["client"]): float(row["share"]) for row in csv.DictReader(file)}
    except OSError as error:
        raise ArgumentError(f"path: {path} cannot be read: {error.strerror or error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"path: {path}: expected numbers in the columns client and share: {error}") from None


def _readers(factories: Mapping[str, Any]) -> dict[str, Reader]:
    return {name.lower(): reader(make) for name, make in factories.items()}


def _correction_classes() -> dict[str, Any]:
    """Those that can be had without saying more."""
    found = {}
    for name in corrections.__all__:
        made = getattr(corrections, name)
        result = made if isinstance(made, type) else getattr(made, "__annotations__", {}).get("return")
        if isinstance(result, type) and issubclass(result, Correction) and not inspect.isabstract(made):
            parameters = inspect.signature(made).parameters.values()
            if all(parameter.default is not parameter.empty for parameter in parameters):
                found[name] = made
    return found


def _user_reader(noun: str, kind: Any = None, num_arguments: int = 0) -> dict[str, Reader]:
    """Return the reader of `module:name` for an option.

    Args:
        noun: the meaning of the option.
        kind: the class of its values; `None` if the rule or the trainer checks them.
        num_arguments: the number of arguments of a function that is a value itself; 0 if functions make values.
    """

    def read(where: str, options: Mapping[str, str]) -> Any:
        given = dict(options)
        text = given.pop("")
        made = user_object(where, text, given, noun=noun, num_arguments=num_arguments, option_readers=OPTION_READERS)
        if kind is not None and not isinstance(made, kind):
            raise ArgumentError(f"{where}: expected {noun}, or a class or function that makes one, got {_made(made)}")
        return made

    return {MODULE_NAME: read}


def _made(value: Any) -> str:
    """Describe a value for a message."""
    return f"the class {value.__name__}" if isinstance(value, type) else short_repr(value)


def _user_optimizer(where: str, options: Mapping[str, str]) -> Any:
    given = dict(options)
    module, _, name = given.pop("").partition(":")
    found = import_object(where, module.strip(), name.strip(), "an optimizer")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ArgumentError(f"{where}: expected a class of optimizers, got {_made(found)}")
    return _build_optimizer(found, where, given)


OPTION_READERS: OptionReaders = {
    **dict.fromkeys(
        ("rate", "steps"),
        _readers({"Cyclic": schedules.Cyclic, "Cosine": schedules.Cosine})
        | _user_reader("a schedule", num_arguments=1),
    ),
    "staleness": _readers({name: getattr(staleness, name) for name in staleness.__all__})
    | _user_reader("a function of the staleness", num_arguments=1),
    "correction": _readers(_correction_classes()) | _user_reader("a correction", Correction),
    "dominance": {"true": _build_dominance},
    "routing": {
        "uniform": lambda where, options: build(where, UniformShares, options),
        "file": reader(_read_shares),
        **_user_reader("a mapping from clients to shares", Mapping),
    },
    "rule": {name: partial(_build_rule, name) for name in _rule_classes()} | _user_reader("a rule", Rule),
    "optimizer": {
        name: partial(_build_optimizer, make)
        for name, make in (
            ("sgd", torch.optim.SGD),
            ("adam", torch.optim.Adam),
            ("adamw", torch.optim.AdamW),
            ("rmsprop", torch.optim.RMSprop),
            ("adagrad", torch.optim.Adagrad),
        )
    }
    | {MODULE_NAME: _user_optimizer},
    "sharpness": _readers({"SAM": curves.SAM, "ASAM": curves.ASAM}) | _user_reader("a perturbation such as SAM"),
    "proximal": _readers({"LorentzProximal": trainers.LorentzProximal}) | _user_reader("a proximal term"),
    "local": {name: partial(_build_trainer, name) for name in ("local", "proximal", "trajectory")}
    | _user_reader("a trainer", Trainer),
    "trainer": {name: partial(_build_trainer, name) for name in TRAINERS} | _user_reader("a trainer", Trainer),
}
"""The readers of the options whose values are objects, by the names of the values."""
