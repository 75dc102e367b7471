"""Registry of methods by name. A method combines a rule with a trainer, and both have default options."""

import csv
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manifoldagg import corrections, curves
from manifoldagg._io import os_errors
from manifoldagg._validation import check_number, short_repr
from manifoldagg.corrections import Correction
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.spec_parser import (
    MODULE_NAME,
    Reader,
    Spec,
    bind,
    build,
    choose,
    error_context,
    field_values,
    import_object,
    parse_kwargs,
    parse_literal,
    parse_spec,
    parse_specs,
    reader,
    user_reader,
)
from manifoldagg.federated import Rule, Trainer, rules, schedules, staleness
from manifoldagg.federated import clients as trainers
from manifoldagg.simulation.method import Method

__all__ = ["RULES", "TRAINERS", "method", "methods", "parse_methods"]

TRIAL_CLIENTS = range(10_000)
"""The clients in a trial construction of a rule."""
RULE_CLASSES = {name.lower(): made for name in rules.__all__ if hasattr(made := getattr(rules, name), "step")}
TRAINER_CLASSES = {name.lower(): made for name in trainers.__all__ if hasattr(made := getattr(trainers, name), "train")}


@dataclass(frozen=True)
class NumClients:
    """The number of participating clients."""

    def __call__(self, clients: Sequence[int]) -> int:
        return len(clients)


@dataclass(frozen=True)
class UniformShares:
    """A routing with equal shares for all clients."""

    def __call__(self, clients: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(clients, 1 / len(clients))


@dataclass(frozen=True)
class Factory:
    """A deferred call of `make` with arguments that depend on the participating clients."""

    make: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, clients: Sequence[int]) -> Any:
        ready = {
            name: value(clients) if isinstance(value, PerClients) else value for name, value in self.options.items()
        }
        return self.make(**ready)


PerClients = NumClients | UniformShares | Factory
"""A value that depends on the participating clients."""


def _load_defaults(table: str) -> dict[str, Mapping[str, str]]:
    """Read a table of default options. The options have the syntax of a spec."""
    lines = tomllib.loads(Path(__file__).with_name("defaults.toml").read_text())[table]
    return {name: parse_spec(f"defaults.toml: {name}", f"{name}:{text}").options for name, text in lines.items()}


RULES = _load_defaults("rules")
"""The default options of each rule in a comparison. `trainer` is the name of its trainer (default: `local`)."""
TRAINERS = _load_defaults("trainers")
"""The default options of each trainer in a comparison."""
RATE_FIELDS: Mapping[str, str] = {"momentum": "rule.rate", "private": "rule.rate", "adamasfl": "gamma"}
"""The field of the global rate, if it is not `rate`."""


def method(text: str, rate: float | None = None) -> Method:
    """Build the named method with its options. The options are fields of the rule or of its trainer.

    - If the rule and the trainer both have a field `rate`, `rate` sets the field of the rule, and `trainer.rate` sets
      the field of the trainer. `trainer=` selects another trainer.
    - If the value of an option is an object, the option accepts the name of the object in lower case:
      `correction=orthodyn`, `sharpness=sam`, `dominance=true`, `routing=uniform`.
    - Options of such an object contain a dot: `staleness=hinge,staleness.a=5`, `rate=cosine,rate.start=3`,
      `optimizer=sgd,optimizer.momentum=0.9`.

    `module:name` selects an object in your own Python module:

    - As a method, the object is a rule, a class or function that returns a rule, or a
      [`Method`][manifoldagg.simulation.Method]. The options follow another colon. The default trainer is the trainer of
      `fedasync`.
    - As the value of an option, the object is an instance, or a class or function that returns an instance:
      `correction=my_module:MyCorrection,correction.strength=2`. For the options `staleness`, `rate` and `steps`, a
      function with one required argument is the value itself.

    Args:
        text: the name and its options, such as `"fedortho"`, `"asyncbezier:threshold=auto,degree=3"` or
            `"my_module:Signs:rate=0.1"`.
        rate: the global rate, if `text` does not set a rate.

    Raises:
        ArgumentError: if a name is unknown (the message suggests the nearest name), or if a value is invalid.

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
    return _build_method(chosen, rate)


def methods(names: Sequence[str] | str, rates: Sequence[str] = ()) -> list[Method]:
    """Build the named methods.

    Args:
        names: a list of names for [`method`][manifoldagg.experiments.registry.method], or a string of names separated
            by commas.
        rates: the global rates of the methods whose options do not set a rate. `"0.5"` applies to all methods.
            `"fedasync=0.5"` applies to one method.

    Raises:
        ArgumentError: if a name is unknown, a method is given twice, or a rate is not positive.

    Example:
        >>> [method.name for method in methods("fedasync,asyncbezier:threshold=auto,degree=3,fedgs")]
        ['FedAsync', 'AsyncBezier(threshold=auto, degree=3)', 'FedGS']
    """
    listed = parse_methods(names)
    if not listed:
        raise ArgumentError(f"methods: expected some of {', '.join(RULE_CLASSES)}; got an empty list")
    rate_of: dict[str, float] = {}
    for entry in rates:
        name, equals, value = entry.rpartition("=")
        try:
            rate = float(value)
        except ValueError:
            raise ArgumentError(f"rate: expected a number or METHOD=NUMBER, got {entry!r}") from None
        check_number("rate", rate, above=0)
        if equals:
            choose("rate", "method", name, [one.name for one in listed])
        rate_of |= {name: rate} if equals else {one.name: rate for one in listed}
    found: dict[str, Method] = {}
    for one in listed:
        made = _build_method(one, rate_of.get(one.name))
        if made.name in found:
            raise ArgumentError(f"methods: {one} is given twice")
        found[made.name] = made
    return list(found.values())


def parse_methods(names: Sequence[str] | str) -> list[Spec]:
    """Split the argument `names` of `methods` into specs with a name and options.

    Example:
        >>> [spec.name for spec in parse_methods("fedasync:rate=0.5,my_module:Signs:rate=0.1")]
        ['fedasync', 'my_module:Signs']
    """
    if isinstance(names, str):
        return parse_specs("methods", names, RULE_CLASSES)
    return [parse_spec("methods", name, RULE_CLASSES) for name in names]


@dataclass(frozen=True)
class _Template:
    """A federated method (a server rule and a client trainer) whose options are not applied yet.

    Attributes:
        label: the name of the method without options.
        make: the class of the rule, or a function that creates the rule.
        fields: the default arguments of `make`. For a rule object in a user's module, they are the fields of this
            object. Otherwise, they are empty.
        defaults: the default text of options of the rule and of the trainer.
        trainer: the trainer of a `Method` object in a user's module. Otherwise, it is `None`, and the option `trainer`
            or a default selects the trainer.
        rate_field: the option of the rule that is the global learning rate, or `None` if the rate is fixed.
    """

    label: str
    make: Callable[..., Any]
    fields: Mapping[str, Any]
    defaults: Mapping[str, str]
    trainer: Any = None
    rate_field: str | None = "rate"


def _template(name: str) -> _Template:
    if ":" not in name:
        made = RULE_CLASSES[choose("methods", "method", name, RULE_CLASSES)]
        return _Template(made.__name__, made, {}, RULES.get(name, {}), rate_field=RATE_FIELDS.get(name, "rate"))
    found = import_object(f"methods: {name}", name, "a method")
    label = name.partition(":")[2]
    if isinstance(found, Method):
        return _Template(found.name, *_remake(found.rule), {}, found.trainer, found.rate_field)
    if isinstance(found, type) or (callable(found) and not isinstance(found, Rule)):
        return _Template(label, found, {}, {})
    return _Template(label, *_remake(found), {})


def _remake(value: Any) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return a function and its keyword arguments that build an equal value."""
    if isinstance(value, Factory):
        return value.make, value.options
    return (type(value), field_values(value)) if is_dataclass(value) else (lambda: value, {})


def _merge(defaults: Mapping[str, str], options: Mapping[str, str]) -> dict[str, str]:
    """Merge options with defaults, but drop the defaults of an object that is replaced."""
    replaced = {name for name, text in options.items() if text != defaults.get(name)}
    return {name: text for name, text in defaults.items() if name.partition(".")[0] not in replaced} | dict(options)


def _subset(prefix: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options whose names start with a prefix and a dot, without the prefix."""
    return {name.removeprefix(f"{prefix}."): text for name, text in options.items() if name.startswith(f"{prefix}.")}


def _build_method(spec: Spec, global_rate: float | None = None) -> Method:
    where = f"methods: {spec.name}"
    template = _template(spec.name)
    accepted = inspect.signature(template.make).parameters
    rate = template.rate_field or ""
    options = dict(spec.options)
    if global_rate is not None:
        if rate.partition(".")[0] not in accepted:
            raise ArgumentError(f"rate: {spec.name} has no rate")
        options = {rate: repr(check_number("rate", global_rate, above=0)), **options}
    trainer_name = options.get("trainer") or _trainer_name(template, options)
    make_trainer, trainer_fields = _trainer_parts(where, trainer_name, template)
    given: dict[str, dict[str, str]] = {"rule": {}, "trainer": _subset("trainer", options)}
    known = ["trainer", *accepted, *inspect.signature(make_trainer).parameters]
    for option, text in options.items():
        head, _, tail = option.partition(".")
        if head != "trainer":
            owner = "rule" if choose(where, "option", head, dict.fromkeys(known)) in accepted else "trainer"
            given[owner][option] = text
        elif option != head and not tail:
            raise ArgumentError(f"{where}: expected an option of the trainer after the dot, got {option!r}")
    # A rule and its trainer must have the same embedding.
    if "embedding" in accepted and "embedding" in inspect.signature(make_trainer).parameters:
        shared = {name: text for name, text in given["rule"].items() if name.partition(".")[0] == "embedding"}
        given["trainer"] = shared | given["trainer"]
    base = dict(template.defaults)
    if "weighted" in base and given["rule"].get("weighted", base["weighted"]).lower() != base["weighted"]:
        # The tuned rate is valid for the tuned weighting only. Without weights, it would be N times too large.
        base.pop(rate, None)
    defaults = _merge(base, {**given["rule"], "trainer": trainer_name})
    rule_options = {name: text for name, text in defaults.items() if name.partition(".")[0] != "trainer"}
    fixed = any(f"{option}.".startswith(f"{rate}.") for option in given["rule"])
    if given["rule"].get(rate) == "cosine" and f"{rate}.start" not in options:
        # The schedule has no explicit start, so a search varies the start, from the default rate.
        before = _merge(base, {name: text for name, text in given["rule"].items() if name != rate}).get(rate)
        default = template.fields.get(rate, getattr(accepted.get(rate), "default", None)) if before is None else before
        start = parse_literal(str(default))
        rule_options[f"{rate}.start"] = repr(start if type(start) in (int, float) else 1.0)
        rate = f"{rate}.start"
        fixed = False
    if ":" in spec.name and "rate" in given["trainer"] and "rate" in options:
        # A user expects that `rate` is an option of the rule, not the learning rate of the clients.
        raise ArgumentError(
            f"{where}: the rule has no option 'rate'; for the rate of the clients, write trainer.rate=..."
        )
    rule = _build_per_clients(where, template.make, rule_options, template.fields)
    if isinstance(rule, Correction):
        raise ArgumentError(f"{where}: expected a rule, got a correction; write asynccorrected:correction={spec.name}")
    if isinstance(rule, nn.Module) or not (callable(rule) or isinstance(rule, Rule)):
        raise ArgumentError(
            f"{where}: expected a rule, a class or function that makes one, or a Method, got {short_repr(rule)}"
        )
    trainer_options = _merge(_merge(TRAINERS.get(trainer_name, {}), _subset("trainer", defaults)), given["trainer"])
    trainer: Trainer = build(
        where, make_trainer, trainer_options, option_readers=OPTION_READERS, defaults=trainer_fields
    )
    if not isinstance(trainer, Trainer):
        raise ArgumentError(
            f"{where}: trainer: expected a trainer, or a class or function that makes one, got {short_repr(trainer)}"
        )
    written = ", ".join(f"{option}={text}" for option, text in spec.options.items())
    label = f"{template.label}({written})" if written else template.label
    return Method(label, rule, trainer, None if fixed else rate or None)


def _trainer_name(template: _Template, options: Mapping[str, str]) -> str:
    """Return the name of the default trainer, which is empty for a user's own trainer."""
    if template.trainer is not None:
        return ""
    if "rule" in options:
        return RULES.get(options["rule"], {}).get("trainer", "local")
    return "calibrated" if options.get("protocol") == "client" else template.defaults.get("trainer", "local")


def _trainer_parts(where: str, name: str, template: _Template) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return a function that builds the trainer, and its arguments."""
    if not name:
        return _remake(template.trainer)
    if name.partition(":")[0] in TRAINERS or ":" not in name:
        return TRAINER_CLASSES[choose(where, "trainer", name, TRAINERS)], {}
    found = import_object(f"{where}: trainer", name, "a trainer")
    return (found, {}) if isinstance(found, type) or inspect.isroutine(found) else _remake(found)


def _build_per_clients(
    where: str, factory: Callable[..., Any], options: Mapping[str, str], defaults: Mapping[str, Any]
) -> Any:
    """Build a value, or return a `Factory` if an argument depends on the clients."""
    made = Factory(factory, parse_kwargs(where, factory, options, option_readers=OPTION_READERS, defaults=defaults))
    with error_context(where, TypeError, ValueError):
        tried = made(TRIAL_CLIENTS)
    return made if any(isinstance(value, PerClients) for value in made.options.values()) else tried


def _rule_reader(name: str) -> Reader:
    defaults = {option: text for option, text in RULES.get(name, {}).items() if option.partition(".")[0] != "trainer"}
    return lambda where, options: _build_per_clients(where, RULE_CLASSES[name], _merge(defaults, options), {})


def _trainer_reader(name: str) -> Reader:
    make = reader(TRAINER_CLASSES[name], option_readers=OPTION_READERS)
    return lambda where, options: make(where, _merge(TRAINERS[name], options))


def _optimizer_reader(make: Callable[..., Any]) -> Reader:
    def read(where: str, options: Mapping[str, str]) -> Any:
        bound = bind(where, make, options, ("params", "lr"))
        with error_context(where, TypeError, ValueError, RuntimeError):
            bound([nn.Parameter(torch.zeros(1))], lr=1e-3)
        return bound if options else make

    return read


def _user_optimizer(where: str, options: Mapping[str, str]) -> Any:
    given = dict(options)
    found = import_object(where, given.pop(MODULE_NAME), "an optimizer")
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ArgumentError(f"{where}: expected a class of optimizers, got {short_repr(found)}")
    return _optimizer_reader(found)(where, given)


def _read_shares(path: str) -> dict[int, float]:
    """Read a routing from a CSV file with the columns `client` and `share`."""
    with os_errors(f"path: {path} cannot be read", ArgumentError), open(path, newline="", encoding="utf-8-sig") as file:
        try:
            return {int(row["client"]): float(row["share"]) for row in csv.DictReader(file)}
        except (KeyError, TypeError, ValueError) as error:
            raise ArgumentError(f"path: {path}: expected numbers in the columns client and share: {error}") from None


def _readers(*factories: Any) -> dict[str, Reader]:
    return {made.__name__.lower(): reader(made) for made in factories}


def _simple_corrections() -> list[Any]:
    """Return the corrections that can be created without arguments."""
    found = []
    for made in (getattr(corrections, name) for name in corrections.__all__):
        result = made if isinstance(made, type) else getattr(made, "__annotations__", {}).get("return")
        if isinstance(result, type) and issubclass(result, Correction) and not inspect.isabstract(made):
            parameters = inspect.signature(made).parameters.values()
            if all(parameter.default is not parameter.empty for parameter in parameters):
                found.append(made)
    return found


OPTION_READERS: dict[str, Mapping[str, Reader]] = {}
"""The readers of the options whose values are objects, by the names of the values."""
_user = partial(user_reader, option_readers=OPTION_READERS)
_schedules = _readers(schedules.Cyclic, schedules.Cosine) | _user("a schedule", num_arguments=1)
_optimizers = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
OPTION_READERS |= {
    "rate": _schedules,
    "steps": _schedules,
    "staleness": _readers(*(getattr(staleness, name) for name in staleness.__all__))
    | _user("a function of the staleness", num_arguments=1),
    "correction": _readers(*_simple_corrections()) | _user("a correction", Correction),
    "clients": {"all": reader(NumClients)},
    "dominance": {
        "true": lambda where, options: _build_per_clients(where, rules.Dominance, options, {"clients": NumClients()})
    },
    "routing": {
        "uniform": reader(UniformShares),
        "file": reader(_read_shares),
        **_user("a mapping from clients to shares", Mapping),
    },
    "rule": {name: _rule_reader(name) for name in RULE_CLASSES} | _user("a rule", Rule),
    "optimizer": {made.__name__.lower(): _optimizer_reader(made) for made in _optimizers}
    | {MODULE_NAME: _user_optimizer},
    "sharpness": _readers(curves.SAM, curves.ASAM) | _user("a perturbation such as SAM"),
    "embedding": _readers(curves.Tunnel, curves.Simplex) | _user("an embedding", curves.Embedding),
    "proximal": _readers(trainers.LorentzProximal) | _user("a proximal term"),
    "local": {name: _trainer_reader(name) for name in ("local", "proximal", "trajectory")}
    | _user("a trainer", Trainer),
    "trainer": {name: _trainer_reader(name) for name in TRAINERS} | _user("a trainer", Trainer),
}
