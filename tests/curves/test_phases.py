"""Phases of a fit: early stopping on a plateau, and bit-identical resumption from a state or a file."""

import functools
import tempfile
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from manifoldagg.averaging import SWA
from manifoldagg.curves.bezier import Bezier
from manifoldagg.curves.control import Control
from manifoldagg.curves.fit import Training, fit
from manifoldagg.curves.phases import Phases
from manifoldagg.curves.sampling import Sampling
from manifoldagg.curves.sharpness import SAM
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.manifolds import Flat, Product, Sphere
from tests.support import draw, seeds

SGD = torch.optim.SGD
CURVE = Bezier(Flat(3))
DATA = list(draw(9, 4, 3))
QUICK = {"training": Training(optimizer=SGD, rate=0.1), "start": draw(8, 3)}


def square(theta, batch):
    return (theta - batch).square().sum() / 2


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_a_plateau_ends_its_phase():
    options = {"start": DATA[0], "training": Training(optimizer=SGD, rate=0.3), "control": Control(rate=3.0)}
    loss = lambda theta, batch: 1 + square(theta, batch)  # noqa: E731  # relative to 0 it would improve for ever
    result = fit(CURVE, loss, [DATA[1]], phases=Phases(steps=(500, 500), patience=10), generator=seeded(), **options)
    first, second = result.state["schedule"]["steps"]
    assert 10 < first < 200
    assert result.converged == (second < 500)
    assert (result.phi[2] - DATA[1]).norm() < 0.1 * (DATA[0] - DATA[1]).norm()
    assert not fit(CURVE, loss, [DATA[1]], generator=seeded(), phases=Phases(steps=(5, 5)), **options).converged


MODES = {
    "default": {},
    "alternate": {"phases": Phases(steps=(17, 23), alternate=True), "control": Control(projection=0.5)},
    "patient": {"phases": Phases(steps=(17, 23), patience=7, plateau=0.5)},
    "momentum": {
        "training": Training(functools.partial(SGD, momentum=0.9), 0.05),
        "control": Control(free=[1, 2]),
        "sampling": Sampling(samples=2),
    },
    "sharp": {"training": Training(rate=0.05, sharpness=SAM()), "sampling": Sampling("stratified")},
}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=4)
@given(seeds, st.integers(0, 39))
def test_a_resumed_fit_is_bitwise_equal(mode, seed, stop):
    options = {"phases": Phases(steps=(17, 23)), "training": Training(rate=0.05), **MODES[mode], "start": draw(8, 3)}
    whole = fit(CURVE, square, DATA, generator=seeded(seed), **options)
    stopped = replace(options["phases"], callback=lambda step, *_: step == stop)
    half = fit(CURVE, square, DATA, generator=seeded(seed), **options | {"phases": stopped})
    with tempfile.TemporaryDirectory() as folder:
        half.save(folder + "/fit")
        rest = fit(CURVE, square, DATA, generator=seeded(seed + 1), resume=folder + "/fit", **options)
    assert torch.equal(rest.phi, whole.phi)
    assert rest.losses == whole.losses
    assert rest.converged == whole.converged


def test_a_resumed_fit_can_have_larger_limits():
    whole = fit(CURVE, square, DATA, phases=Phases(steps=(10, 100)), generator=seeded(), **QUICK)
    generator = seeded()
    half = fit(CURVE, square, DATA, phases=Phases(steps=(10, 50)), generator=generator, **QUICK)
    kept = half.phi.clone()
    rest = fit(CURVE, square, DATA, phases=Phases(steps=(10, 100)), generator=generator, resume=half.state, **QUICK)
    assert torch.equal(rest.phi, whole.phi)
    assert rest.losses == whole.losses
    assert torch.equal(half.state["phi"], kept)
    with pytest.raises(ArgumentError, match="resume: expected a first phase of the same length"):
        fit(CURVE, square, DATA, phases=Phases(steps=(11, 100)), generator=generator, resume=half.state, **QUICK)


@pytest.mark.parametrize("stop", [1, 3, 6, 8])
def test_the_order_of_a_shuffling_loader_is_restored(stop):
    def run(seed, callback=None, **options):
        generator = seeded(seed)
        loader = DataLoader(torch.stack(DATA), batch_size=2, shuffle=True, generator=generator)
        return fit(
            CURVE,
            lambda theta, b: square(theta, b[0]),
            loader,
            phases=Phases((3, 3), callback=callback),
            generator=generator,
            **QUICK,
            **options,
        )

    half = run(0, lambda step, *_: step == stop)
    assert torch.equal(run(1, resume=half.state).phi, run(0).phi)


def test_a_resumed_fit_on_a_curved_space_is_bitwise_equal():
    space = Product({"a": Sphere(3), "b": Flat(2)})
    start = space.random_point(generator=seeded(), dtype=torch.float64)
    options = {"start": start, "training": Training(rate=0.05), "generator": seeded()}
    loss = lambda theta, batch: (theta - 1).square().sum()  # noqa: E731
    whole = fit(Bezier(space), loss, DATA, phases=Phases(steps=(5, 6)), **options).phi
    half = fit(Bezier(space), loss, DATA, phases=Phases(steps=(5, 2)), **options | {"generator": seeded()})
    assert torch.equal(
        fit(Bezier(space), loss, DATA, phases=Phases(steps=(5, 6)), resume=half.state, **options).phi, whole
    )


def test_a_file_of_another_kind_is_rejected(tmp_path):
    SWA(Flat(3)).save(tmp_path / "average")
    with pytest.raises(CheckpointError, match="average"):
        fit(CURVE, square, DATA, phases=Phases(steps=(10, 100)), resume=tmp_path / "average", **QUICK)
    with pytest.raises(CheckpointError, match="missing"):
        fit(CURVE, square, DATA, phases=Phases(steps=(10, 100)), resume=tmp_path / "missing", **QUICK)


def test_fewer_batches_than_before_are_rejected():
    half = fit(CURVE, square, DATA, phases=Phases(epochs=(2, 0), callback=lambda step, *_: step == 2), **QUICK)
    with pytest.raises(ArgumentError, match="batches: expected at least the 3 batches of the stopped fit, got 2"):
        fit(CURVE, square, DATA[:2], phases=Phases(epochs=(2, 0)), resume=half.state, **QUICK)


def test_a_state_of_other_arguments_is_rejected():
    half = fit(CURVE, square, DATA, phases=Phases(epochs=(1, 1)), **QUICK)
    with pytest.raises(ArgumentError, match="resume: expected the state of a fit with the same arguments"):
        fit(CURVE, square, DATA, phases=Phases(epochs=(2, 2), alternate=True), resume=half.state, **QUICK)
    with pytest.raises(ArgumentError, match="resume: expected the state of a fit with the same arguments"):
        fit(CURVE, square, DATA, phases=Phases(epochs=(1, 2)), control=Control(free=[0, 1]), resume=half.state, **QUICK)
    with pytest.raises(ArgumentError, match=r"resume\['phi'\]: expected shape \(4, 3\)"):
        fit(Bezier(Flat(3), 3), square, DATA, phases=Phases(epochs=(2, 2)), resume=half.state, **QUICK)
