"""Tests of the formats of files and messages: this version reads the files in `tests/data/formats`."""

import math
import shutil

import pytest
import torch

from manifoldagg import tensor_file, wire
from manifoldagg.errors import CheckpointError
from manifoldagg.federated import Durability, Server
from manifoldagg.federated.server.durability import log_format
from tests.format_files import FOLDER, MODEL, NETWORK, POINT, RULE, averaged, fitted, write

pytestmark = pytest.mark.filterwarnings("ignore:.*results may differ bitwise:RuntimeWarning")


@pytest.fixture(params=["stored", "new"])
def folder(request, tmp_path):
    """A copy of the stored files, or the files that this version writes."""
    if request.param == "stored":
        for path in FOLDER.iterdir():
            shutil.copy(path, tmp_path)
    else:
        write(tmp_path)
    return tmp_path


@pytest.mark.parametrize("journal", [None, "journal"])
def test_stored_checkpoint_and_journal_are_read(folder, journal):
    path = folder / ("checkpoint" if journal is None else "missing")
    options = {} if journal is None else {"durability": Durability(journal=folder / journal)}
    server = Server.resume(path, NETWORK, RULE, **options)
    assert torch.equal(server.model, MODEL)
    assert (server.version, server.updates, len(server.tickets)) == (1, 1, 1)
    assert [row["client"] for row in server.history] == ["ward-7"]
    assert server._state.value.limits.history_size == 3
    assert server.state_dict().keys() == NETWORK.state_dict().keys()


def test_stored_message_is_read(folder):
    data = (folder / "message").read_bytes()
    payload = wire.unpack(data)
    assert torch.equal(payload.points, POINT)
    assert (payload.samples, payload.numbers) == (10, {"loss": math.inf})
    assert torch.equal(payload.tensors["extra"], torch.arange(3))
    assert wire.ticket_of(data) == "a ticket"


def test_stored_fit_and_average_are_resumed(folder):
    resumed = fitted(4, folder / "fit")
    assert torch.equal(resumed.phi, fitted(4).phi)
    average = averaged()
    average.load(folder / "average")
    average.update(2, torch.tensor([2.0, 5.0]))
    assert average.average.tolist() == [1.0, 2.0]


def test_another_version_of_the_journal_is_rejected_by_name(folder):
    path = folder / "journal.0.journal"
    header = log_format.Segment.read(path, 0).header
    assert header["version"] == log_format.VERSION
    tensor_file.save(path, log_format.KIND, {**header, "version": log_format.VERSION + 1})
    with pytest.raises(CheckpointError, match="has version 2 of the journal format, and this version .* reads 1"):
        Server.resume(folder / "missing", NETWORK, RULE, durability=Durability(journal=folder / "journal"))


def test_each_format_has_a_stored_file(tmp_path):
    write(tmp_path)
    assert {path.name for path in FOLDER.iterdir()} == {path.name for path in tmp_path.iterdir()}
