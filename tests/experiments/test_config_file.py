"""Tests of configuration files: each table of a file is equivalent to a command line."""

import json
import sys
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.cli._config_file import parse_table, read_tables
from manifoldagg.cli.app import app
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.experiments.registry import RULES, methods

ROOT = Path(__file__).parent.parent.parent
COMMAND = typer.main.get_command(app).get_command(None, "compare")
OPTIONS = {
    option.opts[0].removeprefix("--"): option
    for option in COMMAND.params
    if option.name not in ("config", "only", "name")
}
VALUES = {
    int: st.integers(-9, 9),
    float: st.floats(-9, 9) | st.integers(-9, 9),
    bool: st.booleans(),
    Path: st.sampled_from(["runs", "/tmp/a b", "-x"]),
    str: st.sampled_from(["digits", "a:b=1,c=-2", "--x", "", "é \"'#"]),
}


def kind(option):
    """Return the type of one value: `str` for `str`, `str | None` and `list[str] | None`."""
    found = get_type_hints(COMMAND.callback)[option.name]
    while parts := [part for part in get_args(found) if part is not NoneType]:
        found = parts[0]
    return found


def values(name):
    """Return a strategy for the TOML values of an option."""
    option = OPTIONS[name]
    single = VALUES[kind(option)]
    if option.multiple:
        one = single | st.floats(0.1, 9)
        return one | st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(["fedgs", "fedavg"]), one)
    words = st.lists(single, min_size=1, max_size=3)
    return single | words if kind(option) is str else single


TABLES = st.fixed_dictionaries({}, optional={name: values(name) for name in OPTIONS})


def toml(value):
    """Format a value as TOML."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {toml(one)}" for name, one in value.items()) + "}"
    return json.dumps(value)


def written(path, **tables):
    """Write a TOML file with these tables."""
    lines = [
        f"[{name}]\n" + "".join(f"{key} = {toml(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def typed(table):
    """Yield the command-line words that are equivalent to a table."""
    for name, value in table.items():
        if kind(OPTIONS[name]) is bool:
            yield from [f"--{name}"] * value
        elif OPTIONS[name].multiple:
            listed = value if isinstance(value, list) else [value]
            if isinstance(value, dict):
                listed = [f"{method}={number}" for method, number in value.items()]
            yield from (word for one in listed for word in (f"--{name}", str(one)))
        else:
            yield from (f"--{name}", ",".join(value) if isinstance(value, list) else str(value))


def parsed(words):
    return COMMAND.make_context("compare", list(words)).params


def tables(path, only=()):
    """Return the parsed options of each table."""
    return {name: parse_table(COMMAND, table) for name, table in read_tables(path, COMMAND, only).items()}


def plain(options):
    """Return options without the difference between a missing list and an empty one, or between a path and its text."""
    return {name: value or () if name == "rate" else str(value) for name, value in options.items()}


@given(TABLES, TABLES)
def test_a_table_is_parsed_like_its_command_line(tmp_path_factory, table, shared):
    path = tmp_path_factory.getbasetemp() / "drawn.toml"
    found = tables(written(path, defaults=shared, mine=table, other={}))
    assert list(found) == ["mine", "other"]
    assert plain(found["mine"]) == plain(parsed(typed(shared | table)))
    assert plain(found["other"]) == plain(parsed(typed(shared)))


def test_a_file_accepts_every_option_of_the_command():
    names = {option.opts[0].removeprefix("--") for option in COMMAND.params}
    assert names - OPTIONS.keys() == {"config", "only", "name"}
    assert {"tune-seeds", "json", "rate"} < set(OPTIONS)


def test_types_of_options_are_read_from_the_annotations(tmp_path):
    """The attribute `type` of an option does not exist in all versions of typer."""

    def callback(count: int, names: str | None = None, out: Path | None = None): ...

    options = [
        SimpleNamespace(name=name, opts=[f"--{name}"], multiple=False, is_flag=False)
        for name in ("count", "names", "out")
    ]
    command = SimpleNamespace(callback=callback, params=options)
    found = read_tables(written(tmp_path / "one.toml", a={"count": 3, "names": ["b", "c"], "out": "d"}), command)
    assert found == {"a": {"count": "3", "names": "b,c", "out": "d"}}
    with pytest.raises(ArgumentError, match="a: out: expected a word or a number"):
        read_tables(written(tmp_path / "two.toml", a={"out": ["d"]}), command)


@pytest.mark.parametrize(
    ("only", "names"),
    [((), ["a", "b", "c"]), (["b"], ["b"]), (["c", "a"], ["a", "c"]), (["c, a", "b"], ["a", "b", "c"])],
)
def test_only_selects_tables(only, names, tmp_path):
    path = written(tmp_path / "some.toml", a={}, b={}, c={})
    assert list(read_tables(path, COMMAND, only)) == names


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a table for each comparison, got a file without such tables"),
        ("[defaults]\nupdates = 3", "expected a table for each comparison, got a file without such tables"),
        ("updates = 3\n[a]", r"updates: expected a table; shared options belong in \[defaults\]"),
        ("[a]\nupdate = 3", "a: no option 'update'; did you mean updates?"),
        ("[defaults]\ntune_seeds = 3\n[a]", "defaults: no option 'tune_seeds'; did you mean tune-seeds?"),
        ("[a]\nname = 'b'", "a: no option 'name'"),
        ("[a]\nupdates = true", "a: updates: expected a word or a number, got True"),
        ("[a]\ntune = 1", "a: tune: expected true or false, got 1"),
        ("[a]\nmethods = []", r"a: methods: expected a word or a number, got \[\]"),
        ("[a]\nout = ['x']", r"a: out: expected a word or a number, got \['x'\]"),
        ("[a]\n[a.rate]\nfedgs = true", "a: rate: fedgs: expected a word or a number, got True"),
        ("[a]\nrate = [[1]]", r"a: rate: expected a word or a number, got \[1\]"),
        ("['a/b']", "expected names of folders, got 'a/b'"),
        ('["a\\u0000b"]', r"expected names of folders, got 'a\\x00b'"),
        ('["a\\nb"]', r"expected names of folders, got 'a\\nb'"),
        ("[a]\ndata = " + 5000 * "[" + 5000 * "]", "expected tables of options, got values nested too deep"),
        ("[a]\ndata = " + 5000 * "{a=" + "1" + 5000 * "}", "expected tables of options, got values nested too deep"),
        ("[a]\nupdates = x", "is not a TOML file: Invalid value .*line 2"),
        (b"[a]\ndata = '\xff'", "is not a TOML file: "),
        ("[a]\ndata = '\0'", "is not a TOML file: "),
        ("[a]\ndata = " + "[" * 100_000, "expected tables of options, got values nested too deep"),
    ],
)
def test_errors_in_a_file_name_the_file_and_the_table(text, words, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ArgumentError, match=f"^config: .*wrong.toml:? {words}"):
        read_tables(path, COMMAND)


def test_missing_files_and_tables_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match="^config: .*none.toml cannot be read: "):
        read_tables(tmp_path / "none.toml", COMMAND)
    path = written(tmp_path / "some.toml", mnist={}, digits={}, defaults={})
    with pytest.raises(ArgumentError, match="^only: .*some.toml: no comparison 'minst'; did you mean mnist"):
        read_tables(path, COMMAND, ["digits,minst"])
    with pytest.raises(ArgumentError, match="no comparison 'defaults'"):
        read_tables(path, COMMAND, ["defaults"])


@pytest.fixture
def call(monkeypatch, as_shipped):
    """A function that runs the command in this process."""
    monkeypatch.setattr(sys, "path", list(sys.path))

    def called(*words):
        return app(["compare", *map(str, words)], standalone_mode=False)

    return called


SMALL = {"clients": 4, "updates": 2, "seeds": 1, "partition": "iid", "eval-every": 2}


def settings(folder):
    return json.loads((folder / "results.json").read_text())["settings"]


def test_a_configuration_gives_the_settings_of_its_command_line(call, tmp_path, monkeypatch, capsys):
    papers = tmp_path / "papers"
    papers.mkdir()
    (papers / "gone.csv").write_text("time,client,kind\n0.1,3,leave\n")
    table = {"methods": ["fedasync", "fedgs:trainer.epochs=1"], "availability": "file:gone.csv"}
    path = written(
        papers / "papers.toml", defaults=SMALL, first=table | {"rate": {"fedasync": 2}}, second={"methods": "fedgs"}
    )
    monkeypatch.chdir(tmp_path)
    call("--config", "papers/papers.toml", "--updates", 3)
    said = capsys.readouterr().out
    assert (
        said.index("first (1 of 2)")
        < said.index(f"Written to {tmp_path / 'runs' / 'first'}:")
        < said.index("second (2 of 2)")
    )
    monkeypatch.chdir(papers)
    line = [*typed(SMALL | table), "--rate", "fedasync=2", "--updates", 3]
    call(*line, "--name", "typed")
    assert settings(papers / "runs" / "typed") == settings(tmp_path / "runs" / "first")
    assert settings(tmp_path / "runs" / "second")["num_updates"] == 3
    written(path, defaults=SMALL | {"out": "there"}, first={"methods": "fedgs"})
    call("--config", "papers.toml")
    assert settings(papers / "there" / "first")["num_updates"] == 2
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    call("--config", "papers/papers.toml", "--json", "--out", "here")
    out, errors = capsys.readouterr()
    assert json.loads(out)["settings"] == settings(tmp_path / "here" / "first") == settings(papers / "there" / "first")
    assert "first (1 of 1)" in errors


def test_user_rules_are_imported_from_the_folder_of_the_file_and_the_working_directory(call, tmp_path, monkeypatch):
    (tmp_path / "papers").mkdir()
    for name, folder in (("beside_it", "papers"), ("lies_here", ".")):
        (tmp_path / folder / f"{name}.py").write_text("from tests.simulation.custom import Signs\n")
    written(
        tmp_path / "papers" / "papers.toml",
        defaults=SMALL,
        one={"methods": ["fedgs", "beside_it:Signs:rate=0.2,threshold=2"]},
        two={"methods": "beside_it:Signs", "rate": "beside_it:Signs=0.5"},
    )
    monkeypatch.chdir(tmp_path)
    call("--config", "papers/papers.toml")
    (_, first), (second,) = (settings(tmp_path / "runs" / name)["methods"].values() for name in ("one", "two"))
    assert first["rule"] == "Signs(rate=0.2, threshold=2)"
    assert second["rule"] == "Signs(rate=0.5, threshold=0.0)"
    call("--config", "papers/papers.toml", "--only", "one", "--methods", "lies_here:Signs")
    assert list(settings(tmp_path / "runs" / "one")["methods"]) == ["Signs"]
    call(*typed(SMALL), "--methods", "lies_here:Signs:rate=0.3", "--name", "typed")
    assert list(settings(tmp_path / "runs" / "typed")["methods"]) == ["Signs(rate=0.3)"]


def test_paths_on_the_command_line_are_relative_to_the_working_directory(call, tmp_path, monkeypatch):
    """The folder of the configuration file contains files of the same names."""
    papers = tmp_path / "papers"
    papers.mkdir()
    for folder, time in ((tmp_path, 0.2), (papers, 0.1)):
        (folder / "gone.csv").write_text(f"time,client,kind\n{time},3,leave\n")
        labels = np.arange(60) % 3
        np.savez(folder / "mine.npz", inputs=np.eye(3, dtype=np.float32)[labels] * np.float32(time), labels=labels)
    (papers / "trace.csv").write_text("client,time\n")
    written(papers / "papers.toml", one=SMALL | {"methods": "fedgs", "availability": "file:gone.csv"})
    monkeypatch.chdir(tmp_path)
    line = [*typed(SMALL), "--methods", "fedgs", "--data", "npz:mine.npz", "--availability", "file:gone.csv"]
    call(*line, "--name", "typed")
    call("--config", "papers/papers.toml", *line)
    found, given = (settings(tmp_path / "runs" / name) for name in ("one", "typed"))
    assert (found["availability"], list(found["files"])) == ("file:../gone.csv", ["../gone.csv"])
    assert list(found["files"].values()) == list(given["files"].values())
    assert found["data"] == given["data"]
    call("--config", "papers/papers.toml", "--data", "npz:mine.npz")
    mixed = settings(tmp_path / "runs" / "one")
    assert mixed["data"] == given["data"]
    assert mixed["files"] != given["files"]
    with pytest.raises(ManifoldAggError, match="scheduler: replay: .*trace.csv"):
        call("--config", "papers/papers.toml", "--scheduler", "replay:trace.csv")


def test_resume_skips_finished_comparisons(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given_tables = {
        "first": {"methods": "fedgs:trainer.epochs=1", "tune": True, "tune-seeds": 1},
        "second": {"methods": "fedasync:trainer.epochs=1"},
    }
    written(tmp_path / "two.toml", defaults=SMALL, **given_tables)

    def done(*words):
        """Return the names of the comparisons that ran. Check that all other comparisons are reported as finished."""
        call("--config", "two.toml", "--resume", *words)
        out = capsys.readouterr().out
        made = {name for name in given_tables if f"Written to runs/{name}:" in out}
        over = {name for name in given_tables if f"): is finished, in runs/{name}" in out}
        assert made | over == set(given_tables)
        assert not made & over
        return made

    assert done() == {"first", "second"}
    assert done() == set()
    assert done("--jobs", 1) == set()
    for setting in ({"duration": 9.0}, {"swa": "start=0.5"}):
        given_tables["second"] = {"methods": "fedasync:trainer.epochs=1", **setting}
        written(tmp_path / "two.toml", defaults=SMALL, **given_tables)
        assert done() == {"second"}
        assert done() == set()
    given_tables["second"]["rate"] = 2.0
    written(tmp_path / "two.toml", defaults=SMALL, **given_tables)
    assert done() == {"second"}
    (tmp_path / "runs" / "second" / "results.json").write_text("{")
    given_tables["first"]["tune-seeds"] = 2
    written(tmp_path / "two.toml", defaults=SMALL, **given_tables)
    assert done() == {"first", "second"}
    assert done() == set()


def test_resume_repeats_a_comparison_if_a_file_or_a_version_changes(call, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone.csv").write_text("time,client,kind\n0.1,3,leave\n")
    path = written(
        tmp_path / "one.toml", one=SMALL | {"methods": "fedgs:trainer.epochs=1", "availability": "file:gone.csv"}
    )

    def printed():
        """Return the printed JSON object and whether the comparison ran."""
        call("--config", path, "--resume", "--json")
        out, errors = capsys.readouterr()
        return json.loads(out), "Written to" in errors

    first, made = printed()
    assert made
    assert printed() == (first, False)
    (tmp_path / "gone.csv").write_text("time,client,kind\n0.2,3,leave\n")
    second, made = printed()
    assert made
    assert first["settings"].pop("files") != second["settings"].pop("files")
    assert first["settings"] == second["settings"]
    timing = tmp_path / "runs" / "one" / "timing.json"
    tree = json.loads(timing.read_text())
    tree["versions"]["torch"] = "1.0"
    timing.write_text(json.dumps(tree))
    third, made = printed()
    assert made
    assert third["methods"] == second["methods"]
    assert printed() == (third, False)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "two.toml"], "two.toml: second: methods: no method 'fedg'; did you mean fedgs?"),
        (["--config", "two.toml", "--name", "x"], "name: expected --config without --name"),
        (["--config", "bad.toml"], "bad.toml: first: partition: no partition 'shard'; did you mean shards?"),
        (["--config", "type.toml"], "type.toml: first: Invalid value for '--updates': 'many' is not a valid int"),
        (["--only", "first"], "only: expected --config, because --only selects its tables"),
    ],
)
def test_all_tables_are_validated_before_the_first_comparison_runs(words, message, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "two.toml", defaults=SMALL, first={}, second={"methods": ["fedasync", "fedg"]})
    written(tmp_path / "type.toml", first={"updates": "many"})
    written(tmp_path / "bad.toml", first={"rate": 1.0, "partition": "shard"})
    with pytest.raises((ManifoldAggError, typer.BadParameter)) as caught:
        call(*words)
    told = caught.value
    assert message in (told.format_message() if isinstance(told, typer.BadParameter) else str(told))
    assert not (tmp_path / "runs").exists()


def test_evidence_file_is_valid_and_runs_every_rule_on_digits():
    path = ROOT / "benchmarks" / "papers" / "evidence.toml"
    tried = tables(path)
    given_by_hand = {name for name, options in tried.items() if not options["tune"]}
    delays = {f"digits-{name}" for name in ("measured", "measured-path", "lognormal", "halfnormal", "uniform")}
    free = {"digits-masfl-free", "digits-masfl-free-five"}
    averages = {"digits-swa", "digits-swa-periodic"}
    assert given_by_hand == {"digits-two", "digits-ten", "digits-twenty"} | delays | free | averages
    chosen = {name: methods(options["methods"]) for name, options in tried.items()}
    digits = [one for name, listed in chosen.items() if tried[name]["data"] == "digits" for one in listed]
    rules = {type(one.bind(range(5)).rule).__name__.lower() for one in digits}
    assert rules == set(RULES) | {"asynccorrected"}


def test_example_file_is_valid_and_its_small_table_runs(call, tmp_path, monkeypatch, capsys):
    path = ROOT / "examples" / "comparison.toml"
    found = tables(path)
    assert {"digits-small", "mnist"} < set(found)
    for options in found.values():
        assert options["seeds"] >= 2
    monkeypatch.chdir(tmp_path)
    call("--config", path, "--only", "digits-small", "--updates", 2, "--clients", 40, "--seeds", 1)
    (report,) = (tmp_path / "runs").iterdir()
    assert report.name == "digits-small"
    assert list(settings(report)["methods"]) == ["FedAsync", "FedGS", "AsyncBezier(degree=3)"]


def test_asynchrony_protocol_uses_its_test_and_validation_seeds():
    path = ROOT / "benchmarks" / "asynchrony" / "runs.toml"
    found = tables(path)
    for name, options in found.items():
        assert (options["first_seed"], options["seeds"], options["tune_seeds"]) == (200, 5, 1), name
        assert options["tune"] == ("concurrency" not in name and "lognormal" not in name), name
        # Tuning does not apply to a rate that is set explicitly.
        assert not (options["tune"] and options["rate"]), name
        methods(options["methods"], options["rate"] or [])
    for task in ("fashion", "shakespeare", "watch"):
        parts = [options for name, options in found.items() if name.startswith(f"{task}-measured")]
        chosen = [one for options in parts for one in methods(options["methods"])]
        assert len(chosen) == 11
        assert len({(options["delays"], options["duration"], options["target"]) for options in parts}) == 1
