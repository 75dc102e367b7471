"""Tests of data augmentation: reproducibility in every executor, training batches only, and `cropflip`."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.experiments import load_dataset
from manifoldagg.experiments.augmentations import cropflip
from manifoldagg.experiments.compare import compare
from manifoldagg.experiments.registry import method, methods
from manifoldagg.experiments.report import read_reports, write_report
from manifoldagg.federated import CheckpointPolicy
from manifoldagg.simulation import FederatedDataset, iid_partition, processes, run
from tests.simulation.test_resume import Stop, stopping
from tests.simulation.test_run import clusters
from tests.support import seeds

pytestmark = pytest.mark.filterwarnings("ignore::manifoldagg.errors.StabilityWarning")


def noise(inputs, labels, generator, scale=0.5):
    return inputs + scale * torch.randn(inputs.shape, generator=generator), labels


def identity(inputs, labels, generator):
    torch.rand(5, generator=generator)
    return inputs.clone(), labels


def split(augment=None):
    return FederatedDataset.split(replace(clusters(), augment=augment), 4, partition=iid_partition, seed=0)


def same_batches(one, other):
    return all(torch.equal(a, b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("name", ["fedasync", "asyncbezier", "generalizedasyncsgd"])
def test_executors_and_resumed_runs_give_bitwise_equal_results(name, tmp_path):
    federation, options = split(noise), {"num_updates": 8, "eval_every": 4}
    whole = run(federation, method(name), **options)
    assert whole != run(split(), method(name), **options)
    assert run(federation, method(name), executor=processes(2), **options) == whole
    options |= {"checkpoint": CheckpointPolicy(tmp_path / "run", every_updates=2, keep=1), "resume": True}
    with pytest.raises(Stop):
        run(federation, method(name), progress=stopping(5), **options)
    with pytest.raises(CheckpointError, match="settings: augment: was noise, got None"):
        run(split(), method(name), **options)
    assert run(federation, method(name), **options) == whole


def test_random_numbers_depend_only_on_the_task():
    federation = split(noise)
    assert same_batches(federation.batches(1, 2), federation.batches(1, 2))
    for client, task_index in ((1, 3), (2, 2)):
        assert not same_batches(federation.batches(1, 2), federation.batches(client, task_index))
    batches = federation.batches(1, 2)
    # A second epoch draws new random numbers.
    assert not torch.equal(torch.cat([x for x, _ in batches]), torch.cat([x for x, _ in batches]))


@pytest.mark.parametrize("name", ["fedasync", "fedavg"])
def test_augmentation_does_not_change_other_random_numbers(name):
    plain, other = (run(split(augment), method(name), num_updates=6) for augment in (None, identity))
    assert (plain.evaluations, plain.trace) == (other.evaluations, other.trace)


def test_only_training_minibatches_are_augmented():
    seen = []

    def watch(inputs, labels, generator):
        seen.append((inputs, labels))
        return inputs, labels

    federation = split(watch)
    run(federation, method("fedasync:epochs=1"), num_updates=5)
    sizes = sum(federation.num_batches(task.client) for task in run(split(), method("fedasync"), num_updates=5).trace)
    assert len(seen) == sizes
    train = {tuple(row.tolist()) for part in federation.train for row in federation.dataset.inputs[part]}
    assert {tuple(row.tolist()) for inputs, _ in seen for row in inputs} <= train
    assert all(len(inputs) == len(labels) <= 16 for inputs, labels in seen)


@given(seeds, st.integers(0, 3), st.floats(0, 1), st.sampled_from([(2, 1, 4, 4), (3, 2, 5, 3), (1, 3, 1, 2)]))
def test_cropflip_equals_a_crop_of_each_padded_image(seed, padding, flip, shape):
    """The reference crops each image by slicing, with the same random draws."""
    images = torch.arange(1.0, 1.0 + np.prod(shape)).view(shape)
    labels = torch.arange(shape[0])
    found, unchanged = cropflip(images, labels, torch.Generator().manual_seed(seed), padding=padding, flip=flip)
    assert unchanged is labels
    assert found.shape == images.shape
    assert found.is_contiguous()
    generator = torch.Generator().manual_seed(seed)
    top, left = (torch.randint(2 * padding + 1, (shape[0], 1), generator=generator) for _ in range(2))
    mirrored = torch.rand(shape[0], 1, generator=generator) < flip
    for i, image in enumerate(images):
        padded = torch.zeros(shape[1], shape[2] + 2 * padding, shape[3] + 2 * padding)
        padded[:, padding : padding + shape[2], padding : padding + shape[3]] = image
        part = padded[:, top[i] :, left[i] :][:, : shape[2], : shape[3]]
        assert torch.equal(found[i], part.flip(-1) if mirrored[i] else part)


def test_cropflip_mirrors_images_with_the_given_probability():
    images = torch.tensor([[[[0.0, 1.0]]]]).expand(4000, -1, -1, -1)
    moved, _ = cropflip(images, torch.zeros(4000), torch.Generator().manual_seed(0), padding=0, flip=0.3)
    # The tolerance is six standard deviations of a binomial proportion.
    assert abs(float(moved[..., 0].mean()) - 0.3) <= 6 * (0.21 / 4000) ** 0.5


def test_dataset_accepts_an_augmentation_by_name(tmp_path, monkeypatch):
    (tmp_path / "mine_augment.py").write_text(
        "def shift(inputs, labels, generator, by=1.0):\n    return inputs + by, labels\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    made = load_dataset("digits", augment="mine_augment:shift,by=2")
    inputs, _ = made.augment(torch.zeros(2, 1), torch.zeros(2), torch.Generator())
    assert inputs.tolist() == [[2.0], [2.0]]
    sys.modules.pop("mine_augment")
    named = load_dataset("digits", augment="cropflip:padding=1,flip=0")
    assert named.augment.keywords == {"padding": 1, "flip": 0}
    assert load_dataset("digits").augment is None


def test_combined_reports_separate_problems_by_augmentation(tmp_path):
    folders = []
    for name, augment in (("plain", None), ("noisy", noise)):
        found = compare(
            replace(clusters(), augment=augment), methods("fedasync"), clients=4, num_updates=4, seeds=1, eval_every=4
        )
        assert found.settings.get("augment") == (None if augment is None else "noise")
        folders.append(tmp_path / name)
        write_report(found, folders[-1])
    runs, _, _ = read_reports(folders)
    assert list(runs) == ["clusters (augment none)", "clusters (augment noise)"]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: replace(clusters(), augment="noise"), "augment: expected a function, got 'noise'"),
        (lambda: list(split(lambda x, y, g: x).batches(0, 0)), r"augment: expected a pair \(inputs, labels\) of \d+"),
        (lambda: list(split(lambda x, y, g: (x[1:], y)).batches(0, 0)), "augment: expected a pair"),
        (lambda: load_dataset("digits", augment="cropfip"), "augment: no augment 'cropfip'; did you mean cropflip"),
        (lambda: load_dataset("digits", augment="cropflip:flip=2"), "augment: cropflip: flip: expected"),
        (lambda: load_dataset("digits", augment="cropflip:pad=2"), "no option 'pad'; did you mean padding"),
        (lambda: load_dataset("digits", augment="math:tau"), "expected a function of inputs, labels and a generator"),
        (lambda: cropflip(torch.zeros(2, 3), torch.zeros(2), torch.Generator()), "inputs: expected images"),
        (lambda: cropflip(torch.zeros(1, 1, 2, 2), torch.zeros(1), torch.Generator(), padding=-1), "padding: expected"),
    ],
)
def test_invalid_augmentations_are_rejected(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
