"""Tests of the command `manifoldagg inspect`, which summarises checkpoints and journals and names corrupted records."""

import json
import os
import resource
import subprocess
import sys
from itertools import pairwise

import pytest
import safetensors.torch
import torch

from manifoldagg import tensor_file
from manifoldagg.cli import inspect
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import Durability, Payload, Server, UpdateLimits
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat

COMMAND = [sys.executable, "-W", "error", "-m", "manifoldagg", "inspect"]
WIDE = os.environ | {"COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}


def call(*arguments):
    return subprocess.run([*COMMAND, *map(str, arguments)], env=WIDE, capture_output=True, text=True, timeout=300)


def worked(folder, **options):
    """Return a server with three accepted updates of staleness 0, 0 and 2, a final rejection and a dropped ticket."""
    limits = UpdateLimits(max_norm=100.0, max_staleness=2)
    durability = Durability(journal=folder / "j", **options)
    server = Server(Flat(2), FedAsync(0.5), torch.zeros(2), limits=limits, durability=durability)
    late, old = server.dispatch("late"), server.dispatch(7)
    for name in ("a", "b"):
        server.receive(server.dispatch(name), Payload(torch.ones(1, 2), 1)).check()
    assert not server.receive(late, Payload(torch.full((1, 2), 1e6), 1)).accepted
    server.receive(late, Payload(torch.ones(1, 2), 1)).check()
    assert not server.receive(old, Payload(torch.ones(1, 2), 1)).accepted
    server.drop(server.dispatch("gone"))
    return server


def read(path):
    """Return the summary of a path and its records."""
    summary = inspect.Summary(path)
    return summary, [*inspect.read(path, summary)]


def files(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("what", ["j", "j.0.journal"])
def test_a_journal_of_a_running_server_is_summarised_and_not_modified(tmp_path, what):
    server = worked(tmp_path)
    before = files(tmp_path)
    done = call(tmp_path / what)
    assert (done.returncode, done.stderr) == (0, "")
    words = " ".join(done.stdout.split())
    for told in (
        "format version 1",
        "model version 3",
        "accepted updates 3",
        "clients 5: late, 7, a, b, gone",
        "dispatched 5",
        "accepted 3",
        "ended 1",
        "dropped 1",
        "staleness updates",
        "staleness: expected at most 2, got 3",
        f"size {len(before['j.0.journal'][0]):,} bytes",
    ):
        assert told in words, told
    summary, _ = read(tmp_path / what)
    assert summary.staleness == {0: 2, 2: 1}
    assert summary.counts == server.rejected
    assert files(tmp_path) == before
    server.dispatch("still running")


def test_a_checkpoint_is_summarised(tmp_path):
    server = worked(tmp_path)
    server.save(tmp_path / "saved")
    summary, rows = read(tmp_path / "saved")
    assert summary.kind == "checkpoint"
    assert (summary.version, summary.num_updates) == (server.version, server.updates)
    assert [row["client"] for row in rows] == [row["client"] for row in server.history]
    assert summary.rejections == [(7, "staleness: expected at most 2, got 3")]
    # After the checkpoint, the journal is empty and continues the record numbers.
    server.receive(server.dispatch("a"), Payload(torch.ones(1, 2), 1)).check()
    after, records = read(tmp_path / "j")
    assert [record["kind"] for record in records] == ["dispatched", "accepted"]
    assert (after.version, after.num_updates) == (server.version, None)
    done = call(tmp_path / "saved")
    assert (done.returncode, done.stderr) == (0, "")
    assert "kind checkpoint" in " ".join(done.stdout.split())


def test_records_are_json_lines_without_tensors(tmp_path):
    worked(tmp_path)
    done = call(tmp_path / "j", "--records")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [json.loads(line, parse_constant=pytest.fail) for line in done.stdout.splitlines()]
    assert [line["lsn"] for line in lines] == [*range(10)]
    assert [line["kind"] for line in lines].count("accepted") == 3
    first = next(line for line in lines if line["kind"] == "accepted")
    assert first["receipt"]["accepted"]
    assert first["payload_bytes"] > 16


def test_a_large_model_is_not_loaded(tmp_path):
    tensor_file.save(tmp_path / "large", "server", {"model": torch.zeros(2**24)})
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open(tmp_path / "large", "rb") as file:
        metadata, tree = tensor_file.load_structure(file, os.fstat(file.fileno()).st_size)
    assert (metadata["kind"], tree) == ("server", {"model": "torch.float32 [16777216]"})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used < 32 * 1024


def ends(path):
    """Return the offsets of the records of a segment, and the offset of its end."""
    with open(path, "rb") as file:
        _, header = tensor_file.load_structure(file, os.fstat(file.fileno()).st_size)
        segment = inspect.Segment(path, header, file.tell())
    records, _, _ = inspect.scan(segment)
    return [segment.offset] + [record.payload_offset + record.payload_length for record in records]


def test_a_corrupted_record_is_named(tmp_path):
    worked(tmp_path).close()
    path = tmp_path / "j.0.journal"
    whole = path.read_bytes()
    starts = ends(path)
    for lsn, (start, end) in enumerate(pairwise(starts[:-1])):
        for at in (start + 3, start + 20, end - 1):
            altered = bytearray(whole)
            altered[at] ^= 1
            path.write_bytes(altered)
            with pytest.raises(CheckpointError, match=rf"j\.0\.journal: record {lsn}[ :]"):
                read(tmp_path / "j")
    done = call(tmp_path / "j", "--records")
    assert done.returncode == 1
    assert f"record {len(starts) - 3}" in done.stderr
    assert len(done.stdout.splitlines()) == len(starts) - 3
    altered = bytearray(whole)
    altered[starts[0] // 2] ^= 1
    path.write_bytes(altered)
    done = call(tmp_path / "j")
    assert done.returncode == 1
    assert "j.0.journal: " in done.stderr
    assert "corrupted" in done.stderr


def test_a_file_of_another_program_gives_only_an_error(tmp_path):
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    done = call(tmp_path / "model.safetensors")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: ")
    assert "model.safetensors: " in done.stderr


def test_an_incomplete_tail_is_noted_without_an_error(tmp_path):
    worked(tmp_path).close()
    path = tmp_path / "j.0.journal"
    path.write_bytes(path.read_bytes()[:-3])
    summary, records = read(tmp_path / "j")
    assert len(records) == 9
    assert "after record 8 are an incomplete write" in summary.notes[0]
    done = call(tmp_path / "j")
    assert done.returncode == 0
    assert "after record 8 are an incomplete write" in done.stderr


def test_an_incomplete_last_payload_is_noted(tmp_path):
    server = Server(Flat(2), FedAsync(0.5), torch.zeros(2), durability=Durability(journal=tmp_path / "j"))
    server.receive(server.dispatch("a"), Payload(torch.ones(1, 2), 1)).check()
    server.close()
    path = tmp_path / "j.0.journal"
    altered = bytearray(path.read_bytes())
    altered[-1] ^= 1
    path.write_bytes(altered)
    summary, records = read(tmp_path / "j")
    assert [record["kind"] for record in records] == ["dispatched"]
    assert "record 1 is incomplete" in summary.notes[0]


@pytest.mark.parametrize("what", ["missing", "text", "other"])
def test_other_files_are_rejected(tmp_path, what):
    (tmp_path / "text").write_bytes(b"nothing of this package" * 9)
    tensor_file.save(tmp_path / "other", "sums", {"a": 1})
    error = CheckpointError if what == "text" else ArgumentError
    with pytest.raises(
        error, match="was not written by this package|expected a checkpoint or a journal|does not exist"
    ):
        read(tmp_path / what)
    assert call(tmp_path / what).returncode == (1 if what == "text" else 2)
