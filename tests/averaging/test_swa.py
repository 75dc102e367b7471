"""Tests of averages of a run: bitwise equality to torch, the conventions of the papers, and certificates."""

import copy
import itertools
import math
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import AveragedModel

import manifoldagg.averaging.swa
from manifoldagg.averaging import SWA, karcher
from manifoldagg.curves import refresh_buffers
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import (
    Flat,
    Lorentz,
    LowRank,
    ParameterSpace,
    PoincareBall,
    Product,
    SpecialOrthogonal,
    Sphere,
    Stiefel,
    distance,
)
from manifoldagg.manifolds import SymmetricPositiveDefinite as Positive
from tests.support import draw, raises_under_trace, seeds

LINEAR = nn.Linear(2, 1)
NAMED = ParameterSpace.of(LINEAR)

counts = st.integers(1, 12)


def numbered(n):
    """Return the models 1 to n, where each model equals its version."""
    return [(v, torch.tensor([float(v)], dtype=torch.float64)) for v in range(1, n + 1)]


def updated(swa, models):
    for version, model in models:
        swa.update(version, model)
    return swa


def around(space, seed, n, size):
    """Return n points at distances of at most `size` from a random point."""
    generator = torch.Generator().manual_seed(seed)
    x = space.random_point(generator=generator, dtype=torch.float64)
    x = space.exp(torch.zeros_like(x), 0.3 * x / x.norm()) if isinstance(space, PoincareBall) else x
    at = x.expand(n, *x.shape)
    u = space.random_tangent(at, generator)
    return space.exp(at, size * u / space.inner(at, u, u).max().sqrt())


@given(seeds, counts, st.sampled_from([1, 7, 16385, (1 << 16) + 3]))
def test_flat_streaming_is_bitwise_equal_to_torch_averaged_model(seed, n, size):
    model = nn.Linear(size, 1, bias=False).double()
    space, theirs = ParameterSpace.of(model), AveragedModel(model)
    ours = SWA(space)
    for version in range(1, n + 1):
        space.load(model, draw(seed + version, size))
        theirs.update_parameters(model)
        ours.update(version, space.point(model))
        assert torch.equal(ours.average, space.point(theirs.module))


def test_flat_streaming_needs_memory_for_two_models():
    swa, memory = SWA(Flat(1000)), set()
    for version in range(1, 50):
        swa.update(version, draw(version, 1000))
        held = [x for x in [*vars(swa).values(), *vars(swa._state).values()] if isinstance(x, torch.Tensor)]
        # An expanded scalar stores the shape, dtype and device of the models.
        assert sum(x.untyped_storage().nbytes() for x in held) <= 8 * 2001
        assert swa.versions == ()
        memory.add(swa._state.mean.data_ptr())
    assert len(memory) == 2
    assert swa.count == 49


def test_flat_streaming_uses_the_kernels_in_chunks(monkeypatch):
    calls, real = [], manifoldagg.averaging.swa.combine

    def counted(*args, **options):
        calls.append(options["out"].numel())
        return real(*args, **options)

    monkeypatch.setattr(manifoldagg.averaging.swa, "combine", counted)
    size = (1 << 17) + 5
    updated(SWA(Flat(size)), [(1, draw(1, size)), (2, draw(2, size))])
    assert sum(calls) == 2 * size
    assert max(calls) <= 1 << 16  # No temporary has the size of a model.


@given(seeds, st.integers(2, 12))
def test_float32_models_are_averaged_in_float64(seed, n):
    models = [draw(seed + i, 50, dtype=torch.float32) for i in range(n)]
    swa = updated(SWA(Flat(50)), enumerate(models))
    exact = torch.stack(models).double().mean(0)
    assert swa.average.dtype == torch.float32
    # The rounding to float32 dominates those in float64.
    assert ((swa.average.double() - exact).abs() <= exact.abs() * 2.0**-24 + n * 2.0**-50).all()


@pytest.mark.parametrize(
    ("options", "versions"),
    [
        ({}, range(1, 13)),
        ({"start": 5}, range(5, 13)),
        ({"start": 5, "cycle": 3}, [6, 9, 12]),
        ({"cycle": 5}, [5, 10]),
        # Algorithm 1 of the report averages the models τ + 1 at τ = 6 and 9. Model 13 does not exist yet.
        ({"start": 5, "cycle": 3, "offset": 1}, [7, 10]),
        ({"start": 0, "cycle": 4, "offset": 1}, [1, 5, 9]),
    ],
)
@pytest.mark.parametrize("kind", ["streaming", "exact"])
def test_start_cycle_and_offset_select_the_averaged_versions(options, versions, kind):
    swa = updated(SWA(Flat(1), kind=kind, **options), numbered(12))
    assert swa.count == len(versions)
    assert swa.average.item() == pytest.approx(sum(versions) / len(versions), rel=1e-15)
    if kind == "exact":
        assert list(swa.versions) == list(versions)


def test_swa_equals_algorithm_1_of_the_report():
    """The reference is the loop of the report as printed."""
    total, start, cycle = 20, 8, 3
    models = dict(numbered(total))
    n, mean = 0, None
    for tau in range(total):
        if tau >= start and tau % cycle == 0:
            mean = models[tau + 1] if n == 0 else (mean * n + models[tau + 1]) / (n + 1)
            n += 1
    swa = updated(SWA(Flat(1), start=start, cycle=cycle, offset=1), numbered(total))
    assert swa.count == n
    assert swa.average.item() == pytest.approx(mean.item(), rel=1e-15)


@pytest.mark.parametrize("kind", ["streaming", "exact"])
def test_without_a_selected_version_the_last_model_is_returned(kind):
    swa, last = SWA(Flat(2), start=100, kind=kind), torch.tensor([1.0, 2.0])
    swa.update(3, last)
    assert swa.average is None
    assert swa.mean is None
    answer = swa.average_or(last)
    assert torch.equal(answer, last)
    assert answer.data_ptr() != last.data_ptr()
    swa.update(100, torch.zeros(2))
    assert torch.equal(swa.average_or(last), torch.zeros(2))


@pytest.mark.parametrize("kind", ["streaming", "exact"])
def test_a_periodic_reset_restarts_the_count(kind):
    swa = SWA(Flat(1), start=2, cycle=2, kind=kind, periodic=6)
    model, written = torch.tensor([0.0], dtype=torch.float64), {}
    for version in range(1, 16):
        model = model + 1
        swa.update(version, model)
        point = swa.reset_point(version)
        if point is not None:
            written[version], model = point.item(), point
    # The models 2, 4 and 6 have mean 4. Then 4 + 2, 4 + 4 and 4 + 6 have mean 8. Version 14 is 8 + 2.
    assert written == pytest.approx({6: 4.0, 12: 8.0}, rel=1e-15)
    assert (swa.count, swa.average.item()) == (1, pytest.approx(10.0, rel=1e-15))


@pytest.mark.parametrize("kind", ["streaming", "exact"])
def test_the_average_is_unchanged_after_a_reset_until_the_next_selected_version(kind):
    swa = updated(SWA(Flat(1), cycle=2, kind=kind, periodic=4), numbered(4))
    assert swa.reset_point(4).item() == 3
    assert swa.reset_point(4) is None  # Each version has at most one reset.
    assert (swa.count, swa.average.item()) == (0, 3.0)
    swa.update(5, torch.tensor([9.0], dtype=torch.float64))
    assert swa.average.item() == 3
    swa.update(6, torch.tensor([9.0], dtype=torch.float64))
    assert (swa.count, swa.average.item()) == (1, 9.0)


def test_reset_points_follow_the_offset():
    swa, points = SWA(Flat(1), cycle=2, offset=1, periodic=4), {}
    assert (swa.has_reset_points, SWA(Flat(1)).has_reset_points) == (True, False)
    for version, model in numbered(9):
        swa.update(version, model)
        points[version] = swa.reset_point(version)
    # τ = 4 and 8 are the versions 5 and 9. The averages are those of versions 1, 3, 5 and of versions 7, 9.
    # No cycle ends at τ = 0.
    assert {v: p.item() for v, p in points.items() if p is not None} == {5: 3.0, 9: 8.0}


@pytest.mark.parametrize("space", [Sphere(4), Positive(3), PoincareBall(3)], ids=str)
def test_certificates_of_curved_means_are_correct(space):
    models = around(space, 1, 9, 0.5)
    swa = updated(SWA(space, kind="exact"), enumerate(models))
    assert swa.mean.converged
    assert swa.mean.residual <= 1e-12 * models.abs().max().clamp(min=1)
    middle = swa.mean.point.expand_as(models)
    logs = space.log(middle, models).mean(0)
    # The stated and the recomputed residual are both below the error of ten roundings.
    assert space.inner(swa.mean.point, logs, logs).sqrt() <= 2e-12 * models.abs().max().clamp(min=1)
    assert torch.equal(swa.average, swa.mean.point)
    assert torch.equal(swa.average, karcher(space, models).point)


@pytest.mark.parametrize("space", [Sphere(4), Positive(3), PoincareBall(3)], ids=str)
def test_streaming_and_exact_differ_at_third_order(space):
    sizes = (0.4, 0.2, 0.1, 0.05)
    gaps = []
    for size in sizes:
        models = list(enumerate(around(space, 3, 6, size)))
        streaming, exact = (updated(SWA(space, kind=kind), models).average for kind in ("streaming", "exact"))
        gaps.append(distance(space, streaming, exact).item())
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(gaps)]
    assert slopes[-1] == pytest.approx(3, abs=0.2)
    assert slopes[-2] == pytest.approx(3, abs=0.2)


@given(seeds, st.integers(1, 8))
def test_a_flat_karcher_mean_is_the_weighted_mean(seed, k):
    models, weights = draw(seed, k, 300), draw(seed + 1, k).abs() + 0.01
    mean = karcher(Flat(300), models, weights)
    exact = (weights[:, None] * models).sum(0) / weights.sum()
    # Each entry has k products and sums, and each operation rounds once.
    assert ((mean.point - exact).abs() <= 4 * k * 2.0**-53 * models.abs().amax(0)).all()
    assert mean.converged
    residual = ((models - mean.point) * (weights / weights.sum())[:, None]).sum(0).norm()
    assert mean.residual.item() == pytest.approx(residual.item(), abs=1e-14)
    assert torch.equal(karcher(Flat(300), list(models), weights.tolist()).point, mean.point)


@pytest.mark.parametrize(
    "weights", [[1e308, 1e308], np.array([1.0, 1.0])[::-1], np.ones(2, ">f8"), np.broadcast_to(1.0, 2)]
)
def test_huge_weights_and_any_kind_of_array_are_accepted(weights):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = karcher(Flat(2), torch.tensor([[0.0, 2.0], [4.0, 6.0]]), weights)
    torch.testing.assert_close(mean.point, torch.tensor([2.0, 4.0]))


def test_the_tolerance_of_a_leaf_is_independent_of_other_leaves():
    space = Product({"far": Flat(1), "turn": SpecialOrthogonal(2), "low": LowRank(2, 2, 1)})
    turn = torch.linalg.matrix_exp(torch.tensor([[0.0, -1.0], [1.0, 0.0]]).double())
    points = [torch.cat([torch.tensor([1e12]), r.flatten(), torch.ones(4)]) for r in (torch.eye(2).double(), turn)]
    mean = karcher(space, points)
    assert mean.converged
    half = mean.point[1:5].view(2, 2)
    torch.testing.assert_close(half @ half, turn)


def test_the_karcher_mean_with_one_positive_weight_is_that_model():
    space = Sphere(5)
    models = around(space, 0, 3, 0.7)
    assert distance(space, karcher(space, models, [0.0, 1.0, 0.0]).point, models[1]) <= 1e-15


def test_batch_norm_statistics_are_recomputed_for_the_average():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    space, inputs = ParameterSpace.of(model), draw(5, 40, 3)
    swa = updated(SWA(space), [(v, space.point(model) + draw(v, *space.shape, scale=0.1)) for v in range(1, 5)])
    carried = refresh_buffers(space, model, swa.average, [{"input": inputs}])
    hidden = torch.nn.functional.linear(
        inputs, *(space.layout.views(swa.average)[f"0.{x}"] for x in ("weight", "bias"))
    )
    assert torch.allclose(carried["1.running_mean"], hidden.mean(0), atol=1e-14)


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("kind", ["streaming", "exact"])
@pytest.mark.parametrize("space", [Flat(4), Sphere(4)], ids=str)
def test_a_run_from_a_loaded_state_is_bitwise_equal(space, kind, in_file, tmp_path):
    models = list(enumerate(around(space, 2, 9, 0.5).float(), start=1))
    options = {"cycle": 2, "kind": kind, "periodic": 4}
    whole, first = SWA(space, **options), SWA(space, **options)
    for version, model in models:
        whole.update(version, model)
        whole.reset_point(version)
    for version, model in models[:5]:
        first.update(version, model)
        first.reset_point(version)
    state = first.state()
    second = SWA(space, **options)
    if in_file:
        first.save(tmp_path / "average")
    second.load(tmp_path / "average" if in_file else copy.deepcopy(state))
    updated(first, [(6, models[5][1])])  # Later updates do not change the state, because it is a copy.
    for version, model in models[5:]:
        second.update(version, model)
        second.reset_point(version)
    assert torch.equal(second.average, whole.average)
    assert (second.count, second.versions) == (whole.count, whole.versions)


def test_arguments_and_results_share_no_memory():
    for kind in ("streaming", "exact"):
        model = torch.ones(3)
        swa = SWA(Flat(3), kind=kind)
        swa.update(1, model)
        model.zero_()
        swa.average.zero_()
        if kind == "exact":
            swa.mean.point.zero_()
        assert torch.equal(swa.average, torch.ones(3))
        swa.update(2, torch.zeros(3))
        assert torch.equal(swa.average, torch.full((3,), 0.5))


def test_a_concurrent_read_is_consistent():
    swa, torn, done = SWA(Flat(200_000)), [], threading.Event()

    def read():
        while not done.is_set():
            average = swa.average
            if average is not None and not bool((average == average[0]).all()):
                torn.append(average)

    reader = threading.Thread(target=read)
    reader.start()
    for version in range(1, 60):
        swa.update(version, torch.full((200_000,), float(version)))
    done.set()
    reader.join()
    assert not torn


ONE, EAST = torch.ones(3), torch.eye(4, dtype=torch.float64)[:, :2]


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("space", "near", "far"),
    [
        (Sphere(3), torch.eye(3)[0], -torch.eye(3)[0]),
        (Stiefel(4, 2), EAST, -EAST),
        (Flat(2), EAST[0], -1.7e308 * EAST[0]),
    ],
    ids=str,
)
def test_a_model_without_a_geodesic_is_rejected_and_the_average_continues(space, near, far):
    swa, other = updated(SWA(space), [(1, near)]), SWA(space)
    with pytest.raises(ArgumentError, match="model: expected"):
        swa.update(2, far)
    assert (swa.count, swa.average.tolist()) == (1, near.tolist())
    other.load(swa.state())
    other.update(2, near)
    assert torch.allclose(other.average, near, atol=1e-15)


def test_a_long_streaming_average_stays_on_its_space():
    space = SpecialOrthogonal(3)
    swa = updated(SWA(space), enumerate(around(space, 0, 60, 0.5)))
    mean = swa.state()["mean"]
    assert (mean.mT @ mean - torch.eye(3)).abs().max() <= 1e-15  # Rounding errors do not accumulate over 60 steps.


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *(("streaming", {"like": like}) for like in (0.0, torch.ones(3))),
        *(("streaming", {"mean": mean}) for mean in (None, ONE)),
        *(("streaming", {"kept": kept}) for kept in (None, {1: ONE})),
        *(("exact", {"kept": kept}) for kept in ({1: ONE, 2: ONE.double()}, {"1": ONE, "2": ONE})),
        *(("exact", changes) for changes in ({"last": 1}, {"mean": ONE})),
    ],
)
def test_an_invalid_state_is_rejected_and_changes_nothing(kind, changes):
    state = updated(SWA(Flat(3), kind=kind), [(1, ONE), (2, 3 * ONE)]).state()
    swa = updated(SWA(Flat(3), kind=kind), [(7, 5 * ONE)])
    with pytest.raises(ArgumentError):
        swa.load(state | changes)
    assert (swa.count, swa.average.tolist()) == (1, [5.0, 5.0, 5.0])
    with pytest.raises(ArgumentError, match="version: expected a version above 7, got 6"):
        swa.update(6, ONE)


@pytest.mark.parametrize(
    ("space", "models", "scale"),
    [
        (Sphere(10_000), around(Sphere(10_000), 0, 3, 0.5), 1.0),
        (Lorentz(99), around(Lorentz(99), 0, 3, 9.0), None),
    ],
    ids=["sphere", "hyperboloid"],
)
def test_the_tolerance_is_on_the_root_mean_square_of_the_residual(space, models, scale):
    scale = models.abs().max().clamp(min=1).item() if scale is None else scale
    reached = karcher(space, models, max_steps=1).residual.item() / scale
    assert reached > 0
    for part, done in ((0.9, False), (1.1, True)):
        tolerance = part * reached / math.sqrt(models[0].numel())
        assert karcher(space, models, max_steps=1, tolerance=tolerance).converged is done


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: SWA(3), "space: expected a Manifold"),
        (lambda: SWA(LINEAR), r"space: expected a Manifold, got Linear: write ParameterSpace.of\(model\)"),
        (
            lambda: karcher(NAMED, [LINEAR.state_dict()] * 2),
            r"versions\[0\]: expected a point, got OrderedDict of 2 tensors; write space.point",
        ),
        (
            lambda: karcher(NAMED, [LINEAR]),
            r"versions\[0\]: expected a point, got Linear with .* parameters; write space.point\(model\)",
        ),
        (
            lambda: SWA(NAMED).update(1, LINEAR.state_dict()),
            "model: expected a point, got OrderedDict of 2 tensors; write space.point",
        ),
        (lambda: NAMED.points([LINEAR.state_dict()]), "models: expected a mapping from names to state dicts, got list"),
        (lambda: SWA(Flat(3), start=0.75), "start: expected an integer >= 0"),
        (lambda: SWA(Flat(3), start=-1), "start: expected an integer >= 0"),
        (lambda: SWA(Flat(3), cycle=0), "cycle: expected an integer >= 1"),
        (lambda: SWA(Flat(3), kind="running"), "kind: expected one of streaming, exact"),
        (lambda: SWA(Flat(3), offset=-1), "offset: expected an integer >= 0"),
        (lambda: SWA(Flat(3), periodic=0), "periodic: expected an integer >= 1"),
        (lambda: SWA(Flat(3)).update(1.0, ONE), "version: expected an integer"),
        (lambda: SWA(Flat(3)).update(-1, ONE), "version: expected an integer >= 0"),
        (lambda: SWA(Flat(3)).reset_point(1), "version: expected the latest version, -1, got 1"),
        (lambda: SWA(Flat(3)).load({}), r"state: expected the return value of SWA.state\(\)"),
        (
            lambda: SWA(Flat(3), kind="exact").load(updated(SWA(Flat(3)), [(1, ONE)]).state()),
            "state: expected the state of an SWA with .*exact",
        ),
        (lambda: karcher(Flat(3), []), "versions: expected at least one model"),
        (lambda: karcher(Flat(3), 5), "versions: expected at least one model, .* got int"),
        (lambda: karcher(Flat(3), [ONE, ONE[:2]]), r"versions\[1\]: expected shape \(3\)"),
        (lambda: karcher(Flat(3), [ONE, ONE.double()]), r"versions\[1\]: expected .*float32"),
        (lambda: karcher(Flat(3), [ONE * math.nan]), r"versions\[0\]: expected finite values"),
        (lambda: karcher(Sphere(3), [ONE]), r"versions\[0\]: expected a point of Sphere"),
        (lambda: karcher(Flat(3), [ONE, ONE], [1.0]), r"weights: expected one for each of 2 models, got shape \(1,\)"),
        (lambda: karcher(Flat(3), [ONE, ONE], [1.0, -1.0]), "weights: expected finite numbers >= 0"),
        (lambda: karcher(Flat(3), [ONE, ONE], [0.0, 0.0]), "weights: expected .* with a positive sum"),
        (lambda: karcher(Flat(3), [ONE, ONE], ["a", "b"]), "weights: expected 2 numbers"),
        (lambda: karcher(Flat(3), [ONE, ONE], [10**400, 1]), "weights: expected 2 numbers"),
        (lambda: karcher(Flat(3), [ONE, ONE], [10**5000, 1]), "weights: expected 2 numbers, got a huge list"),
        (lambda: karcher(Flat(3), [ONE, ONE], torch.tensor([1 + 2j, 1])), "weights: expected finite numbers >= 0"),
        (lambda: karcher(Flat(1), ONE[0]), "versions: expected at least one model, .* got a number"),
        (lambda: karcher(Flat(3), [ONE], tolerance=-1), "tolerance: expected a finite number >= 0"),
        (lambda: karcher(Flat(3), [ONE], max_steps=0), "max_steps: expected an integer >= 1"),
    ],
)
def test_invalid_input_is_rejected_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize("kind", ["streaming", "exact"])
@pytest.mark.parametrize(
    "bad",
    [(0, ONE), (1, ONE), (3, ONE[:2]), (3, ONE.double()), (3, ONE * math.inf), (3, ONE.int()), (3, [1.0, 2.0, 3.0])],
)
def test_a_rejected_version_changes_nothing(kind, bad):
    swa = updated(SWA(Flat(3), kind=kind), [(1, ONE), (2, 3 * ONE)])
    with pytest.raises(ArgumentError):
        swa.update(*bad)
    assert (swa.count, swa.average.tolist()) == (2, [2.0, 2.0, 2.0])
    swa.update(3, 5 * ONE)
    assert swa.average.tolist() == [3.0, 3.0, 3.0]


class Interrupt(BaseException):
    pass


def interrupted(call, at):
    """Interrupt `call` at the `at`-th call or return of a function of the package. Return whether it got that far."""
    left = [at]

    def trace(frame, event, arg):
        if "manifoldagg" not in frame.f_code.co_filename:
            return None
        if event in ("call", "return"):
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt
        return trace

    return raises_under_trace(call, trace, Interrupt)


@pytest.mark.usefixtures("as_shipped")
@pytest.mark.parametrize(
    ("space", "kind"), [(Flat(70_000), "streaming"), (Sphere(4), "streaming"), (Flat(4), "exact")], ids=str
)
def test_an_interrupted_update_is_atomic(space, kind):
    models = list(enumerate(around(space, 4, 5, 0.3), start=1))
    swa = updated(SWA(space, kind=kind), models[:3])
    state, before = swa.state(), swa.average
    after = updated(swa, models[3:4]).average
    last = updated(swa, models[4:]).average

    def update():
        swa.update(*models[3])

    at = 0
    while True:
        at += 1
        swa.load(state)
        if not interrupted(update, at):
            break
        assert torch.equal(swa.average, after if swa.count == 4 else before)
        update()  # Repeat the interrupted update.
        assert torch.equal(swa.average, after)
        update()  # A repeated update changes nothing.
        assert torch.equal(updated(swa, models[4:]).average, last)
    assert at > 10


def test_a_read_during_an_update_returns_the_previous_average(monkeypatch):
    """A signal handler can read the average in the same thread."""
    models = [(i, draw(i, 150_000)) for i in range(1, 5)]
    swa = updated(SWA(Flat(150_000)), models[:3])
    before, during, real = swa.average, [], manifoldagg.averaging.swa.combine

    def combine(*args, **options):
        during.append(swa.average)
        return real(*args, **options)

    monkeypatch.setattr(manifoldagg.averaging.swa, "combine", combine)
    swa.update(*models[3])
    assert len(during) == 6
    assert all(torch.equal(average, before) for average in during)


def test_repeating_the_latest_version_changes_nothing():
    for kind in ("streaming", "exact"):
        swa = updated(SWA(Flat(3), kind=kind, cycle=2), [(2, ONE), (3, ONE), (4, 3 * ONE)])
        swa.update(4, 9 * ONE)
        assert (swa.count, swa.average.tolist()) == (2, [2.0, 2.0, 2.0])
        with pytest.raises(ArgumentError, match="version: expected a version above 4, got 3"):
            swa.update(3, ONE)


def test_reads_do_not_block():
    """A signal handler would deadlock if it waited for a lock that the interrupted thread holds."""
    swa = SWA(Flat(2))
    swa.update(1, torch.ones(2))
    held, done, read = threading.Event(), threading.Event(), []

    def holds():
        with swa._lock:
            held.set()
            done.wait(60)

    thread = threading.Thread(target=holds)
    thread.start()
    held.wait(60)
    reader = threading.Thread(target=lambda: read.append((swa.average, swa.state()["count"])), daemon=True)
    reader.start()
    reader.join(30)
    done.set()
    thread.join(60)
    assert torch.equal(read[0][0], torch.ones(2))
    assert read[0][1] == 1


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_average_cannot_be_copied_and_names_its_state(copied):
    with pytest.raises(TypeError, match=r"^a SWA has a lock: .*; pass its `state\(\)` to `load`$"):
        copied(SWA(Flat(2)))
