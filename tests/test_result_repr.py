"""Tests that the repr of a result is one short line without complete tensors or models."""

import numpy as np
import pytest
import torch
from torch import nn

from manifoldagg._result_repr import format_result
from manifoldagg.averaging import SWA, average, ensemble, fit_subspace, karcher
from manifoldagg.corrections import Frame, OrthoDC
from manifoldagg.curves import Bezier, Phases, barrier, curvature, fit, plane
from manifoldagg.manifolds import Flat, ParameterSpace, Power, Sphere, Stiefel
from manifoldagg.manifolds.mean import RunningMean

PHI = torch.tensor([[-1.0, 0.0], [0.0, 2.0], [1.0, 0.0]])
CURVE = Bezier(Flat(2))


def ridge(theta):
    return torch.exp(-theta.square().sum() * 3).item()


def scored_ensemble():
    model = nn.Linear(2, 3)
    curve = Bezier(ParameterSpace.of(model))
    data = [(torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))]
    single = torch.zeros(9)
    return ensemble(model, curve, curve.collapse(single), data, single=single, generator=torch.Generator(), draws=3)


def updated_swa():
    swa = SWA(Flat(2), start=1)
    swa.update(1, torch.zeros(2))
    return swa


def corrected():
    frame = Frame.of_points(PHI[:1], torch.zeros(2), torch.ones(2))
    return OrthoDC().apply(frame)


RESULTS = {
    "barrier": (lambda: barrier(CURVE, PHI, ridge), "Barrier(height=0.0556, at=0.15)"),
    "curvature": (lambda: curvature(CURVE, PHI), "Curvature(maximum=2, at=0.5, total=2.21)"),
    "plane": (
        lambda: plane(CURVE, PHI, lambda theta: theta[1].item(), resolution=5, others={"cubic": (CURVE, PHI)}),
        "Plane(values=Tensor of shape (5, 5), minimum=-0.5, maximum=2.5, others=['cubic'])",
    ),
    "path": (
        lambda: CURVE.at(PHI),
        "Path(curve=Bezier(space=Flat(n=2), degree=2), phi=Tensor of shape (3, 2))",
    ),
    "fit": (
        lambda: fit(CURVE, lambda theta, _: theta.sum() * 0 + 2, [None], start=PHI[0], phases=Phases(steps=(2, 1))),
        "Fit(phi=Tensor of shape (3, 2), steps=3, loss=2, converged=False)",
    ),
    "an unfitted curve": (
        lambda: fit(CURVE, lambda theta, _: theta.sum(), [None], start=PHI[0], phases=Phases(steps=(0, 0))),
        "Fit(phi=Tensor of shape (3, 2), steps=0, loss=None, converged=False)",
    ),
    "Karcher mean": (
        lambda: karcher(Flat(2), PHI),
        "KarcherMean(point=Tensor of shape (2,), residual=0, steps=1, converged=True)",
    ),
    "running mean": (
        lambda: RunningMean(Flat(2), PHI[0]),
        "RunningMean(space=Flat(n=2), point=Tensor of shape (2,), weight=1)",
    ),
    "log": (
        lambda: Stiefel(3, 2).log(torch.eye(3)[:, :2], torch.eye(3)[:, :2], certificate=True),
        "CertifiedLog(tangent=Tensor of shape (3, 2), residual=0, converged=True)",
    ),
    "subspace": (
        lambda: fit_subspace(torch.ones(5, 2), Bezier(Flat(2), degree=1)),
        "Subspace(embedding=Bezier(space=Flat(n=2), degree=1), value=0, steps=0, converged=True)",
    ),
    "score": (lambda: scored_ensemble().single, "Score(samples=4, accuracy=0.5, nll=1.1)"),
    "ensemble": (
        scored_ensemble,
        "Ensemble(combined=Score(samples=4, accuracy=0.5, nll=1.1), single=Score(samples=4, accuracy=0.5, nll=1.1), "
        "draws=3)",
    ),
    "SWA": (updated_swa, "SWA(kind='streaming', start=1, cycle=1, count=1)"),
    "average": (
        lambda: average([{"w": PHI}] * 5, return_info=True)[1],
        "AverageInfo(weights=tuple of 5 entries, residuals={}, steps={})",
    ),
    "frame": (
        lambda: Frame.of_points(PHI[:1], torch.zeros(2), torch.ones(2)),
        "Frame(rows=2, extra=(), segments=None)",
    ),
    "Gram matrix": (
        lambda: Frame.of_points(PHI[:1], torch.zeros(2), torch.ones(2)).gram(),
        "Gram(displacements=1, extra=(), segments=1)",
    ),
    "correction": (
        corrected,
        "Corrected(coefficients=ndarray of shape (1, 2), gram=Gram(displacements=1, extra=(), segments=1))",
    ),
    "parameter space": (
        lambda: ParameterSpace.of(nn.Linear(4, 8), {"weight": Power(Sphere(4), (8,))}, dtype=torch.float64),
        None,
    ),
    "layout": (
        lambda: ParameterSpace.of(nn.Sequential(*(nn.Linear(9, 9) for _ in range(9)))).layout,
        "Layout(size=810, leaves=18, buffers=0, aliases=0)",
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_the_repr_of_a_result_is_one_short_line(name):
    make, expected = RESULTS[name]
    text = repr(make())
    assert expected is None or text == expected
    assert len(text) <= 200
    assert text.isprintable()


def test_the_repr_of_tensors_and_long_containers_is_their_size():
    shown = {
        "x": [PHI],
        "y": {"a": PHI},
        "z": [1.0, 2.5],
        "long": list(range(5)),
        "nested": (np.ones(2), {"k": 0.12345}),
    }
    text = format_result(PHI, **shown)
    assert text.startswith("Tensor(x=list of 1 tensor, y=dict of 1 tensor, z=[1, 2.5], long=list of 5 entries, nested=")
