"""Data sets that are included as files in other Python packages."""

import importlib.util
from pathlib import Path

import numpy as np
import torch

from manifoldagg._validation import check_choice, check_count
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import models
from manifoldagg.experiments.readers import LABEL_SET_FIELDS, with_model
from manifoldagg.simulation.dataset import LabelledDataset

__all__ = ["japanese_vowels", "read_ts", "watch", "yeast"]

VOWELS_PARTS = ("JapaneseVowels_TRAIN.ts", "JapaneseVowels_TEST.ts")
"""The files of the training and the test split."""
WATCH_USERS = ("subject", "wrist")
YEAST_LABELS = 14
"""The number of labels of a gene, which are the last columns of the file."""


def watch(users: str = "subject", length: int = 100) -> LabelledDataset:
    """Load shoulder exercises that were recorded with smartwatches, from the package seglearn.

    The recordings have six channels and a sampling rate of 50 Hz. Three channels are the axes of an accelerometer in g,
    and three are the axes of a gyroscope in rad/s. The recordings are cut into windows of `length` time steps. Windows
    do not overlap, and an incomplete last window is omitted.

    Each sample of the data set is one window with the shape (6, length). Its label is one of seven exercises. With 100
    time steps (2 s) in a window, the data set has 2,369 samples. The default model for this data set is a multilayer
    perceptron.

    Args:
        users: the users of the natural partition. `"subject"` gives one user per person (10 users). `"wrist"` gives one
            user per person and arm (20 users).
        length: the number of time steps in a window, at most 947, the length of the shortest recording.

    Raises:
        ArgumentError: if an argument is invalid, or if seglearn is not installed.

    Source: Burns et al. 2018, Shoulder physiotherapy exercise recognition, arXiv 1802.01489.
    """
    check_choice("users", users, WATCH_USERS)
    check_count("length", length)
    try:
        from seglearn.datasets import load_watch
    except ModuleNotFoundError:
        raise ArgumentError("expected seglearn to be installed: pip install seglearn") from None
    recorded = load_watch()
    shortest = min(len(series) for series in recorded["X"])
    if length > shortest:
        raise ArgumentError(f"length: expected at most {shortest}, the shortest recording, got {length}")
    windows = [_windows(series, length) for series in recorded["X"]]
    owner = recorded["subject"] * 2 + recorded["side"].astype(np.int64) if users == "wrist" else recorded["subject"]
    counts = [len(window) for window in windows]
    inputs = torch.from_numpy(np.concatenate(windows))
    labels = torch.from_numpy(np.repeat(recorded["y"], counts))
    user_ids = torch.from_numpy(np.repeat(np.unique(owner, return_inverse=True)[1], counts))
    return with_model("watch", inputs, labels, models.mlp, target=0.75, user_ids=user_ids)


def japanese_vowels(path: Path | str = "") -> LabelledDataset:
    """Load utterances of the Japanese vowels /ae/ by nine speakers (UCI, Japanese Vowels).

    The inputs are time series (12, 29) of 12 LPC cepstral coefficients. The 640 series have 7 to 29 time steps, and
    shorter series are padded with zeros. There are 270 training series and 370 test series. The model is a multilayer
    perceptron.

    The label of a series is its speaker, and the speakers are also the users. A natural partition assigns each user to
    its own client. Each client therefore has a single label, as on a phone that records only its owner. A Dirichlet
    partition mixes the speakers.

    Args:
        path: the folder of `JapaneseVowels_TRAIN.ts` and `JapaneseVowels_TEST.ts`. The default is their folder in the
            package aeon, which is not imported.

    Raises:
        ArgumentError: if `path` is not given and aeon is not installed, or if a file is missing or invalid.

    Source: Kudo, Toyama, Shimbo 1999, Multidimensional curve classification using passing-through regions.
    """
    folder = _package_folder("aeon") / "datasets" / "data" / "JapaneseVowels" if not path else Path(path)
    parts = [read_ts(folder / name) for name in VOWELS_PARTS]
    series = [one for part, _ in parts for one in part]
    names = [label for _, labels in parts for label in labels]
    longest = max(one.shape[1] for one in series)
    padded = [np.pad(one, ((0, 0), (0, longest - one.shape[1]))) for one in series]
    labels = torch.from_numpy(np.unique(names, return_inverse=True)[1].astype(np.int64))
    inputs = torch.from_numpy(np.stack(padded))
    test = torch.arange(len(labels)) >= len(parts[0][0])
    return with_model("japanese-vowels", inputs, labels, models.mlp, target=0.85, user_ids=labels, test_mask=test)


def yeast(path: Path | str = "") -> LabelledDataset:
    """Load the functional groups of yeast genes from the package river. A gene can have several labels.

    The data set has 2,417 genes. The inputs (103,) are expression levels and phylogenetic profiles. The labels (14,)
    are the functional groups of a gene. On average, a gene has 4.2 labels. The loss function is the binary
    cross-entropy, and the metrics are the macro averages of AUROC and AUPRC. The model is a multilayer perceptron.

    Args:
        path: a file with the columns of `yeast.csv.gz`, gzipped or not. The default is the file in the package river,
            which is not imported.

    Raises:
        ArgumentError: if `path` is not given and river is not installed, or if the file cannot be read.

    Source: Elisseeff, Weston 2001, A kernel method for multi-labelled classification.
    """
    file = Path(path) if path else _package_folder("river") / "datasets" / "yeast.csv.gz"
    try:
        columns = np.loadtxt(file, delimiter=",", skiprows=1, dtype=np.float32, ndmin=2)
    except OSError as error:
        raise ArgumentError(f"path: {file}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise ArgumentError(f"path: {file}: expected numbers separated by commas; {error}") from None
    if columns.shape[1] <= YEAST_LABELS:
        raise ArgumentError(f"path: {file}: expected more than {YEAST_LABELS} columns, got {columns.shape[1]}")
    inputs, labels = np.split(columns, [-YEAST_LABELS], axis=1)
    samples, targets = torch.from_numpy(inputs.copy()), torch.from_numpy(labels.copy())
    return with_model("yeast", samples, targets, models.mlp, target=0.68, **LABEL_SET_FIELDS)


def read_ts(path: Path | str) -> tuple[list[np.ndarray], list[str]]:
    """Read labelled time series from a file in the `.ts` format of aeon and sktime, without time stamps.

    Each line after the line `@data` contains the channels of one series and its label, separated by colons. The values
    of a channel are separated by commas.

    Args:
        path: the path of the file.

    Returns:
        The series, float32 (channels, time), and their labels.

    Raises:
        ArgumentError: if the file cannot be read, has no series, or a line is not a series with equally long channels
            of finite numbers. All series must have the same number of channels.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = Path(folder, "two.ts")
        ...     _ = file.write_text("@data\\n1,2:3,4:a\\n5,6,7:8,9,10:b\\n")
        ...     series, labels = read_ts(file)
        >>> labels, series[0].tolist()
        (['a', 'b'], [[1.0, 2.0], [3.0, 4.0]])
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"path: {path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    start = next((i for i, line in enumerate(lines, 1) if line.strip().lower() == "@data"), len(lines))
    series: list[np.ndarray] = []
    labels: list[str] = []
    for number, line in enumerate(lines[start:], start + 1):
        if not line.strip():
            continue
        *channels, label = line.strip().split(":")
        try:
            made = np.array([[float(value) for value in channel.split(",")] for channel in channels], np.float32)
        except ValueError:  # The channels differ in length, or a value is not a number.
            made = np.empty(0, np.float32)
        if made.ndim != 2 or not np.isfinite(made).all() or (series and len(made) != len(series[0])):
            raise ArgumentError(
                f"path: {path}: line {number}: expected channels of equally many finite numbers, and a label"
            )
        series.append(made)
        labels.append(label)
    if not series:
        raise ArgumentError(f"path: {path}: expected series after a line @data, got a file without series")
    return series, labels


def _windows(series: np.ndarray, length: int) -> np.ndarray:
    """Cut a series (time, channels) into float32 windows (windows, channels, length)."""
    count = len(series) // length
    cut = series[: count * length].astype(np.float32).reshape(count, length, -1)
    return np.ascontiguousarray(cut.transpose(0, 2, 1))


def _package_folder(name: str) -> Path:
    """Return the folder of an installed package without importing it."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise ArgumentError(f"expected {name} to be installed: pip install --no-deps {name}; or set path=FOLDER")
    return Path(found.submodule_search_locations[0])
