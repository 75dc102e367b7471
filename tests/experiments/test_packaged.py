import importlib.util
import pickle
import sys

import numpy as np
import pytest
import torch

from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.packaged import VOWELS_PARTS, read_ts
from manifoldagg.experiments.registry import method
from manifoldagg.federated import clients, rules
from manifoldagg.simulation import FederatedDataset, Method, iid_partition, natural_partition, run

HEADER = "# A comment with a colon: here\n@problemName vowels\n@classLabel true 1 2\n@data\n"


def write_vowels(folder):
    """Write utterances of the speakers 1 and 2 with 12 coefficients. The first coefficient is the speaker's number."""
    folder.mkdir()
    for name, lengths in zip(VOWELS_PARTS, ((2, 3, 4), (3, 5)), strict=True):
        lines = []
        for i, length in enumerate(lengths):
            speaker = 1 + i % 2
            lines.append(":".join([",".join([str(speaker + k)] * length) for k in range(12)] + [str(speaker)]))
        (folder / name).write_text(HEADER + "\n".join(lines) + "\n")
    return folder


def test_shorter_utterances_are_padded_with_zeros(tmp_path):
    made = load_dataset(f"japanese-vowels:{write_vowels(tmp_path / 'vowels')}")
    assert made.inputs.shape == (5, 12, 5)
    assert made.labels.tolist() == made.user_ids.tolist() == [0, 1, 0, 0, 1]
    assert made.test_mask.tolist() == [False, False, False, True, True]
    for series, length, speaker in zip(made.inputs, (2, 3, 4, 3, 5), (1, 2, 1, 1, 2), strict=True):
        expected = (speaker + torch.arange(12.0))[:, None].expand(12, length)
        torch.testing.assert_close(series[:, :length], expected, rtol=0, atol=0)
        assert not series[:, length:].any()
    assert made.model()(made.inputs).shape == (5, 2)


def test_vowels_are_read_without_importing_the_package(tmp_path, monkeypatch):
    data = tmp_path / "aeon" / "datasets" / "data"
    data.mkdir(parents=True)
    write_vowels(data / "JapaneseVowels")
    (tmp_path / "aeon" / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "aeon", raising=False)
    assert len(load_dataset("japanese-vowels").labels) == 5


def test_japanese_vowels_of_aeon_have_the_published_sizes():
    if importlib.util.find_spec("aeon") is None:
        with pytest.raises(ArgumentError, match="japanese-vowels: expected aeon to be installed: pip install"):
            load_dataset("japanese-vowels")
        pytest.skip("the package aeon is not installed")
    made = load_dataset("japanese-vowels")
    assert made.inputs.shape == (640, 12, 29)
    assert torch.bincount(made.labels[~made.test_mask]).tolist() == [30] * 9
    assert torch.bincount(made.labels[made.test_mask]).tolist() == [31, 35, 88, 44, 29, 24, 40, 50, 29]
    assert made.inputs[0, 0, 0].item() == pytest.approx(1.860936)


def test_watch_data_of_seglearn_has_the_published_sizes():
    if importlib.util.find_spec("seglearn") is None:
        with pytest.raises(ArgumentError, match="watch: expected seglearn to be installed: pip install seglearn"):
            load_dataset("watch")
        pytest.skip("the package seglearn is not installed")
    made = load_dataset("watch")
    assert made.inputs.shape == (2369, 6, 100)
    assert made.inputs.dtype == torch.float32
    assert torch.bincount(made.user_ids).tolist() == [284, 273, 157, 150, 249, 242, 265, 243, 244, 262]
    assert torch.bincount(made.labels).tolist() == [254, 389, 396, 363, 366, 294, 307]
    wrists = load_dataset("watch:users=wrist,length=947")
    assert torch.bincount(wrists.user_ids).shape == (20,)
    # The windows of a recording contain consecutive samples.
    halves = load_dataset("watch:length=50").inputs
    np.testing.assert_array_equal(torch.cat([halves[0], halves[1]], dim=1), made.inputs[0])
    for text, message in (("users=arm", "users: expected one of"), ("length=948", "length: expected at most 947")):
        with pytest.raises(ArgumentError, match=f"data: watch: {message}"):
            load_dataset(f"watch:{text}")


def test_watch_data_trains_with_one_client_per_subject():
    pytest.importorskip("seglearn")
    made = pickle.loads(pickle.dumps(load_dataset("watch", "mlp:hidden=16")))
    federation = FederatedDataset.split(made, 10, partition=natural_partition, seed=0)
    assert [set(made.user_ids[part].tolist()) for part in federation.train] == [{i} for i in range(10)]
    found = run(federation, Method("FedAsync", rules.FedAsync(0.3), clients.Local(epochs=1)), num_updates=30)
    assert found.accuracy[-1] > found.accuracy[0] + 0.1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@data\n", "expected series after a line @data"),
        ("1,2:a\n", "expected series after a line @data"),
        ("@data\n1,2:3:a\n", "line 2: expected channels of equally many"),
        ("@data\n1,2:a\n1,2:3,4:a\n", "line 3: expected channels"),
        ("@data\n1,?:a\n", "line 2: expected channels"),
        ("@data\n1,nan:a\n", "line 2: expected channels"),
        ("@data\n1,2\n", "line 2: expected channels"),
    ],
)
def test_invalid_time_series_are_rejected(tmp_path, text, said):
    (tmp_path / "bad.ts").write_text(text)
    with pytest.raises(ArgumentError, match=f"path: {tmp_path}/bad.ts: {said}"):
        read_ts(tmp_path / "bad.ts")


def test_unreadable_time_series_files_are_rejected(tmp_path):
    with pytest.raises(ArgumentError, match=r"path: .*none\.ts: cannot be read: No such file"):
        read_ts(tmp_path / "none.ts")
    (tmp_path / "bytes.ts").write_bytes(b"\xff\xfe")
    with pytest.raises(ArgumentError, match=r"path: .*bytes\.ts: cannot be read"):
        read_ts(tmp_path / "bytes.ts")


def test_yeast_data_of_river_trains():
    made = load_dataset("yeast")
    assert made.inputs.shape == (2417, 103)
    assert made.labels.sum(0).long().tolist() == [
        762,
        1038,
        983,
        862,
        722,
        597,
        428,
        480,
        178,
        253,
        289,
        1816,
        1799,
        34,
    ]
    assert list(made.metrics) == ["AUROC", "AUPRC"]
    federation = FederatedDataset.split(made, 5, partition=iid_partition, seed=0)
    found = run(federation, method("fedasync:rate=0.5"), num_updates=20, eval_every=10)
    assert found.accuracy[-1] > 0.6 > found.accuracy[0]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,x\n", "expected numbers separated by commas"),
        ("a,b\n1,2\n", "expected more than 14 columns, got 2"),
    ],
)
def test_invalid_yeast_files_are_rejected(tmp_path, text, message):
    (tmp_path / "genes.csv").write_text(text)
    with pytest.raises(ArgumentError, match=f"data: yeast: path: .*genes.csv: {message}"):
        load_dataset(f"yeast:{tmp_path / 'genes.csv'}")
    with pytest.raises(ArgumentError, match="data: yeast: path: /nowhere.csv: cannot be read"):
        load_dataset("yeast:/nowhere.csv")
