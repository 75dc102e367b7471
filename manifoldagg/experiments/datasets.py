"""Registry of data sets, each with a suitable model. Data are read from local files and never downloaded."""

import json
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from manifoldagg._validation import check_choice
from manifoldagg.errors import ArgumentError
from manifoldagg.experiments import augmentations, models
from manifoldagg.experiments.packaged import japanese_vowels, watch, yeast
from manifoldagg.experiments.plays import shakespeare
from manifoldagg.experiments.readers import LABEL_SET_FIELDS, PARTS, read_images, read_text, with_model
from manifoldagg.experiments.spec_parser import (
    Reader,
    bind,
    choose,
    error_context,
    parse_spec,
    parse_value,
    reader,
    user_reader,
)
from manifoldagg.federated.clients.determinism import seeded_model, single_threaded
from manifoldagg.simulation.dataset import Augmentation, LabelledDataset, Signature

__all__ = ["digits", "fashion_mnist", "idx", "leaf", "load_dataset", "npz"]

NPZ_ARRAYS = ("inputs", "labels", "user_ids", "test_mask")
FASHION_MNIST_FOLDER = "/usr/share/datasets/fashion-mnist"
"""The folder of the Debian package dataset-fashion-mnist."""
IDX_NAMES = ("mnist", "fashion_mnist", "fashionmnist", "kmnist", "emnist", "qmnist")
"""Names of data sets in the IDX format that a user may expect to exist."""
USAGE = {
    "idx": "idx:FOLDER, with the files train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
    "t10k-labels-idx1-ubyte (gzipped or not) in FOLDER",
    "shakespeare": "shakespeare:FILE, where FILE is a text of plays, such as input.txt of tiny Shakespeare, or a "
    "folder of plays",
    "leaf": "leaf:FOLDER, with the folders train and test of LEAF's JSON files in FOLDER",
    "npz": "npz:FILE, where FILE has the arrays inputs and labels",
}
"""The usage of the data sets that are read from files."""
LEAF_USERS = ("user", "hierarchy")
MAX_CLASSES = 2**31
"""The exclusive upper bound of labels and tokens."""


def load_dataset(
    source: str | Callable[[], LabelledDataset], model: str | None = None, augment: str | None = None
) -> LabelledDataset:
    """Load a data set by name or with a function.

    | name | data |
    | --- | --- |
    | `digits` | 1,797 handwritten digits of 8 x 8 pixels, from scikit-learn |
    | `idx:folder` | MNIST and data sets with its file names; options of [`idx`][manifoldagg.experiments.datasets.idx] |
    | `fashion-mnist` | 60,000 training and 10,000 test images, from the Debian package dataset-fashion-mnist |
    | `watch` | smartwatches of 10 people, from seglearn; options of [`watch`][manifoldagg.experiments.packaged.watch] |
    | `japanese-vowels` | nine speakers; see [`japanese_vowels`][manifoldagg.experiments.packaged.japanese_vowels] |
    | `yeast` | genes with several labels each, from river; see [`yeast`][manifoldagg.experiments.packaged.yeast] |
    | `shakespeare:path` | a text of plays; options of [`shakespeare`][manifoldagg.experiments.plays.shakespeare] |
    | `leaf:folder` | JSON by user; see [`leaf`][manifoldagg.experiments.datasets.leaf] |
    | `npz:file` | your own arrays; see [`npz`][manifoldagg.experiments.datasets.npz] |
    | `module:name` | a `LabelledDataset` in your own module, or a function that returns one |

    Worker processes receive the name or the function instead of the data. The function must therefore return equal data
    in each call, and it must be picklable.

    Args:
        source: the name of the data set, or a function that returns it.
        model: the name of a function in `manifoldagg.experiments.models` with its options, such as `"cnn:norm=batch"`
            or `"lenet5"`. The default is the model of the data set.
        augment: the name of a function in `manifoldagg.experiments.augmentations` with its options, such as
            `"cropflip:padding=4"`, or `module:name` for your own function of the inputs, the labels and a generator.
            The default is the augmentation of the data set.

    Raises:
        ArgumentError: if the name is unknown, a package or a file is missing, a file is invalid, the function does not
            return a `LabelledDataset`, or the model does not support the data set.

    Example:
        >>> load_dataset("digits").inputs.shape
        torch.Size([1797, 1, 8, 8])
    """
    make = _dataset_factory(source) if isinstance(source, str) else source
    with single_threaded():  # Worker processes have one thread, and sums must have the same bits.
        made = make()
    if not isinstance(made, LabelledDataset):
        raise ArgumentError(
            f"source: expected a function that returns a LabelledDataset, got a function that returns "
            f"{type(made).__name__}"
        )
    if augment is not None:
        made = replace(made, augment=parse_value("augment", augment, AUGMENTATIONS))
    if model is not None:
        return replace(made, model=_model_factory(model, made.signature))
    try:
        pickle.dumps(made.model)
    except Exception:  # a lambda, for instance
        return replace(made, model=_ModelOfDataset(source, made.model))
    return made


class _ModelOfDataset:
    """A picklable wrapper around a data set's model factory, which itself cannot be pickled.

    The pickle contains only the source of the data set. Unpickling loads the data set and returns its model factory.
    """

    def __init__(self, source: str | Callable[[], LabelledDataset], model: Callable[[], nn.Module]) -> None:
        self._source = source
        self._model = model
        # The metadata of a run use this name.
        self.__qualname__ = getattr(model, "__qualname__", type(model).__qualname__)

    def __call__(self) -> nn.Module:
        return self._model()

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_model, (self._source,)


def _load_model(source: str | Callable[[], LabelledDataset]) -> Callable[[], nn.Module]:
    return load_dataset(source).model


def digits() -> LabelledDataset:
    """Load the handwritten digits of scikit-learn, with a small convolutional network as the model.

    The inputs are grey images of 8 x 8 pixels in [0, 1] from the UCI repository.
    """
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError:
        raise ArgumentError("expected scikit-learn to be installed: pip install 'manifoldagg[experiments]'") from None
    pixels, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy(pixels).to(torch.float32).div_(16).view(-1, 1, 8, 8)
    return with_model("digits", inputs, torch.from_numpy(labels).to(torch.int64), models.cnn, target=0.85)


def idx(folder: Path | str, part: str | None = None) -> LabelledDataset:
    """Load images and labels from files in the IDX format, such as MNIST, Fashion-MNIST or KMNIST.

    The default model for such a data set is a convolutional network.

    Args:
        folder: the folder of the files, as for [`read_images`][manifoldagg.experiments.read_images]. The data set has
            the name of the folder.
        part: `"train"` or `"t10k"` (the test images). The default is all available parts, with the test images as the
            test split.
    """
    folder = Path(folder)
    wanted = PARTS if part is None else (part,)
    here = [one for one in wanted if any(folder.glob(f"{one}-images*"))] or [wanted[-1]]
    found = [read_images(folder, one) for one in here]
    inputs, labels = (torch.cat(pieces) for pieces in zip(*found, strict=True))
    test = torch.arange(len(labels)) >= len(found[0][1]) if len(found) > 1 else None
    return with_model(_name(folder), inputs, labels, models.cnn, target=0.9, test_mask=test)


def fashion_mnist(folder: Path | str = FASHION_MNIST_FOLDER, part: str | None = None) -> LabelledDataset:
    """Load Fashion-MNIST from the files of the Debian package `dataset-fashion-mnist`.

    The default model for this data set is a convolutional network.

    Args:
        folder: the folder of the files.
        part: as in `idx`.

    Raises:
        ArgumentError: if the folder does not exist.
    """
    if not Path(folder).is_dir():
        raise ArgumentError(
            f"data: expected the files of Fashion-MNIST in {folder}; install them with "
            f"`apt-get install dataset-fashion-mnist`, or use idx:FOLDER"
        )
    return idx(folder, part)


def leaf(folder: Path | str, users: str = "user") -> LabelledDataset:
    """Load a data set of the LEAF benchmark, in which each sample belongs to a user.

    The default model depends on the inputs. It is a convolutional network for images (FEMNIST), a recurrent network for
    text (Shakespeare), and a multilayer perceptron for other inputs.

    Args:
        folder: a folder with JSON files, or with two folders `train` and `test` that contain JSON files. `test` is the
            test split. Each file has `users` and `user_data`, a mapping from users to lists `x` and `y`. The samples in
            `x` are either lists of numbers or strings. A list of 784 numbers contains the pixels of an image. The
            labels in `y` are either integers >= 0 or characters.
        users: the users of the data set: `"user"`, or `"hierarchy"`, the groups of users in the list `hierarchies` of
            each file. In LEAF's Shakespeare data, a user is a role, and its hierarchy is the play.

    Source: Caldas et al. 2018, LEAF.
    """
    check_choice("users", users, LEAF_USERS)
    folder = Path(folder)
    parts = [(folder / part, part == "test") for part in ("train", "test") if (folder / part).is_dir()]
    samples = [
        (owner, tested, x, y)
        for place, tested in parts or [(folder, False)]
        for owner, inputs_of, labels_of in _leaf_users(place, users)
        for x, y in zip(inputs_of, labels_of, strict=True)
    ]
    if not samples:
        raise ArgumentError(f"folder: {folder}: expected samples, got files without samples")
    owners, test, xs, ys = map(list, zip(*samples, strict=True))
    number_of = {owner: i for i, owner in enumerate(dict.fromkeys(owners))}
    characters = sorted({c for text in (*xs, *ys) if isinstance(text, str) for c in text})
    number = {character: i for i, character in enumerate(characters)}
    inputs = _leaf_inputs(folder, xs, number)
    if {type(y) for y in ys} == {str} and all(len(y) == 1 for y in ys):
        ys = [number[y] for y in ys]
    if not all(type(y) is int and 0 <= y < MAX_CLASSES for y in ys):
        raise ArgumentError(
            f"folder: {folder}: expected all y to be integers >= 0 and below 2**31, or all y to be characters"
        )
    suits = models.gru if not inputs.is_floating_point() else models.cnn if inputs.ndim == 4 else models.mlp
    given = torch.tensor(test) if any(test) and len(parts) > 1 else None
    made = torch.tensor(ys, dtype=torch.int64)
    user_ids = torch.tensor([number_of[owner] for owner in owners])
    return with_model(_name(folder), inputs, made, suits, target=0.7, user_ids=user_ids, test_mask=given)


def npz(path: Path | str) -> LabelledDataset:
    """Load arrays that `numpy.savez(path, inputs=..., labels=...)` wrote.

    Args:
        path: the path of the file, with these arrays:

            - `inputs`: numbers (samples, ...), or tokens (samples, length), which are integers >= 0. Inputs of
              the shape (samples, channels, height, width) get a convolutional model. Tokens get a recurrent
              model, and other inputs a perceptron.
            - `labels`: integers >= 0, (samples,) or (samples, length). If samples can have several labels: booleans, or
              floating-point zeros and ones, (samples, labels).
            - `user_ids` (optional): the users, numbers or names, (samples,).
            - `test_mask` (optional): whether each sample belongs to the test split, booleans (samples,).
    """
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except OSError as error:
        raise ArgumentError(f"path: {path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, TypeError, AttributeError):
        raise ArgumentError(f"path: {path}: expected a complete file of numpy.savez without objects") from None
    for name in arrays:
        choose(f"path: {path}", "array", name, NPZ_ARRAYS)
    if missing := [name for name in NPZ_ARRAYS[:2] if name not in arrays]:
        raise ArgumentError(f"path: {path}: expected an array {missing[0]!r}, got {', '.join(arrays)}")
    with error_context(f"path: {path}"):
        return _from_arrays(path.stem, **arrays)


def _from_arrays(
    name: str,
    inputs: np.ndarray,
    labels: np.ndarray,
    user_ids: np.ndarray | None = None,
    test_mask: np.ndarray | None = None,
) -> LabelledDataset:
    """Build a data set from NumPy arrays."""
    if inputs.ndim < 2 or not inputs.size or inputs.dtype.kind not in "fiub":
        raise ArgumentError(f"inputs: expected numbers (samples, ...), got {inputs.dtype} of shape {inputs.shape}")
    sequence = inputs.dtype.kind in "iu" and inputs.ndim == 2 and inputs.min() >= 0
    label_sets = labels.dtype.kind in "bf" and labels.ndim == 2
    whole = labels.dtype.kind in "iu" and labels.min(initial=0) >= 0 and labels.max(initial=0) < MAX_CLASSES
    if not (whole or label_sets):
        given = f" with the maximum {labels.max(initial=0)}" if labels.dtype.kind in "iu" else ""
        raise ArgumentError(
            f"labels: expected integers >= 0 and below 2**31, or zeros and ones (samples, labels) as booleans or "
            f"floats; got {labels.dtype}{given}"
        )
    if test_mask is not None and test_mask.dtype.kind != "b":
        raise ArgumentError(f"test_mask: expected booleans, got {test_mask.dtype}")
    if sequence and inputs.max() >= MAX_CLASSES:
        raise ArgumentError(f"inputs: expected tokens below 2**31, got {inputs.max()}")
    with np.errstate(over="ignore"):
        numbers = inputs.astype(np.int64 if sequence else np.float32)
    if not np.isfinite(numbers).all():
        raise ArgumentError("inputs: expected numbers that are finite in float32")
    suits = models.gru if sequence else models.cnn if inputs.ndim == 4 else models.mlp
    return with_model(
        name,
        torch.from_numpy(numbers),
        torch.from_numpy(labels.astype(np.float32 if label_sets else np.int64)),
        suits,
        target=0.8,
        **(LABEL_SET_FIELDS if label_sets else {}),
        user_ids=None
        if user_ids is None
        else torch.from_numpy(np.unique(user_ids, return_inverse=True)[1].astype(np.int64)),
        test_mask=None if test_mask is None else torch.from_numpy(test_mask),
    )


def _leaf_users(place: Path, users: str) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield the owner, the inputs and the labels of each user in the JSON files of a folder."""
    files = sorted(place.glob("*.json"))
    if not files:
        raise ArgumentError(f"folder: {place}: expected JSON files, got a folder without JSON files")
    for file in files:
        try:
            content = json.loads(read_text(file))
            owners = content["users"] if users == "user" else content["hierarchies"]
            for user, owner in zip(content["users"], owners, strict=True):
                x, y = content["user_data"][user]["x"], content["user_data"][user]["y"]
                if not (isinstance(x, list) and isinstance(y, list) and len(x) == len(y)):
                    raise ArgumentError(f"folder: {file}: {user}: expected lists x and y of equal length")
                yield str(owner), x, y
        except ArgumentError:
            raise
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            missing = f"missing key {error}" if isinstance(error, KeyError) else str(error)
            raise ArgumentError(
                f"folder: {file}: expected JSON with users and, by user, x and y in user_data; {missing}"
            ) from None


def _leaf_inputs(folder: Path, xs: Sequence[Any], number: Mapping[str, int]) -> Tensor:
    """Return the inputs, floats or tokens."""
    if len({(type(x), len(x)) if isinstance(x, list | str) else None for x in xs}) > 1:
        raise ArgumentError(f"folder: {folder}: expected all x to be lists of numbers, or strings, of equal length")
    try:
        if isinstance(xs[0], str):
            inputs = torch.tensor([[number[character] for character in x] for x in xs], dtype=torch.int64)
        else:
            inputs = torch.tensor(xs, dtype=torch.float32)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ArgumentError(f"folder: {folder}: expected all x to be lists of numbers, or strings; {error}") from None
    if inputs.ndim < 2 or not inputs.numel() or not inputs.isfinite().all():
        raise ArgumentError(f"folder: {folder}: expected all x to be non-empty lists of finite numbers, or strings")
    if not inputs.is_floating_point():
        return inputs
    return inputs.view(-1, 1, 28, 28) if inputs.shape[1:] == (784,) else inputs


def _name(folder: Path) -> str:
    """Return the name of a folder, including a relative path such as `.`."""
    return folder.resolve().name or "data"


def _dataset_factory(source: str) -> Callable[[], LabelledDataset]:
    """Return a function that loads the named data set."""
    chosen = parse_spec("data", source, DATASETS)
    name = chosen.name.lower()
    if chosen.name in USAGE and not chosen.options.keys() & {"", "folder", "path"}:
        raise ArgumentError(f"data: expected {USAGE[chosen.name]}, got {source!r}")
    if name in (*IDX_NAMES, "femnist"):
        usage = USAGE["leaf" if name == "femnist" else "idx"]
        raise ArgumentError(f"data: expected {usage}, got {source!r}; the library does not download data")
    return partial(parse_value, "data", source, DATASETS, "data set")


def _model_factory(text: str, signature: Signature) -> Callable[[], nn.Module]:
    """Return a function that builds the named model for a data set."""
    chosen = parse_spec("model", text)
    make = getattr(models, choose("model", "model", chosen.name, MODELS))
    made = partial(bind(f"model: {chosen.name}", make, chosen.options, ("signature",)), signature)
    with error_context(f"model: {chosen.name}"):
        seeded_model(made, 0)
    return made


DATASETS: Mapping[str, Reader] = {
    **{make.__name__: reader(make) for make in (digits, idx, shakespeare, leaf, npz, watch, yeast)},
    "fashion-mnist": reader(fashion_mnist),
    "japanese-vowels": reader(japanese_vowels),
    **user_reader("a LabelledDataset", LabelledDataset),
}


def _read_cropflip(where: str, options: Mapping[str, str]) -> Augmentation:
    made: Augmentation = bind(where, augmentations.cropflip, options, ("inputs", "labels", "generator"))
    with error_context(where):
        made(torch.zeros(1, 1, 1, 1), torch.zeros(1), torch.Generator())
    return made


AUGMENTATIONS: Mapping[str, Reader] = {
    "cropflip": _read_cropflip,
    **user_reader("a function of inputs, labels and a generator", (), num_arguments=3),
}
MODELS = [name for name in models.__all__ if name.islower()]
