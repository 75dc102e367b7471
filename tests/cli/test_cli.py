"""Tests of the command `manifoldagg compare` in a process of its own, as a user runs it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from manifoldagg._signals import exit_immediately, graceful_shutdown

COMMAND = [sys.executable, "-W", "error", "-m", "manifoldagg"]
SMALL = ["--clients", "5", "--updates", "4", "--seeds", "2", "--model", "mlp"]
WIDE = os.environ | {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}


def call(*arguments, folder):
    return subprocess.run([*COMMAND, *arguments], cwd=folder, env=WIDE, capture_output=True, text=True, timeout=300)


def test_a_comparison_prints_a_table_and_writes_a_report(tmp_path):
    done = call("compare", *SMALL, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for words in (
        "FedAsync",
        "FedOrtho",
        "AsyncBezier",
        "final",
        "to 85%",
        "mean/max",
        "Gini",
        "train",
        "eval",
        "plane.png",
    ):
        assert words in done.stdout
    assert [
        line
        for line in done.stdout.splitlines()
        if line.startswith("Written to runs/digits-5-clients-4-updates-2-seeds-")
    ]
    (folder,) = (tmp_path / "runs").iterdir()
    files = {"results.json", "log.jsonl", "timing.json", "accuracy.png", "clients.png", "gantt.png", "plane.png"}
    assert {file.name for file in folder.iterdir()} == files
    first = [(folder / file).read_bytes() for file in ("results.json", "log.jsonl")]
    assert json.loads(first[0])["settings"]["clients"] == 5
    assert call("compare", *SMALL, "--name", "again", "--jobs", "2", folder=tmp_path).returncode == 0
    assert [(tmp_path / "runs" / "again" / file).read_bytes() for file in ("results.json", "log.jsonl")] == first


def test_json_option_prints_one_object_on_stdout(tmp_path):
    like = (
        "--delays",
        "uniform:low=1,high=3",
        "--partition",
        "shards:shards_per_client=2",
        "--availability",
        "file:gone.csv",
    )
    (tmp_path / "gone.csv").write_text("time,client,kind\n0.1,3,leave\n")
    like += ("--methods", "fedgs", "--eval-every", "3", "--task-cost", "trainer", "--tune", "--tune-seeds", "1")
    done = call("compare", *SMALL, *like, "--json", "--name", "here", folder=tmp_path)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    assert set(found) == {"settings", "methods", "log", "timing", "files"}
    assert [row["updates"] for row in found["log"]] == [0, 3, 4] * 2
    assert [found["settings"][name] for name in ("partition", "delays", "task_cost")] == [like[3], like[1], "trainer"]
    files = [tmp_path / file for file in found["files"]]
    names = ["results.json", "log.jsonl", "timing.json", "accuracy.png", "clients.png", "gantt.png"]
    assert [file.name for file in files] == names
    assert json.loads(files[0].read_text()) == {key: found[key] for key in ("settings", "methods")}
    assert list(map(json.loads, files[1].read_text().splitlines())) == found["log"]
    assert json.loads(files[2].read_text()) == found["timing"]
    assert "seconds" not in json.dumps(found["methods"])
    searched = found["settings"]["tuning"]["methods"]["FedGS"]
    tried = ", ".join(f"{one['rate']:g}" for one in searched["tried"])
    # The search starts at the default rate of 2.5, scaled to five clients in flight.
    assert searched["start"] == 1.12
    assert "0.56, 1.12, 2.24" in tried
    assert "FedGS: default rate 2.5 scaled to 1.12" in done.stderr
    assert f"FedGS: rate {searched['chosen']:g} of {tried} (" in done.stderr
    assert [file.name[:6] for file in (tmp_path / "runs" / ".tuned").iterdir()] == ["FedGS-"]
    for words in ("FedGS, seed 1", "4/4", "to 85%", "no plane.png", "Written to runs/here"):
        assert words in done.stderr


MINE = """
from dataclasses import dataclass

from manifoldagg.corrections import Correction


@dataclass(frozen=True)
class Shrink(Correction):
    strength: float = 1.0

    def coefficients(self, gram, state=None):
        return gram.identity() / self.strength, state
"""


def test_a_user_correction_runs_with_a_scaled_default_rate(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    names = "asynccorrected:correction=mine:Shrink,correction.strength=2"
    done = call("compare", *SMALL, "--methods", names, "--name", "one", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    name = "AsyncCorrected(correction=mine:Shrink, correction.strength=2)"
    assert f"{name}: default rate 3 scaled to 1.34 for 5 clients and a concurrency of 5" in done.stdout
    table = f'[one]\nclients = 5\nupdates = 4\nseeds = 2\nmodel = "mlp"\nmethods = "{names}"\n'
    (tmp_path / "file.toml").write_text(table)
    again = call("compare", "--config", "file.toml", "--resume", folder=tmp_path)
    assert (again.returncode, again.stderr) == (0, "")
    assert "is finished" in again.stdout  # The settings in the report contain the scaled rate.
    like = ("--name", "two", "--jobs", "2", "--rate", "1.34", "--json")
    two = call("compare", *SMALL, "--methods", names, *like, folder=tmp_path)
    assert two.returncode == 0
    assert "scaled" not in two.stderr
    first, second = ((tmp_path / "runs" / one / "results.json").read_bytes() for one in ("one", "two"))
    assert first == second
    assert json.loads(first)["settings"]["methods"][name]["rule"].count("Shrink(strength=2)") == 1


@pytest.mark.parametrize("where", ["file", "command"])
def test_a_finished_table_with_a_periodic_average_does_not_run_again(tmp_path, where):
    table = '[one]\nclients = 5\nupdates = 4\nmethods = "asynccurve"\nswa = "start=1,period=2"\nmodel = "mlp"\n'
    (tmp_path / "file.toml").write_text(table + ('out = "there"\n' if where == "file" else ""))
    command = ["compare", "--config", "file.toml", "--resume"] + ["--out", "there"] * (where == "command")
    for expected in ("(1 of 1)\n", "(1 of 1): is finished, in there/one\n"):
        done = call(*command, folder=tmp_path)
        assert (done.returncode, done.stderr) == (0, "")
        assert expected in done.stdout


def test_a_rate_above_the_stability_limit_prints_one_warning_on_stderr(tmp_path):
    done = call("compare", *SMALL, "--methods", "fedortho:rate=9,fedasync", "--name", "one", folder=tmp_path)
    assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: rate: FedOrtho takes a step of size 1, above the stability limit of ")


WRONG = [
    (["--methods", "fedasync,sgd"], "methods: no method 'sgd'; did you mean asgd?"),
    (["--methods", "asyncbezier:degre=3"], "methods: asyncbezier: no option 'degre'; did you mean degree?"),
    (["--jobs", "0"], "jobs: expected an integer >= 1, got 0"),
    (["--data", "imagenet"], "data: no data set 'imagenet'; there are digits"),
    (["--data", "mnist"], "data: expected idx:FOLDER, with the files train-images-idx3-ubyte, "),
    (["--data", "shakespeare"], "data: expected shakespeare:FILE, where FILE is a text of plays"),
    (["--rate", "-1"], "rate: expected a finite number > 0, got -1.0"),
    (["--rate", "fedasync=-1"], "rate: expected a finite number > 0, got -1.0"),
    (["--clients", "2000"], "error: clients: expected at most one for each of 1797 samples, got 2000"),
    (["--clients", "0"], "clients: expected an integer >= 1, got 0"),
    (["--updates", "0"], "error: updates: expected an integer >= 1, got 0"),
    (["--eval-every", "0", "--json"], "error: eval-every: expected an integer >= 1, got 0"),
    (["--seeds", "-1"], "seeds: expected an integer >= 1, got -1"),
    (
        ["--partition", "dirichlet:concentration=-0.5"],
        "error: partition: concentration: expected a number >= 0, got -0.5",
    ),
    (["--partition", "natural"], "error: partition: user_ids: expected the owner of each sample"),
    (
        ["--methods", "fedasync:rate=abc"],
        "methods: fedasync: rate: expected a number, or one of cyclic, cosine, module:name; got 'abc'",
    ),
    (["--methods", "fedasync:rate=cosin"], "methods: fedasync: no rate 'cosin'; did you mean cosine?"),
    (
        ["--methods", "fedasync,fedavg", "--concurrency", "2"],
        "methods: FedAvg: concurrency: expected None, as FedAvg waits",
    ),
    (
        ["--methods", "fedasync,fedgs:optimizer=sgd,optimizer.momentum=-3"],
        "methods: fedgs: optimizer: Invalid momentum value: -3",
    ),
    (["--methods", "fedasync,fedavg:trainer=normalised"], "methods: FedAvg(trainer=normalised): message: expected one"),
    (
        ["--methods", "fedasync,nowhere:Signs:rate=1"],
        "methods: nowhere:Signs: expected a method or an importable module",
    ),
    (["--methods", "asyncbezier:degree=1"], "methods: asyncbezier: epochs: expected (4, 0), because"),
    (["--methods", "fedasync:trainer.=3"], "methods: fedasync: expected an option of the trainer after the dot"),
    (["--methods", "fedasync:staleness.=3"], "methods: fedasync: staleness: expected one of its options behind"),
    (["--methods", "fedasync:staleness.b=5"], "error: methods: fedasync: staleness: no option 'b'"),
    (["--scheduler", "independent:delays=3"], "scheduler: independent: delays: expected one by name"),
    (
        ["--scheduler", "jackson:rates=1,concurrency=2"],
        "scheduler: client: expected fewer than concurrency = 2 tasks in flight, got 2",
    ),
    (["--partition", "shard"], "partition: no partition 'shard'; did you mean shards?"),
    (["--scheduler", "priority:worker=2"], "scheduler: priority: no option 'worker'; did you mean workers?"),
    (["--delays", "exponental:mean=10"], "delays: no delays 'exponental'; did you mean exponential?"),
    (["--availability", "file:nowhere.csv"], "nowhere.csv"),
    (["--tune", "--tune-seeds", "0"], "tune-seeds: expected an integer >= 1, got 0"),
    (["--data", "tests.simulation.custom:key"], "error: data: tests.simulation.custom:key: expected a name"),
    (["--task-cost", "date"], "error: task-cost: expected one of fixed, trainer; got 'date'"),
    (["--target", "2"], "target: expected"),
    (["--name", "a/b"], "name: expected the name of a folder in --out, got 'a/b'"),
    (["--only", "digits"], "only: expected --config, because --only selects its tables"),
    (["--concurrency", "0"], "error: concurrency: expected an integer >= 1, got 0"),
    (["--methods", "fedasync", "--buffer", "2"], "error: buffer: expected a method with a buffer, such as fedbuff"),
    (["--methods", "fedbuff", "--buffer", "0"], "buffer: expected an integer >= 1, got 0"),
    (["--methods", "fedavg", "--refill", "2"], "methods: FedAvg: refill: expected None, as FedAvg decides"),
    (["--swa", "start=0.75,cycles=5"], "error: swa: no option 'cycles'; did you mean cycle?"),
    (
        ["--methods", "asynccorrected:correction=nowhere:X"],
        "methods: asynccorrected: correction: expected a correction",
    ),
    (["--delays", "exponental:10"], "delays: no delays 'exponental'; did you mean exponential?"),
    (["--model", "gru"], "model: gru: expected a data set of token sequences"),
    (["--updates", "many"], "--updates"),
    (["--colour", "red"], "--colour"),
]
RUN_ALL = """
import contextlib, io, json, sys
from manifoldagg.__main__ import main

told = []
for arguments in json.loads(sys.stdin.read()):
    sys.argv = ["manifoldagg", "compare", *arguments]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        told.append([None, ""])
        try:
            main()
        except SystemExit as ended:
            told[-1][0] = ended.code
    told[-1][1] = errors.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """The exit code and the error message for each invalid command line. One process runs all, to import torch once."""
    folder = tmp_path_factory.mktemp("wrong")
    command = [sys.executable, "-W", "error", "-c", RUN_ALL]
    given = json.dumps([arguments for arguments, _ in WRONG])
    done = subprocess.run(command, cwd=folder, env=WIDE, input=given, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.parametrize("place", range(len(WRONG)), ids=lambda place: " ".join(WRONG[place][0]))
def test_invalid_arguments_print_one_line_and_exit_with_code_2(place, told):
    code, errors = told[place]
    assert code == 2
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    assert WRONG[place][1] in errors


def test_a_missing_package_prints_one_line_with_the_extra_to_install(tmp_path):
    code = "import sys; sys.modules['pandas'] = None; from manifoldagg.__main__ import main; sys.argv[1:] = ['report', 'x']; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=WIDE, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr == "error: pandas is not installed: pip install 'manifoldagg[cli,experiments]'\n"


LONG = [
    *("compare", "--clients", "12", "--updates", "20", "--seeds", "1", "--eval-every", "4"),
    *("--methods", "asyncbezier,fedgs", "--model", "mlp", "--name", "one"),
]


def enable_sigint():
    """Restore the handling of SIGINT in the child process, because background processes ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def stopped(folder, command, number, lines):
    """Send a signal to a command once its log has this many lines. Return the exit code and stderr."""
    running = subprocess.Popen(
        [*COMMAND, *command], cwd=folder, env=WIDE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=enable_sigint,
    )  # fmt: skip
    log = folder / "runs" / "one.unfinished" / "log.jsonl"
    while running.poll() is None and (not log.exists() or log.read_text().count("\n") < lines):
        time.sleep(0.02)
    os.killpg(running.pid, number)  # A terminal also sends the signal to the workers.
    _, errors = running.communicate(timeout=60)
    assert [path.name for path in (folder / "runs").iterdir()] == ["one.unfinished"]
    return running.returncode, errors


def test_resume_after_interrupt_and_kill_writes_the_same_report(tmp_path):
    for name in ("whole", "again"):
        (tmp_path / name).mkdir()
    assert call(*LONG, folder=tmp_path / "whole").returncode == 0
    told = "interrupted: finished runs are stored in runs/one.unfinished; --resume continues them\n"
    assert stopped(tmp_path / "again", [*LONG, "--jobs", "2"], signal.SIGINT, 3) == (130, told)
    assert stopped(tmp_path / "again", [*LONG, "--resume"], signal.SIGKILL, 7) == (-signal.SIGKILL, "")
    done = call(*LONG, "--resume", folder=tmp_path / "again")
    assert (done.returncode, done.stderr) == (0, "")
    assert "Resuming from runs/one.unfinished" in done.stdout
    assert [path.name for path in (tmp_path / "again" / "runs").iterdir()] == ["one"]
    found, whole = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "runs" / "one").iterdir()}
        for name in ("again", "whole")
    )
    assert found.keys() == whole.keys()
    for name in ("results.json", "log.jsonl", "plane.png"):
        assert found[name] == whole[name]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_finaliser_ends_the_process(number, code):
    class Ends:
        def __del__(self):
            os.kill(os.getpid(), number)
            time.sleep(0.001)

    def waits():
        with graceful_shutdown():
            Ends()
            for _ in range(1000):
                time.sleep(0.01)

    before = signal.signal(signal.SIGINT, exit_immediately)
    try:
        with pytest.raises(SystemExit) as ended:
            waits()
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == code


INTERRUPTED = """
import os, sys, _signal

def press(event, arguments):
    if event == "import" and arguments[0] == {name!r} and "manifoldagg" in sys.modules:
        os.kill(os.getpid(), 2)

_signal.signal(2, _signal.default_int_handler)  # pytest may run in a process that ignores SIGINT
sys.addaudithook(press)
sys.argv = ["manifoldagg", "compare", "--updates", "100000"]
"""
AS_A_SCRIPT = "from manifoldagg.__main__ import main; main()"
AS_A_MODULE = "import runpy; runpy.run_module('manifoldagg', run_name='__main__', alter_sys=True)"


@pytest.mark.parametrize(
    ("name", "started"),
    [
        ("manifoldagg._signals", AS_A_MODULE),
        ("signal", AS_A_SCRIPT),
        ("contextlib", AS_A_SCRIPT),
        ("manifoldagg.cli", AS_A_SCRIPT),
        ("numpy", AS_A_MODULE),
        ("numpy._core._multiarray_umath", AS_A_SCRIPT),
        ("torch", AS_A_MODULE),
        ("torch._C", AS_A_SCRIPT),
        ("torch.nn", AS_A_MODULE),
        ("manifoldagg.simulation", AS_A_SCRIPT),
        ("sklearn", AS_A_SCRIPT),
        ("matplotlib", AS_A_MODULE),
    ],
)
def test_ctrl_c_during_import_prints_one_line(name, started, tmp_path):
    code = INTERRUPTED.format(name=name) + started
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        cwd=tmp_path, env=WIDE, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("arguments", "words"), [(["--help"], "compare"), (["compare", "--help"], "--availability")])
def test_help_and_version_are_printed(arguments, words, tmp_path):
    done = call(*arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert words in done.stdout
    assert call("--version", folder=tmp_path).stdout.startswith("manifoldagg 0.")
