"""Tests of named methods: every rule is a method, learns, and accepts its fields and those of its trainer."""

import functools
import inspect
import pickle
import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from manifoldagg import corrections, curves
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments.default_rates import methods_with_scaled_rates
from manifoldagg.experiments.registry import OPTION_READERS, RATE_FIELDS, RULES, TRAINERS, method, methods
from manifoldagg.experiments.spec_parser import MODULE_NAME
from manifoldagg.federated import Rule, Trainer, rules
from manifoldagg.federated import clients as trainers
from manifoldagg.federated.schedules import Cosine
from manifoldagg.federated.staleness import Constant, Hinge, Polynomial
from manifoldagg.manifolds import Sphere
from manifoldagg.simulation import FederatedDataset, Method, run
from tests.simulation import custom
from tests.simulation.test_run import clusters, dirichlet

LOCAL = trainers.Local(epochs=4, rate=0.01, proximal=1e-3)
CLIENTS = [0, 2, 3, 5, 7, 8, 9, 11, 12, 13]


def bound(text, clients=CLIENTS):
    return method(text).bind(clients)


def test_every_exported_rule_and_trainer_is_registered():
    """A new rule is a method once its module exports it. This test fails if the rule has no registered trainer."""
    exported = {name.lower(): getattr(rules, name) for name in rules.__all__}
    assert set(RULES) == {name for name, made in exported.items() if isinstance(made, type) and hasattr(made, "step")}
    assert set(exported) - set(RULES) == {"dominance"}
    able = {name.lower() for name in trainers.__all__ if hasattr(getattr(trainers, name), "train")}
    assert set(TRAINERS) == able
    assert {entry.get("trainer", "local") for entry in RULES.values()} <= able


@pytest.mark.parametrize("name", RULES)
def test_a_method_has_its_rule_and_its_default_trainer(name):
    made = bound(name)
    assert isinstance(made.rule, Rule)
    assert isinstance(made.trainer, Trainer)
    assert made.name == type(made.rule).__name__
    assert type(made.rule).__name__.lower() == name
    assert type(made.trainer).__name__.lower() == RULES[name].get("trainer", "local")
    assert pickle.loads(pickle.dumps(made.trainer)) == made.trainer
    assert method(name) == method(name)
    assert repr(method(name)) == repr(method(name))
    assert " at 0x" not in repr(method(name))


@pytest.mark.parametrize("name", RULES)
def test_every_method_learns_to_classify_clusters(name):
    """Six clients and thirty updates suffice to classify three clusters of points. The server rejects no update."""
    federation = FederatedDataset.split(clusters(), 6, partition=dirichlet(0.5), seed=0)
    # These rules need twice as many updates: their moments start at zero, or they combine two models, and the default
    # rates for the digits are low.
    slow = ("delayednesterov", "fadas", "heloco", "krum")
    ((scaled,), _) = methods_with_scaled_rates(name, clients=6)
    one = run(federation, scaled, num_updates=60 if name in slow else 30)
    assert one.rejected == 0
    assert max(one.accuracy) > max(0.6, one.accuracy[0] + 0.1)


@pytest.mark.parametrize("name", RULES)
def test_every_field_of_a_rule_is_an_option_of_its_method(name):
    """Passing the default value as text gives an equal rule. A field whose default is an object has named values."""
    for field in fields(type(bound(name).rule)):
        default = getattr(bound(name).rule, field.name)
        if type(default) in (int, float, bool, str, type(None)):
            word = "none" if default is None else str(default).lower() if isinstance(default, bool) else str(default)
            same = bound(f"{name}:{field.name}={word}")
            assert same.rule == bound(name).rule, field.name
            assert same.name == f"{bound(name).name}({field.name}={word})"
        else:
            assert field.name in OPTION_READERS, field.name


@pytest.mark.parametrize("name", TRAINERS)
def test_every_field_of_a_trainer_is_an_option_of_a_method(name):
    made = method(f"fedavg:trainer={name}").trainer
    for field in fields(type(made)):
        default = getattr(made, field.name)
        if type(default) in (int, float, bool, str, type(None), tuple):
            word = "+".join(map(str, default)) if isinstance(default, tuple) else str(default).lower()
            assert method(f"fedavg:trainer={name},trainer.{field.name}={word}").trainer == made, field.name
        else:
            assert field.name in OPTION_READERS, field.name


def test_options_are_assigned_to_the_rule_or_its_trainer():
    made = method("asyncbezier:threshold=auto,degree=3,epochs=2+1,rate=0.5,trainer.rate=0.002")
    assert (made.rule.threshold, made.rule.rate) == ("auto", 0.5)
    assert (made.trainer.degree, made.trainer.epochs, made.trainer.rate) == (3, (2, 1), 0.002)
    prox = method("fedavg:trainer=proximal,proximal=0.1,cohort=3,steps=7")
    assert prox.trainer == trainers.Proximal(epochs=4, rate=0.01, proximal=0.1, steps=7)
    assert prox.rule == rules.FedAvg(3)
    assert prox.name == "FedAvg(trainer=proximal, proximal=0.1, cohort=3, steps=7)"
    path = method("asyncbezier:trainer=trajectory,pull_back=none")
    assert isinstance(path.trainer, trainers.Trajectory)
    assert path.rule.pull_back == "none"


def test_options_accept_objects_by_name():
    for text, field, value in (
        ("fedasync:staleness=polynomial", "staleness", Polynomial()),
        ("fedasync:staleness=hinge,staleness.a=2,staleness.b=3", "staleness", Hinge(2, 3)),
        ("fedbuff:staleness.a=0.9", "staleness", Polynomial(0.9)),
        ("orthofl:staleness=constant", "staleness", Constant()),
        ("asgd:rate=cosine,rate.start=3,rate.end=0.1,rate.period=200", "rate", Cosine(3, 0.1, 200)),
        ("asynccorrected:correction=orthodyn,correction.upper=0.6", "correction", corrections.OrthoDyn(upper=0.6)),
        ("asynccurve:correction=tangent", "correction", corrections.Tangent()),
        ("fedgs:dominance=true", "dominance", rules.Dominance(10)),
        ("fedgs:dominance=true,dominance.smoothed=false", "dominance", rules.Dominance(10, smoothed=False)),
        ("fedgs:dominance=none", "dominance", None),
        ("momentum:rule=fedbuff,rule.size=3", "rule", rules.FedBuff(3)),
        ("momentum:rule.rate=0.5", "rule", rules.FedAsync(0.5, weighted=True)),
        ("asyncbezier:curve_weight=auto", "curve_weight", "auto"),
        ("masfl:initial=zero", "initial", "zero"),
    ):
        assert getattr(bound(text).rule, field) == value, text
    for text, field, value in (
        ("fedavg:optimizer=sgd", "optimizer", torch.optim.SGD),
        ("fedavg:sharpness=sam,sharpness.radius=0.1", "sharpness", curves.SAM(0.1)),
        ("asyncbezier:sharpness=asam", "sharpness", curves.ASAM()),
        ("asynccurve:proximal=lorentzproximal,proximal.weight=0.5", "proximal", trainers.LorentzProximal(0.5)),
        ("fedavg:proximal=lorentzproximal,proximal.weight=0.01", "proximal", trainers.LorentzProximal(0.01)),
        ("asyncfeded:local.rate=0.1", "local", trainers.Local(epochs=4, rate=0.1, proximal=1e-3)),
    ):
        assert getattr(bound(text).trainer, field) == value, text
    momentum = method("fedavg:optimizer=sgd,optimizer.momentum=0.9").trainer.optimizer
    assert isinstance(momentum, functools.partial)
    assert (momentum.func, momentum.keywords) == (torch.optim.SGD, {"momentum": 0.9})


def test_corrections_without_arguments_are_named():
    plain = {
        "tangent",
        "position",
        "orthodc",
        "orthocorrect",
        "orthodyn",
        "orthograd",
        "delaycompensated",
        "autothreshold",
    }
    assert plain <= set(OPTION_READERS["correction"])
    for name in OPTION_READERS["correction"].keys() - {MODULE_NAME}:
        assert isinstance(bound(f"asynccorrected:correction={name}").rule.correction, corrections.Correction), name


def test_bind_passes_the_clients_to_the_rule():
    assert bound("asynccurve").rule.clients == 10
    assert bound("asynccurve:clients=40").rule.clients == 40
    assert bound("masfl").rule.clients == bound("ca2fl").rule.clients == 10
    for text in ("generalizedasyncsgd", "generalizedasyncsgd:routing=uniform"):
        assert dict(bound(text).rule.routing) == dict.fromkeys(CLIENTS, 0.1)
    assert bound("momentum:rule=masfl").rule.rule.clients == 10
    assert isinstance(bound("momentum:rule=masfl").trainer, trainers.ControlVariate)


def test_the_client_protocol_of_orthofl_selects_the_calibrated_trainer():
    assert isinstance(method("orthofl").trainer, trainers.Local)
    assert isinstance(method("orthofl:protocol=client").trainer, trainers.Calibrated)


def test_a_routing_is_read_from_a_file(tmp_path):
    path = tmp_path / "routing.csv"
    path.write_text("client,group,share\n0,slow,0.25\n1,fast,0.75\n")
    made = bound(f"generalizedasyncsgd:routing=file,routing.path={path}", [0, 1])
    assert dict(made.rule.routing) == {0: 0.25, 1: 0.75}


def test_rate_sets_the_rate_of_the_server():
    for name in RULES:
        option = RATE_FIELDS.get(name, "rate")
        if option.partition(".")[0] not in inspect.signature(type(bound(name).rule)).parameters:
            assert name == "floco"
            continue
        rule = method(name, rate=0.125).bind(CLIENTS).rule
        assert functools.reduce(getattr, option.split("."), rule) == 0.125, name
    assert [m.rule.rate for m in methods("fedasync,fedgs:rate=3,fedortho", ["0.5", "fedortho=0.25"])] == [0.5, 3, 0.25]
    assert [m.rule.rate for m in methods("fedgs,fedgs:update_form=position", ["fedgs=0.25"])] == [0.25, 0.25]
    assert methods("floco,fedgs", ["fedgs=2"])[1].rule.rate == 2


def test_one_rule_is_listed_several_times_with_different_options():
    names = [m.name for m in methods("asyncbezier,asyncbezier:threshold=auto,degree=3,fedgs")]
    assert names == ["AsyncBezier", "AsyncBezier(threshold=auto, degree=3)", "FedGS"]
    assert [m.name for m in methods(["fedavg:cohort=3", "fedavg"])] == ["FedAvg(cohort=3)", "FedAvg"]


OWN = "tests.simulation.custom"


@pytest.mark.parametrize(
    ("text", "name", "rule", "trainer", "rate"),
    [
        ("Signs", "Signs", custom.Signs(), LOCAL, "rate"),
        ("Signs:", "Signs", custom.Signs(), LOCAL, "rate"),
        ("Signs:threshold=2", "Signs(threshold=2)", custom.Signs(threshold=2), LOCAL, "rate"),
        ("Signs:rate=0.2,epochs=1", "Signs(rate=0.2, epochs=1)", custom.Signs(0.2), replace(LOCAL, epochs=1), None),
        ("Signs:trainer=proximal", "Signs(trainer=proximal)", custom.Signs(), trainers.Proximal(epochs=4, rate=0.01), "rate"),
        ("slow:factor=0.5", "slow(factor=0.5)", custom.Signs(0.25), LOCAL, "rate"),
        ("signs:threshold=1", "signs(threshold=1)", custom.Signs(0.2, 1), LOCAL, "rate"),
        ("ready", "Ready", custom.Signs(0.4), trainers.Local(epochs=3), "rate"),
        ("ready:trainer.rate=2,threshold=1", "Ready(trainer.rate=2, threshold=1)", custom.Signs(0.4, 1), trainers.Local(epochs=3, rate=2), "rate"),
        ("bound:epochs=2", "Bound(epochs=2)", custom.Signs(0.1), trainers.Local(epochs=2), "rate"),
    ],
)  # fmt: skip
def test_a_user_rule_is_selected_by_module_and_name(text, name, rule, trainer, rate):
    assert bound(f"{OWN}:{text}") == Method(name, rule, trainer, rate)


def test_a_user_rule_need_not_be_a_dataclass():
    made = method(f"{OWN}:Plain:rate=0.3")
    assert isinstance(made.rule, custom.Plain)
    assert made.rule.rate == 0.3


def test_a_built_in_rule_selected_by_module_equals_the_named_method():
    for name in ("asyncbezier", "fedadam", "orthofl"):
        label = bound(name).name
        given = ",".join(f"{option}={text}" for option, text in RULES[name].items() if option != "trainer")
        assert bound(f"manifoldagg.federated.rules:{label}:{given}").rule == bound(name).rule


def test_user_rules_and_built_in_methods_are_listed_together():
    names = f"fedgs, {OWN}:Signs : rate=0.1 , threshold=2,{OWN}:slow,fedbuff:size=3"
    found = methods(names)
    assert [one.name for one in found] == ["FedGS", "Signs(rate=0.1, threshold=2)", "slow", "FedBuff(size=3)"]
    assert methods(["fedgs", f"{OWN}:Signs:rate=0.1,threshold=2", f"{OWN}:slow", "fedbuff:size=3"]) == found
    rated = methods(f"fedgs,{OWN}:Signs,{OWN}:ready", ["0.5", f"{OWN}:Signs=0.25"])
    assert [one.rule.rate for one in rated] == [0.5, 0.25, 0.5]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: method(f"{OWN}:Plan"), f"methods: {OWN}:Plan: expected a name that the module {OWN} defines, got 'Plan'; did you mean Plain?"),
        (lambda: method(f"{OWN}:number"), f"methods: {OWN}:number: expected a rule, a class or function that makes one, or a Method, got 3"),
        (lambda: method(f"{OWN}:module"), f"methods: {OWN}:module: expected a rule, a class or function that makes one, or a Method, got Linear"),
        (lambda: method(f"{OWN}:Signs:rat=1"), f"methods: {OWN}:Signs: no option 'rat'; did you mean rate?"),
        (lambda: method(f"{OWN}:Signs:rate=2"), f"methods: {OWN}:Signs: too fast"),
        (lambda: method(f"{OWN}:Signs:rate=1,rate=2"), f"methods: {OWN}:Signs: rate is given twice"),
        (lambda: method(f"{OWN}:Signs:trainer=locl"), f"methods: {OWN}:Signs: no trainer 'locl'; did you mean local?"),
        (lambda: method(f"{OWN}:bound:rate=2"), f"methods: {OWN}:bound: the rule has no option 'rate'; for the rate of the clients, write trainer.rate=..."),
        (lambda: method(f"{OWN}:Shrink"), f"methods: {OWN}:Shrink: expected a rule, got a correction; write asynccorrected:correction={OWN}:Shrink"),
        (lambda: method("nowhere:Signs"), "methods: nowhere:Signs: expected a method or an importable module, got 'nowhere'"),
        (lambda: method("./own:Signs"), "methods: ./own:Signs: expected a method or an importable module, got './own'"),
        (lambda: method("fedbuff:5"), "methods: fedbuff: no option ''"),
        (lambda: methods(f"{OWN}:Signs,{OWN}:Signs"), f"methods: {OWN}:Signs is given twice"),
        (lambda: methods([f"{OWN}:bound"], [f"{OWN}:bound=1"]), f"rate: {OWN}:bound has no rate"),
        (lambda: method("fedasink"), "methods: no method 'fedasink'; did you mean fedasync?"),
        (lambda: method("sgd"), "methods: no method 'sgd'; did you mean asgd?"),
        (lambda: method("xyz"), "methods: no method 'xyz'; there are ace, asgd, "),
        (lambda: method("dominance:clients=3"), "methods: no method 'dominance'; "),
        (lambda: method("asyncbezier:treshold=1"), "methods: asyncbezier: no option 'treshold'; did you mean threshold?"),
        (lambda: method("asyncbezier:threshold=2"), "methods: asyncbezier: threshold: expected a finite number >= -1 and <= 1, got 2"),
        (lambda: method("asyncbezier:trainer=trajectry"), "methods: asyncbezier: no trainer 'trajectry'; did you mean trajectory?"),
        (lambda: method("asyncbezier:trainer.degre=2"), "methods: asyncbezier: no option 'degre'; did you mean degree?"),
        (lambda: method("fedasync:staleness=hing"), "methods: fedasync: no staleness 'hing'; did you mean hinge?"),
        (lambda: method("fedasync:staleness=hinge,staleness.c=1"), "methods: fedasync: staleness: no option 'c'; there are a, b"),
        (lambda: method("momentum:rule=fedbuf"), "methods: momentum: no rule 'fedbuf'; did you mean fedbuff?"),
        (lambda: method("momentum:rule=fedbuff,rule.sise=1"), "methods: momentum: rule: no option 'sise'; did you mean size?"),
        (lambda: method("fedavg:optimizer=adm"), "methods: fedavg: no optimizer 'adm'; did you mean adam?"),
        (lambda: method("fedavg:cohort=0"), "methods: fedavg: cohort: expected an integer >= 1, got 0"),
        (lambda: method("masfl:size=0"), "methods: masfl: size: expected an integer >= 1, got 0"),
        (lambda: method("generalizedasyncsgd:routing=file,routing.path=no.csv"), "methods: generalizedasyncsgd: routing: path: no.csv cannot be read: "),
        (lambda: method(f"asynccorrected:correction={OWN}:number"), "methods: asynccorrected: correction: expected a correction, or a class or function that makes one, got 3"),
        (lambda: method(f"asynccorrected:correction={OWN}:Plain"), "methods: asynccorrected: correction: expected a correction, or a class or function that makes one, got a Plain"),
        (lambda: method(f"asynccorrected:correction={OWN}:Shrin"), f"methods: asynccorrected: correction: expected a name that the module {OWN} defines, got 'Shrin'; did you mean shrink?"),
        (lambda: method(f"asynccorrected:correction={OWN}:Shrink,correction.strenth=2"), "methods: asynccorrected: correction: no option 'strenth'; did you mean strength?"),
        (lambda: method(f"asynccorrected:correction={OWN}:Shrink,correction.strength=0"), "methods: asynccorrected: correction: strength: expected a number > 0, got 0"),
        (lambda: method("asynccorrected:correction=nowhere:Mine"), "methods: asynccorrected: correction: expected a correction or an importable module, got 'nowhere'"),
        (lambda: method("asynccorrected:correction=orthodi:Mine"), "methods: asynccorrected: no correction 'orthodi'; did you mean orthodc?"),
        (lambda: method(f"fedasync:trainer={OWN}:Shrink"), "methods: fedasync: trainer: expected a trainer, or a class or function that makes one, got Shrink("),
        (lambda: method(f"fedasync:optimizer={OWN}:number"), "methods: fedasync: optimizer: expected a class of optimizers, got 3"),
        (lambda: method("fedgs,fedasync"), "methods: expected one name with its options, got a second one: fedasync"),
        (lambda: method("fedgs", rate=-1), "rate: expected a finite number > 0, got -1"),
        (lambda: methods([]), "methods: expected some of ace, asgd, "),
        (lambda: methods(""), "methods: expected a name, got ''"),
        (lambda: methods("fedgs,fedgs"), "methods: fedgs is given twice"),
        (lambda: methods(["fedgs"], ["fast"]), "rate: expected a number or METHOD=NUMBER, got 'fast'"),
        (lambda: methods(["fedgs"], ["-1"]), "rate: expected a finite number > 0, got -1.0"),
        (lambda: methods(["fedgs"], ["fedasync=1"]), "rate: no method 'fedasync'; did you mean fedgs?"),
        (lambda: methods(["floco"], ["floco=1"]), "rate: floco has no rate"),
    ],
)  # fmt: skip
def test_invalid_methods_are_rejected_with_a_message_of_one_line(call, words):
    with pytest.raises(ArgumentError) as caught:
        call()
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("correction={}:Shrink", custom.Shrink()),
        ("correction={}:Shrink,correction.strength=2", custom.Shrink(2)),
        ("correction={}:make_shrink,correction.twice=true", custom.Shrink(2.0)),
        ("correction={}:shrink", custom.shrink),
        ("correction={}:shrink,correction.drift=0.5", custom.Shrink(3.0, 0.5)),
        ("correction.strength=2,correction={}:Shrink", custom.Shrink(2)),
        ("correction=orthodc:0.5", corrections.OrthoDC(0.5)),
    ],
)
def test_a_user_correction_is_selected_by_module_and_name(option, value):
    made = method(f"asynccorrected:{option.format(OWN)}")
    assert made.rule == rules.AsyncCorrected(rate=3.0, correction=value)
    # The options in the name identify the method in tables, in results and when a comparison resumes.
    assert made.name == f"AsyncCorrected({option.format(OWN).replace(',', ', ')})"
    assert pickle.loads(pickle.dumps(made)).rule == made.rule


def test_every_object_option_accepts_a_module_and_a_name():
    assert method(f"fedasync:staleness={OWN}:age").rule.staleness is custom.age
    bound_age = method(f"fedasync:staleness={OWN}:age,staleness.power=1").rule.staleness
    assert bound_age(3) == 0.25
    assert method(f"fedasync:rate={OWN}:age").rule.rate is custom.age
    assert method(f"fedasync:trainer={OWN}:Fixed,trainer.rate=0.5").trainer == custom.Fixed(rate=0.5)
    assert method(f"momentum:rule={OWN}:Signs,rule.rate=0.2").rule.rule == custom.Signs(0.2)
    assert method(f"fedasync:optimizer={OWN}:SlowSGD").trainer.optimizer is custom.SlowSGD
    made = method(f"fedasync:optimizer={OWN}:SlowSGD,optimizer.momentum=0.5").trainer.optimizer
    assert (made.func, made.keywords) == (custom.SlowSGD, {"momentum": 0.5})
    both = methods(f"asynccorrected:correction={OWN}:Shrink,correction.strength=2,{OWN}:Signs:rate=0.2")
    assert [one.rule for one in both] == [
        rules.AsyncCorrected(rate=3.0, correction=custom.Shrink(2)),
        custom.Signs(0.2),
    ]


def page(name):
    return (Path(__file__).parents[2] / "docs" / "guide" / name).read_text()


def plain(entry):
    """Format the options of an entry that do not depend on the clients."""
    return ", ".join(
        f"`{name}={text}`" for name, text in entry.items() if name not in ("trainer", "clients", "routing")
    )


def test_experiments_page_lists_every_method_with_its_options():
    rows = [line for line in page("experiments.md").splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    listed = {row[0].strip("`"): (row[1].strip("`"), row[2]) for row in cells if row[0].strip("`") in RULES}
    assert listed == {name: (entry.get("trainer", "local"), plain(entry)) for name, entry in RULES.items()}


def rejects_curved_leaves(rule):
    try:
        rule.init(Sphere(3), torch.eye(3)[0])
    except ArgumentError as error:
        return "flat" in str(error)
    return False


def test_rules_page_lists_the_rules_that_reject_curved_leaves():
    text = " ".join(page("rules.md").split())
    pattern = r"reject curved parameters with an error that names the parameter\. These rules are (.*?)\. (.*?)\. "
    whole, options = re.search(pattern, text + " ").groups()
    listed = {name.lower().removeprefix("rules.") for name in re.findall(r"`([\w.]+)`", whole)}
    assert listed == {name for name in RULES if rejects_curved_leaves(bound(name).rule)}
    assert '`threshold="auto"`' in options
    assert rejects_curved_leaves(bound("asyncbezier:threshold=auto").rule)
    assert '`overshoot="extend"`' in options
    assert rejects_curved_leaves(bound("asyncbezier:overshoot=extend").rule)


def test_rules_page_names_periodic_as_an_option_that_is_off_by_default():
    (row,) = [line for line in page("rules.md").splitlines() if line.startswith("| [`rules.AsyncCurve")]
    assert "`periodic=" in row
    assert bound("asynccurve").rule.periodic is None


def test_the_tuned_rate_applies_to_the_tuned_weighting_only():
    assert method("fedasync").rule == method("fedasync:weighted=True").rule == rules.FedAsync(3.0, weighted=True)
    assert method("fedasync:weighted=False").rule == rules.FedAsync()
    assert method("fedasync:weighted=False,rate=0.5").rule == rules.FedAsync(0.5)
    falling = method("fedasync:weighted=false,rate=cosine,rate.end=0,rate.period=9").rule.rate
    assert falling.start == rules.FedAsync().rate


def test_a_non_default_object_discards_the_options_of_the_default_object():
    assert method("asynckrylov").trainer == method("asynckrylov:trainer=trajectory").trainer
    assert method("asynckrylov").trainer.pieces == 8
    assert method("asynckrylov:trainer=trajectory,trainer.pieces=4").trainer.pieces == 4
    assert isinstance(method("asynckrylov:trainer=local").trainer, trainers.Local)
    assert method("momentum:rule=fedgs").rule.rule.rate == 2.5
    assert method("momentum:rule.rate=cosine,rule.rate.end=0,rule.rate.period=3").rule.rule.rate.start == 0.5
