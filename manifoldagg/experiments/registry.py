"""The methods that can be compared by name: every rule, with the trainer that feeds it and options for the digits."""

import abc
import csv
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manifoldagg import corrections, curves
from manifoldagg._validation import check_number
from manifoldagg.corrections import Correction
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Rule, Trainer, rules, schedules, staleness
from manifoldagg.federated import clients as trainers
from manifoldagg.simulation.run import Method
from manifoldagg.simulation.spec_parser import (
    Kinds,
    Named,
    Reader,
    arguments,
    blamed,
    build,
    imported,
    kind,
    named,
    pick,
    split,
)

__all__ = ["RULES", "TRAINERS", "Entry", "method", "methods"]

MANY = range(10_000)
"""Clients that a rule is tried with, before it is known who takes part."""


class ForClients(abc.ABC):
    """What follows from who takes part."""

    @abc.abstractmethod
    def __call__(self, clients: Sequence[int]) -> Any:
        """It, for these clients."""


@dataclass(frozen=True)
class HowMany(ForClients):
    """How many take part."""

    def __call__(self, clients: Sequence[int]) -> int:
        return len(clients)


@dataclass(frozen=True)
class Evenly(ForClients):
    """The same share for each."""

    def __call__(self, clients: Sequence[int]) -> dict[int, float]:
        return dict.fromkeys(clients, 1 / len(clients))


@dataclass(frozen=True)
class Recipe(ForClients):
    """What `make` makes of options, some of which follow from who takes part."""

    make: Callable[..., Any]
    options: Mapping[str, Any]

    def __call__(self, clients: Sequence[int]) -> Any:
        ready = {
            name: value(clients) if isinstance(value, ForClients) else value for name, value in self.options.items()
        }
        return self.make(**ready)


@dataclass(frozen=True)
class Entry:
    """What a rule has where nothing is said: the name of its trainer, options of its own, and of that trainer."""

    trainer: str
    options: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Base:
    """What the name of a method stands for.

    Attributes:
        label: what it is called without options.
        rule: how it is made.
        trainer: likewise.
        rate: what the global rate is called; `None` where it is to stay as it is.
    """

    label: str
    rule: Recipe
    trainer: Recipe
    rate: str | None


LOCAL: Mapping[str, Any] = {"epochs": 4, "rate": 0.01, "proximal": 1e-3}
TRAINERS: Mapping[str, Mapping[str, Any]] = {
    "local": LOCAL,
    "proximal": {"epochs": 4, "rate": 0.01},
    "trajectory": LOCAL,
    "epochs": {"local": trainers.Local(**LOCAL)},
    "calibrated": {"trainer": trainers.Local(**LOCAL)},
    "curve": {"epochs": (4, 2), "rate": 0.01, "control_rate": 1e-3, "proximal": 1e-3},
    "gradient": {},
    "controlvariate": {"epochs": 4, "rate": 0.05},
    "normalised": {},
    "asynccurve": {"epochs": 4, "rate": 0.01},
    "floco": {"epochs": 4, "optimizer": torch.optim.Adam, "rate": 0.01},
    "scheduled": {"trainer": trainers.Local(**LOCAL)},
}
"""What clients do on the digits."""

RULES: Mapping[str, Entry] = {
    "asgd": Entry("local", {"rate": 3.0}),
    "ca2fl": Entry("local", {"size": 5, "rate": 0.5, "clients": HowMany()}),
    "dcasgd": Entry("local", {"rate": 3.0}),
    "fadas": Entry("local", {"size": 2, "rate": 0.0025}),
    "floco": Entry("floco", {"cohort": 5}),
    "adamasfl": Entry("normalised", {"size": 2, "steps": 30, "server_steps": 100, "initial": "zero"}),
    "asyncbezier": Entry("curve", {"rate": 3.0, "threshold": 1.0}),
    "asynccorrected": Entry("local", {"rate": 3.0}),
    "asynckrylov": Entry("trajectory", {"rate": 6.0}, {"pieces": 8}),
    "asynccurve": Entry("asynccurve", {"clients": HowMany(), "rate": 0.075}),
    "asyncfeded": Entry("epochs", {"rate": 0.25, "epochs": 4}),
    "defedavg": Entry("local", {"cohort": 5, "rate": 0.5}),
    "delayednesterov": Entry("local", {"size": 4, "rate": 0.025}),
    "fedadam": Entry("local", {"cohort": 5, "rate": 0.015}),
    "fedasync": Entry("local", {"rate": 3.0, "weighted": True}),
    "fedavg": Entry("local", {"cohort": 5}),
    "fedbuff": Entry("local", {"size": 5}),
    "fedgs": Entry("local", {"rate": 2.5}),
    "fedortho": Entry("local", {"rate": 5.0}),
    "generalizedasyncsgd": Entry("gradient", {"routing": Evenly(), "rate": 0.05}),
    "heloco": Entry("local", {"rate": 0.03}),
    "krum": Entry("local", {"size": 5, "num_byzantine": 1, "num_selected": 2, "rate": 0.5}),
    "masfl": Entry("controlvariate", {"size": 1, "rate": 0.05, "beta": 0.2, "clients": HowMany(), "initial": "zero"}),
    "median": Entry("local", {"size": 5}),
    "momentum": Entry("local", {"rule": rules.FedAsync(0.5, weighted=True)}),
    "orthofl": Entry("local", {"rate": 0.6}),
    "private": Entry("local", {"rule": rules.FedBuff(5), "clip": 3.0, "noise": 0.02, "seed": 0}),
    "radialdirectional": Entry("local", {"cohort": 5, "rate": 0.5}),
    "trimmedmean": Entry("local", {"size": 5, "trim": 1}),
}
"""What each rule has on the digits, with thirty clients and two hundred updates.

Rates are the best of a line search, `benchmarks/rates.py`, on seeds that no comparison uses; those of `asynckrylov`,
`delayednesterov`, `fadas`, `generalizedasyncsgd`, `krum` and `masfl` are of the searches in `benchmarks/papers`. But
those of `adamasfl`, `asyncfeded`, `heloco` and `radialdirectional` were looked at once, on one such seed; those of
`median` and `trimmedmean` are 1, as that of `fedbuff`; that of `orthofl` is a share of the way, .6 as in the paper,
where the search went on to 1.2.
"""
RATE: Mapping[str, str] = {"momentum": "rule.rate", "private": "rule.rate", "adamasfl": "gamma"}
"""What a global rate is called where it is not `rate`."""


def method(text: str, rate: float | None = None) -> Method:
    """The method of that name, with its options: fields of the rule or of its trainer.

    An option of both is the rule's; `trainer.rate` is the trainer's. `trainer=` chooses another. Options whose values
    are objects take their names in lower case, and theirs with a dot: `staleness=hinge,staleness.a=5`,
    `rate=cosine,rate.start=3`, `correction=orthodyn`, `optimizer=sgd,optimizer.momentum=0.9`, `sharpness=sam`,
    `dominance=true`, `routing=uniform`, `rule=fedbuff` of momentum.

    `module:name` is a rule in a Python module of your own, a class or a function that makes one, or a
    [`Method`][manifoldagg.simulation.Method]; its options come after another colon. Where nothing else is said, its
    trainer is that of `fedasync`.

    Args:
        text: such as `"fedortho"`, `"asyncbezier:threshold=auto,degree=3"` or `"my_module:Signs:rate=0.1"`.
        rate: the global rate, where `text` has none.

    Raises:
        ArgumentError: naming what is not known, with the nearest right word, or what does not fit.

    Example:
        >>> method("fedortho", rate=3.0).rule.rate
        3.0
        >>> chosen = method("asyncbezier:trainer=trajectory,pull_back=none,degree=3")
        >>> chosen.name, chosen.rule.pull_back, chosen.trainer.degree
        ('AsyncBezier(trainer=trajectory, pull_back=none, degree=3)', 'none', 3)
        >>> method("manifoldagg.federated.rules:FedAsync:rate=0.5").name
        'FedAsync(rate=0.5)'
    """
    chosen = _with_module(named("methods", text))
    given = {} if rate is None else {_rate(chosen): repr(check_number("rate", rate, above=0))}
    return _method(chosen, {**given, **chosen.options})


def methods(names: Sequence[str] | str, rates: Sequence[str] = ()) -> list[Method]:
    """The methods of these names; each of `rates` is `"0.5"`, for all, or `"fedasync=0.5"`, for one.

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
    given = split("methods", names) if isinstance(names, str) else [named("methods", name) for name in names]
    listed = list(map(_with_module, given))
    if not listed:
        raise ArgumentError(f"methods: expected some of {', '.join(_classes())}; got none")
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
            pick("rate", "method", name, [one.name for one in listed])
        for one, own in zip(listed, chosen, strict=True):
            if one.name == name or not equals:
                own["rate"] = rate
    for one, own in zip(listed, chosen, strict=True):
        made = method(str(one), own.get("rate"))
        if made.name in found:
            raise ArgumentError(f"methods: {one} is given twice")
        found[made.name] = made
    return list(found.values())


def _classes() -> dict[str, Any]:
    """The rules that there are, by name."""
    found = {name.lower(): getattr(rules, name) for name in rules.__all__}
    return {name: made for name, made in found.items() if hasattr(made, "step")}


def _entry(name: str) -> Entry:
    """What a rule has where nothing is said; one that nobody has tried on the digits, plain local training."""
    return RULES.get(name, Entry("local"))


def _trainers() -> dict[str, Any]:
    """The trainers that there are, by name."""
    found = {name.lower(): getattr(trainers, name) for name in trainers.__all__}
    return {name: made for name, made in found.items() if hasattr(made, "train")}


def _with_module(chosen: Named) -> Named:
    """With the whole of `module:name` as the name, and what comes after another colon as the options."""
    if chosen.name in _classes() or not chosen.options:
        return chosen
    (option, text), *others = chosen.options.items()
    name, colon, rest = map(str.strip, (option or text).partition(":"))
    if option and not colon:
        return chosen
    whole = f"{chosen.name}:{name}"
    first = {rest: text} if option else {"": rest} if rest else {}
    if twice := first.keys() & dict(others):
        raise ArgumentError(f"methods: {whole}: {twice.pop()} is given twice")
    return Named(whole, first | dict(others))


def _base(name: str, options: Mapping[str, str]) -> Base:
    """What a name stands for; its trainer is among the options, or follows from them."""
    if ":" in name:
        return _own(name, options)
    made = _classes()[pick("methods", "method", name, _classes())]
    entry = _entry(name)
    trainer = options.get("trainer", _trainer(name, options))
    training = _training(f"methods: {name}", trainer, entry.training if trainer == entry.trainer else {})
    return Base(made.__name__, Recipe(made, entry.options), training, RATE.get(name, "rate"))


def _own(name: str, options: Mapping[str, str]) -> Base:
    """What is meant by `module:name`: a class or a function, which make a rule, a rule, or a method."""
    where = f"methods: {name}"
    module, _, own = name.partition(":")
    found = imported(where, module, own, "a method")
    training = _training(where, options.get("trainer", "local"))
    if isinstance(found, Method):
        training = training if "trainer" in options else _again(found.trainer)
        return Base(found.name, _again(found.rule), training, found.rate)
    if isinstance(found, type) or (callable(found) and not isinstance(found, Rule)):
        return Base(own, Recipe(found, {}), training, "rate")
    return Base(own, _again(found), training, "rate")


def _again(value: Any) -> Recipe:
    """How a value is made once more, with other options if it is a dataclass."""
    if isinstance(value, Recipe):
        return value
    if not is_dataclass(value):
        return Recipe(lambda: value, {})
    return Recipe(type(value), {one.name: getattr(value, one.name) for one in fields(value) if one.init})


def _training(where: str, name: str, training: Mapping[str, Any] | None = None) -> Recipe:
    """How the trainer of a name is made."""
    pick(where, "trainer", name, TRAINERS)
    return Recipe(_trainers()[name], {**TRAINERS[name], **(training or {})})


def _method(chosen: Named, options: Mapping[str, str]) -> Method:
    base = _base(chosen.name, options)
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
        elif pick(where, "option", head, ["trainer", *mine, *theirs]) in mine:
            parts["rule"][option] = text
        else:
            parts["trainer"][option] = text
    given = ", ".join(f"{option}={text}" for option, text in chosen.options.items())
    label = f"{base.label}({given})" if given else base.label
    rate = base.rate or ""
    if parts["rule"].get(rate) == "cosine" and f"{rate}.start" not in parts["rule"]:
        # A shape without a height: that is what a search is for, from where the rule's own rate is.
        before = base.rule.options.get(rate, mine[rate].default if rate in mine else None)
        parts["rule"][f"{rate}.start"] = repr(before if type(before) in (int, float) else 1.0)
        rate = f"{rate}.start"
        by_hand = False
    else:
        by_hand = any(f"{option}.".startswith(f"{rate}.") for option in parts["rule"])
    rule = _for_clients(where, base.rule.make, parts["rule"], base.rule.options)
    if not (callable(rule) or isinstance(rule, Rule)):
        raise ArgumentError(f"{where}: expected a rule, what makes one, or a Method; got {type(rule).__name__}")
    trainer: Trainer = build(where, base.trainer.make, parts["trainer"], kinds=KINDS, defaults=base.trainer.options)
    return Method(label, rule, trainer, None if by_hand else rate or None)


def _trainer(name: str, options: Mapping[str, str]) -> str:
    """The name of the trainer that a rule has where none is named."""
    if "rule" in options:
        return _trainer(pick(f"methods: {name}", "rule", options["rule"], _classes()), {})
    return "calibrated" if options.get("protocol") == "client" else _entry(name).trainer


def _rate(chosen: Named) -> str:
    """The option that is a method's global rate.

    Raises:
        ArgumentError: if it has none.
    """
    base = _base(chosen.name, chosen.options)
    if base.rate is None or base.rate.partition(".")[0] not in inspect.signature(base.rule.make).parameters:
        raise ArgumentError(f"rate: {chosen.name} has none")
    return base.rate


def _rule(name: str, where: str, options: Mapping[str, str]) -> Any:
    """A rule, or how it is made for the clients."""
    return _for_clients(where, _classes()[name], options, _entry(name).options)


def _made_trainer(name: str, where: str, options: Mapping[str, str]) -> Trainer:
    made: Trainer = build(where, _trainers()[name], options, kinds=KINDS, defaults=TRAINERS[name])
    return made


def _for_clients(where: str, make: Callable[..., Any], options: Mapping[str, str], defaults: Mapping[str, Any]) -> Any:
    """What `make` makes, or a recipe where that takes the clients; a recipe is tried."""
    recipe = Recipe(make, arguments(where, make, options, kinds=KINDS, defaults=defaults))
    with blamed(where, TypeError, ValueError):
        tried = recipe(MANY)
    return recipe if any(isinstance(value, ForClients) for value in recipe.options.values()) else tried


def _dominance(where: str, options: Mapping[str, str]) -> Any:
    return _for_clients(where, rules.Dominance, options, {"clients": HowMany()})


def _optimizer(make: Callable[..., Any], where: str, options: Mapping[str, str]) -> Any:
    given = arguments(where, make, options, taken=("params", "lr"))
    try:
        make([nn.Parameter(torch.zeros(1))], lr=1e-3, **given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"{where}: {error}") from error
    return partial(make, **given) if given else make


def _shares(path: str) -> dict[int, float]:
    """The routing of a CSV file with the columns `client` and `share`, as `manifoldagg route` writes it."""
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            return {int(row["client"]): float(row["share"]) for row in csv.DictReader(file)}
    except OSError as error:
        raise ArgumentError(f"path: {path} cannot be read: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"path: {path}: expected numbers in the columns client and share: {error}") from None


def _readers(found: Mapping[str, Any]) -> dict[str, Reader]:
    return {name.lower(): kind(make) for name, make in found.items()}


def _corrections() -> dict[str, Any]:
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


KINDS: Kinds = {
    **dict.fromkeys(("rate", "steps"), _readers({"Cyclic": schedules.Cyclic, "Cosine": schedules.Cosine})),
    "staleness": _readers({name: getattr(staleness, name) for name in staleness.__all__}),
    "correction": _readers(_corrections()),
    "dominance": {"true": _dominance},
    "routing": {"uniform": lambda where, options: build(where, Evenly, options), "file": kind(_shares)},
    "rule": {name: partial(_rule, name) for name in _classes()},
    "optimizer": {
        name: partial(_optimizer, make)
        for name, make in (
            ("sgd", torch.optim.SGD),
            ("adam", torch.optim.Adam),
            ("adamw", torch.optim.AdamW),
            ("rmsprop", torch.optim.RMSprop),
            ("adagrad", torch.optim.Adagrad),
        )
    },
    "sharpness": _readers({"SAM": curves.SAM, "ASAM": curves.ASAM}),
    "proximal": _readers({"LorentzProximal": trainers.LorentzProximal}),
    "local": {name: partial(_made_trainer, name) for name in ("local", "proximal", "trajectory")},
    "trainer": {name: partial(_made_trainer, name) for name in TRAINERS},
}
"""What the names mean that some options have."""
