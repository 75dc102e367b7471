"""The function `check_manifold`, which tests mathematical laws of a manifold, such as log(x, exp(x, u)) = u."""

import math
from collections.abc import Iterable

import torch

from manifoldagg._validation import check_choice, check_count, check_number
from manifoldagg.errors import ArgumentError, ManifoldAggError
from manifoldagg.manifolds import Manifold, Validated, norm
from manifoldagg.testing.laws import LAWS, LawCase, min_injectivity_radius
from manifoldagg.testing.verdict import Finding, Verdict

__all__ = ["check_manifold"]

DISTANCES = (1e-7, 1e-3, 0.1, 0.7, 2.0)
MIN_DISTANCE_FLOAT32 = 1e-3


def check_manifold(
    space: Manifold,
    *,
    condition: float = 50.0,
    max_distance: float | None = None,
    seeds: int = 3,
    dtypes: Iterable[torch.dtype] = (torch.float32, torch.float64),
    laws: Iterable[str] | None = None,
    validate: bool = True,
    verbose: bool = True,
) -> Verdict:
    r"""Check that a manifold satisfies mathematical laws, such as $\log_x(\exp_x u) = u$.

    Use this function to test a manifold that you implement. It checks the laws in [`LAWS`][manifoldagg.testing.LAWS],
    except those that need a primitive (such as `log`) that the manifold does not implement. Each law is checked for
    random points and for random tangents of several lengths:

    - The lengths are 1e-7 (not in float32), 1e-3, 0.1, 0.7, 2, and the maximum length. Lengths above the maximum length
      are omitted.
    - The maximum length is 0.9 times the injectivity radius of the manifold, or 10 if this radius is infinite. The
      option `max_distance` can reduce it.

    If a primitive raises an exception, the law counts as broken, and its finding contains the exception.

    Args:
        space: a space with the primitives `random_point` and `random_tangent`, which generate the cases.
        condition: the condition number $\kappa$, the factor by which the formulas of the space may amplify rounding
            errors. The tolerances of the laws are proportional to it.
        max_distance: an upper limit for the length of a tangent. Set it for spaces such as hyperbolic space, where
            rounded coordinates represent distant points inaccurately.
        seeds: the number of random cases for each length and dtype.
        dtypes: the dtypes to check.
        laws: the names of the laws to check. By default, all laws are checked.
        validate: whether to wrap the space in [`Validated`][manifoldagg.manifolds.Validated], which checks that all
            points and tangents are valid.
        verbose: whether to print the verdict.

    Returns:
        The verdict. In a test, assert that `verdict.holds` is true.

    Raises:
        ArgumentError: if an argument is invalid, or if all tangents of the space are 0.

    Example:
        >>> from manifoldagg.manifolds import Sphere
        >>> check_manifold(Sphere(3), verbose=False).holds
        True
    """
    check_count("seeds", seeds)
    check_number("condition", condition, above=0)
    if max_distance is not None:
        check_number("max_distance", max_distance, above=0)
    names = set(LAWS) if laws is None else {check_choice("laws", name, LAWS) for name in laws}
    dtypes = tuple(dtypes)
    if not (dtypes and names):
        raise ArgumentError("dtypes, laws: expected at least one of each, got an empty sequence")
    chosen = {name: entry for name, entry in LAWS.items() if name in names}
    subject = Validated(space) if validate else space
    findings = []
    for name, (primitives, law) in chosen.items():
        if not primitives <= space.capabilities:
            continue
        worst = Finding(name, 0.0, "")
        for dtype in dtypes:
            for t in _distances(space, dtype, max_distance):
                for seed in range(seeds):
                    where = f" (t = {t:.3g}, {dtype}, seed {seed})"
                    try:
                        error, allowed = law(LawCase(subject, seed, dtype, t, condition))
                        ratio = error / allowed if allowed > 0 else (0.0 if error == 0 else math.inf)
                    except (ManifoldAggError, RuntimeError, NotImplementedError) as exception:
                        ratio = math.inf
                        where = f"{where}: {type(exception).__name__}: {exception}"
                    if not ratio <= worst.ratio:
                        worst = Finding(name, math.inf if math.isnan(ratio) else ratio, where)
        findings.append(worst)
    verdict = Verdict(str(space), tuple(findings))
    if verbose:
        print(verdict)
    return verdict


def _distances(space: Manifold, dtype: torch.dtype, max_distance: float | None) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    point = space.random_point(1, generator=generator, dtype=dtype)
    if {"inner", "random_tangent"} <= space.capabilities:
        tangent = space.random_tangent(point, generator)
        if norm(space, point, tangent).max().item() < 1e-12:
            raise ArgumentError(f"space: expected a space with tangents other than 0, got {space}")
    radius = min_injectivity_radius(space, point)
    last = min(0.9 * radius if math.isfinite(radius) else 10.0, math.inf if max_distance is None else max_distance)
    least = MIN_DISTANCE_FLOAT32 if dtype is torch.float32 else 0.0
    return sorted({t for t in (*DISTANCES, last) if least <= t <= last})
