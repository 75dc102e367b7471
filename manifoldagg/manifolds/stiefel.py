"""The Stiefel manifold in the Frobenius metric: exp in closed form, log by Newton's method."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, NamedTuple, overload

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_count, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.embedded import Embedded
from manifoldagg.manifolds.manifold import PRIMITIVES, Point, Scalar, Tangent
from manifoldagg.manifolds.matrix import eye, matrix_exp, polar, skew, sym

__all__ = ["CertifiedLog", "Stiefel"]

MAX_NEWTON_STEPS = 12
TRIAL_STEPS = 4
"""Newton steps of a log, and after how many of them the better of two starts is kept."""

MAX_STEP_LENGTH = 0.7
"""The longest Newton step; longer ones leave the neighbourhood in which they point to the solution."""


@dataclass(frozen=True)
class CertifiedLog:
    r"""A logarithm on [`Stiefel`][manifoldagg.manifolds.Stiefel] with its certificate.

    Attributes:
        tangent: (*batch, n, p), where the iteration ended.
        residual: (*batch,) in float64, $\|\exp_x(\mathrm{tangent}) - y\|$, for $x$ and $y$ made orthonormal.
        converged: (*batch,), whether the tangent is the logarithm: the residual is rounding, and the tangent is so
            short that there is no shorter one.
    """

    tangent: Tangent
    residual: Float[Tensor, "..."]
    converged: Bool[Tensor, "..."]

    def __repr__(self) -> str:
        return format_result(self, tangent=self.tangent, residual=self.residual, converged=self.converged)


@dataclass(frozen=True)
class Stiefel(Embedded):
    r"""Matrices with $p$ orthonormal columns in $\mathbb{R}^n$, in the Frobenius metric.

    $$\langle u, v \rangle = \operatorname{tr}(u^\top v).$$

    Tangents at $x$ have a skew $A = x^\top u$. With $S = u^\top u$,

    $$\exp_x u = [x, u]\; \exp\left(\left[A, -S;\; I, A\right]\right) [I;\, 0]\; e^{-A},$$

    smooth everywhere. There is not a closed form of parallel transport: use
    `rungs * pole_ladder(space, x, y, u / rungs, rungs=rungs)`, whose error falls with the square of the rungs; where
    `u` is not shortened with them, an error of third order in its length stays.

    **log.** $x$ and $y$ span at most $2p$ dimensions, and the shortest geodesic stays there: with
    $q$ (n, m), $m = \min(p, n - p)$, completing $x$ to an orthonormal frame of them and $u = xA + qR$, it solves

    $$\exp\left(\left[2A, -R^\top;\; R, 0\right]\right) [I;\, 0]\; e^{-A} = [x^\top y;\; q^\top y]$$

    in the $d = p(p-1)/2 + mp$ numbers of $A$ and $R$. `log` takes 12 Newton steps, none longer than 0.7, with the
    exact derivative in the eigenbasis of the exponents. It begins from two starts, logarithms of two completions of the
    right side to a rotation, and goes on from the better after 4 steps. The first is exact where $R = 0$, the second
    where $A = 0$, either for $p = 1$ and $n = p$. A log costs $O(n p^2)$ once, and a step $O(d^3 + d p^3)$ time and
    $O(d p^2)$ complex numbers of memory: tens of milliseconds for $p \le 4$, about a second for $p = 16$, a minute
    for $p = 32$.

    `x` and `y` are made orthonormal first (they may be off by a percent, as in bfloat16). Where the residual is not
    rounding ($256 \sqrt{p}\, \varepsilon$ of float64), or the tangent is not shorter than the injectivity radius, so
    that it need not be the shortest, `log` is NaN; `certificate=True` returns what was found. For $n = p$ it suffices
    that every angle is below $\pi$; there a $y$ in the other component is NaN.

    Of 9000 pairs each at 0.6 and 0.9 of $\pi$ (random tangents, and those with $A = 0$, $R = 0$, of rank 1 or with
    equal angles, for ten shapes from (2, 1) to (10, 4)) every log converged, with errors below $10^{-14}$; at 0.95
    and 0.98 all but 1 and 31 did, the others are NaN.

    Derivatives are those of the equation that the log solves, by two corrections after the iteration: right up to
    the second, also at $y = x$; the third and higher ones of `log`, `project` and `retract` are not.
    Everything is computed in float64 and cast back. The injectivity radius is $\pi$; for $n = p$, the orthogonal
    matrices, it is $\pi\sqrt{2}$, and infinite for $n = p = 1$, which is two points.

    `project` is the polar factor $x (x^\top x)^{-1/2}$, the nearest point; its derivative is finite where `x` has
    full rank. `retract` is that of $x + u$. `random_point` is uniform (Haar), for $n = p$ in both components.

    Args:
        n: the number of rows.
        p: the number of columns, at most `n`.

    Raises:
        ArgumentError: if `n` or `p` is not a positive integer, or `p` is larger than `n`.

    Source: Edelman, Arias, Smith 1998, §2.2.2; Zimmermann, Hüper 2022, for the reduced frame; Zimmermann, Stoye 2024,
        for the injectivity radius.

    Example:
        >>> import torch
        >>> x, y = torch.eye(3)[:, :2], torch.eye(3)[:, [0, 2]]
        >>> Stiefel(3, 2).log(x, y)
        tensor([[0.0000, 0.0000],
                [0.0000, 0.0000],
                [0.0000, 1.5708]])
    """

    n: int
    p: int
    capabilities: ClassVar[frozenset[str]] = PRIMITIVES - {"transport", "inverse_retract"}

    def __post_init__(self) -> None:
        check_count("n", self.n)
        if check_count("p", self.p) > self.n:
            raise ArgumentError(f"p: expected an integer <= n = {self.n}, got {short_repr(self.p)}")

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.n, self.p)

    def _exp(self, x: Point, u: Tangent) -> Point:
        return _exponential(x.double(), u.double()).to(x.dtype)

    @overload
    def log(self, x: Point, y: Point, *, certificate: Literal[False] = ...) -> Tangent: ...

    @overload
    def log(self, x: Point, y: Point, *, certificate: Literal[True]) -> CertifiedLog: ...

    def log(self, x: Point, y: Point, *, certificate: bool = False) -> Tangent | CertifiedLog:
        self._check({"x": x, "y": y})
        return self._certified_log(x, y) if certificate else self._log(x, y)

    def _log(self, x: Point, y: Point) -> Tangent:
        found = self._certified_log(x, y)
        return torch.where(found.converged[..., None, None], found.tangent, math.nan)

    def _certified_log(self, x: Tensor, y: Tensor) -> CertifiedLog:
        a, b = torch.broadcast_tensors(x.double(), y.double())
        # With xᵀx = 1 + E a step leaves -3E²/4: a percent, as of bfloat16, is 1e-17 after three.
        for _ in range(3):
            a = _reorthonormalise(a)
            b = _reorthonormalise(b)
        tangent = _logarithm(a, b)
        with torch.no_grad():
            residual = (_exponential(a, tangent) - b).square().sum((-2, -1)).sqrt().detach()
            square = tangent.detach().nan_to_num(nan=math.inf)
            # The principal log of a rotation is the shortest up to angles of π, whatever its length.
            length = _max_singular_value(square) if self.n == self.p else square.square().sum((-2, -1)).sqrt()
            # Each of the p unit columns is off by some ε: their norm grows with √p.
            exact = residual <= 256 * math.sqrt(self.p) * torch.finfo(torch.float64).eps
            converged = exact & (length < math.pi)
        return CertifiedLog(tangent.to(x.dtype), residual, converged)

    def _project_tangent(self, x: Point, u: Tangent) -> Tangent:
        return _project_to_tangent(x.double(), u.double()).to(u.dtype)

    def _project(self, x: Point) -> Point:
        return polar(x.double())[0].to(x.dtype)

    def _retract(self, x: Point, u: Tangent) -> Point:
        a = x.double()
        return polar(a + _project_to_tangent(a, u.double()))[0].to(x.dtype)

    def _injectivity_radius(self, x: Point) -> Scalar:
        square = math.inf if self.n == 1 else math.pi * math.sqrt(2)
        return x.new_full(x.shape[:-2], square if self.n == self.p else math.pi)

    def _random_point(self, batch: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype) -> Point:
        noise = torch.randn(*batch, self.n, self.p, generator=generator, dtype=torch.float64, device=generator.device)
        basis, triangle = torch.linalg.qr(noise)
        # With a positive diagonal the factors are unique, and so the law of the first one is invariant.
        signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        frame: Tensor = basis * signs.unsqueeze(-2)
        return frame.to(dtype)


def _project_to_tangent(x: Tensor, u: Tensor) -> Tensor:
    """Twice: after one pass what is left across the tangents is ε‖u‖, after two it is ε of what remains."""
    for _ in range(2):
        u = u - x @ sym(x.mT @ u)
    return u


def _reorthonormalise(x: Tensor) -> Tensor:
    """Newton's step to the polar factor: columns that are orthonormal up to e are so up to e² after it."""
    return x + x @ (eye(x, x.shape[-1]) - x.mT @ x) / 2


def _exponential(x: Tensor, u: Tensor) -> Tensor:
    p = x.shape[-1]
    u = _project_to_tangent(x, u)
    # The closed form is that of a skew A: what rounding left beside it would turn the frame.
    turn = skew(x.mT @ u)
    gram = u.mT @ u
    # A basis of [x, u/c] with c = ‖u‖ keeps the exponent nearly normal; the value does not depend on c.
    scale = u.detach().square().sum((-2, -1), keepdim=True).sqrt()
    scale = torch.where(scale == 0, 1.0, scale)
    top = torch.cat([turn, -gram / scale], -1)
    bottom = torch.cat([(scale * eye(x, p)).expand(turn.shape), turn], -1)
    power = matrix_exp(torch.cat([top, bottom], -2))[..., :p]
    # The rounding of both exponentials grows with ‖u‖; a step squares what it took from the frame.
    return _reorthonormalise((x @ power[..., :p, :] + (u / scale) @ power[..., p:, :]) @ matrix_exp(-turn))


class _Linearisation(NamedTuple):
    """The derivative of (A, R) ↦ e^W [I; 0] e^-A, W = [2A, -Rᵀ; R, 0], at one place."""

    exp_w: Tensor  # e^W
    exp_a: Tensor  # e^A
    jacobian: Tensor  # (d, d), of the numbers of _coordinates
    normal_factor: Tensor  # ∫ e^sW ds, its first p rows and columns: what directions orthogonal to x and y meet


def _logarithm(x: Tensor, y: Tensor) -> Tensor:
    p = x.shape[-1]
    m = min(x.shape[-1], x.shape[-2] - x.shape[-1])
    with torch.no_grad():
        a = x.detach()
        b = y.detach()
        # Of y only y - x is used, so that a small distance keeps its digits.
        step = b - a
        # A QR of both completes x where the rest of y has less than full rank, or none.
        q = torch.linalg.qr(torch.cat([a, step - a @ (a.mT @ step)], -1)).Q[..., p : p + m]
        frame = torch.cat([a, q], -1)
        unit = eye(a, p + m)[:, :p]
        target = unit + frame.mT @ step
        # Decompositions refuse what is not finite for a whole batch: it counts as y = x, and `miss` brings it back.
        target = torch.where(target.isfinite().all(-1).all(-1)[..., None, None], target, unit)
        z = _solve(target)
        at = _linearise(z)
        value = frame @ z
        inverse = torch.linalg.inv_ex(at.normal_factor).inverse

    def solve(e: Tensor) -> Tensor:
        inside = frame.mT @ e
        tangent = frame @ _newton_step(at, inside)
        # A direction r across the frame moves exp by r (∫ e^sW ds) e^-A to first order: that is undone.
        return tangent + ((e - frame @ inside) @ at.exp_a @ inverse if x.shape[-2] > p + m else 0)

    u = _project_to_tangent(x, value)
    for _ in range(2):
        # Adds nothing to the value; each pass makes one more order of the derivatives right.
        miss = y - _exponential(x, u)
        u = _project_to_tangent(x, u + solve(miss - miss.detach()))
    return u


def _solve(target: Tensor) -> Tensor:
    """[A; R] (*batch, p + m, p) from [xᵀy; qᵀy]."""
    z = _iterate(_initial_logs(target), target.unsqueeze(0), TRIAL_STEPS)
    at = _linearise(z)
    square = z.square().sum((-2, -1))
    unit = eye(z, z.shape[-2])[:, : z.shape[-1]]
    miss = (at.exp_w.mT @ target @ at.exp_a - unit).square().sum((-2, -1))
    # The shorter of two solutions, or what comes nearer to one.
    score = torch.where(miss < 1e-16, square - 1e3, miss)
    best = torch.where((score[-1] < score[0])[..., None, None], z[-1], z[0])
    return _iterate(best, target, MAX_NEWTON_STEPS - TRIAL_STEPS)


def _iterate(z: Tensor, target: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        step = _newton_step(_linearise(z), target)
        # A singular derivative, as at a conjugate point, has no step: the element waits for the certificate.
        step = torch.where(step.isfinite(), step, 0.0)
        length = step.square().sum((-2, -1), keepdim=True).sqrt()
        z = z + step * (MAX_STEP_LENGTH / length).clamp(max=1.0)
    return z


def _initial_logs(target: Tensor) -> Tensor:
    """(starts, *batch, p + m, p): logs of completions of `target` to a rotation, nearest to two guesses of the rest."""
    k, p = target.shape[-2:]
    top = target[..., :p, :]
    bottom = target[..., p:, :]
    whole = [target]
    if k > p:
        rest = torch.linalg.qr(target, mode="complete").Q[..., p:]
        left, _, right = torch.linalg.svd(bottom, full_matrices=False)
        along = left @ right
        whole = []
        # With R = 0 the rest of the rotation is 1. With A = 0 it is cos √(RRᵀ): the top block cos √(RᵀR), moved by
        # the polar factor of the bottom one.
        for guess in (eye(target, k - p).expand(*target.shape[:-2], k - p, k - p), along @ sym(top) @ along.mT):
            one, _, other = torch.linalg.svd(rest[..., p:, :].mT @ guess)
            sign = torch.linalg.det(torch.cat([target, rest @ one @ other], -1)).sign()
            # The nearest completion of determinant 1 turns the least singular direction (Kabsch 1976).
            one = torch.cat([one[..., :-1], one[..., -1:] * sign[..., None, None]], -1)
            whole.append(torch.cat([target, rest @ one @ other], -1))
    rotation = torch.stack(whole)
    # As for rotations: the symmetric and the skew part commute, and share their eigenvectors.
    cosines, vectors = torch.linalg.eigh(sym(rotation))
    across = skew(rotation)
    sines = (across @ vectors).square().sum(-2).sqrt()
    ratios = torch.where(sines == 0, 1.0, torch.atan2(sines, cosines) / torch.where(sines == 0, 1.0, sines))
    return skew((vectors * ratios.unsqueeze(-2)) @ vectors.mT @ across)[..., :p]


def _newton_step(linearisation: _Linearisation, target: Tensor) -> Tensor:
    """The step [δA; δR] to `target`; linear in it."""
    e = _coordinates(linearisation.exp_w.mT @ target @ linearisation.exp_a)
    numbers = torch.linalg.solve_ex(linearisation.jacobian, e.unsqueeze(-1)).result.squeeze(-1)
    return _matrix(numbers, *target.shape[-2:])


def _linearise(z: Tensor) -> _Linearisation:
    p = z.shape[-1]
    # -iW is Hermitian: its eigenvectors stay orthonormal where angles repeat.
    (mu, v), (nu, w) = (torch.linalg.eigh(-1j * a) for a in (_exponent(z), z[..., :p, :]))
    # gᵀ dg for g = e^W, and -(de^-A) e^A, which is the same expression in A. The coordinates of A come first.
    moved = _coordinates(_left_derivative(mu, v, p))
    still = _coordinates(_left_derivative(nu, w, p))
    both = moved.shape[-1]
    inner = still.shape[-1]
    # W holds 2A: the coordinates of A count twice.
    twice = 1 + (torch.arange(both, device=z.device) < inner).to(z.dtype)
    slopes = moved * twice.unsqueeze(-1) - torch.nn.functional.pad(still, (0, both - inner, 0, both - inner))
    # (e^iμ - 1) / iμ, which cancels at 0 as it stands.
    average = torch.exp(0.5j * mu) * torch.sinc(mu / (2 * math.pi))
    return _Linearisation(
        ((v * torch.exp(1j * mu).unsqueeze(-2)) @ v.mH).real,
        ((w * torch.exp(1j * nu).unsqueeze(-2)) @ w.mH).real,
        slopes.mT,
        ((v * average.unsqueeze(-2)) @ v.mH).real[..., :p, :p],
    )


def _left_derivative(angles: Tensor, frame: Tensor, p: int) -> Tensor:
    """e^-X d(e^X) for X = V diag(iμ) V* in each coordinate direction, its first p columns: (*batch, d, k, p)."""
    k = frame.shape[-1]
    rows, columns = torch.tril_indices(k, p, -1, device=frame.device)
    gap = angles.unsqueeze(-1) - angles.unsqueeze(-2)
    # (1 - e^-iδ) / iδ, which cancels at equal angles as it stands.
    slopes = torch.exp(-0.5j * gap) * torch.sinc(gap / (2 * math.pi))
    # V* (e_a e_bᵀ - e_b e_aᵀ) V for every pair, then V (...) V* as two products of large matrices.
    one = frame[..., rows, :]
    other = frame[..., columns, :]
    along = one.conj().unsqueeze(-1) * other.unsqueeze(-2) - other.conj().unsqueeze(-1) * one.unsqueeze(-2)
    right = (slopes.unsqueeze(-3) * along).flatten(-3, -2) @ frame[..., :p, :].mH
    swapped = right.unflatten(-2, (-1, k)).transpose(-3, -2).flatten(-2)
    turned: Tensor = (frame @ swapped).real.unflatten(-1, (len(rows), p)).transpose(-3, -2)
    return turned


def _exponent(z: Tensor) -> Tensor:
    """[2A, -Rᵀ; R, 0] of [A; R]."""
    k, p = z.shape[-2:]
    turn = z[..., :p, :]
    out = z[..., p:, :]
    right = torch.cat([-out.mT, z.new_zeros(*z.shape[:-2], k - p, k - p)], -2)
    return torch.cat([torch.cat([2 * turn, out], -2), right], -1)


def _coordinates(t: Tensor) -> Tensor:
    """The d numbers that determine [A; R] (*batch, k, p), the symmetric part of A ignored: first those of A."""
    k, p = t.shape[-2:]
    rows, columns = torch.tril_indices(k, p, -1, device=t.device)
    return torch.cat([skew(t[..., :p, :]), t[..., p:, :]], -2)[..., rows, columns]


def _matrix(numbers: Tensor, k: int, p: int) -> Tensor:
    """[A; R] (*batch, k, p) of its coordinates."""
    rows, columns = torch.tril_indices(k, p, -1, device=numbers.device)
    # What is not below the diagonal points at a zero behind the numbers.
    place = torch.full((k, p), len(rows), device=numbers.device)
    place[rows, columns] = torch.arange(len(rows), device=numbers.device)
    lower = torch.nn.functional.pad(numbers, (0, 1))[..., place]
    return torch.cat([lower[..., :p, :] - lower[..., :p, :].mT, lower[..., p:, :]], -2)


def _max_singular_value(u: Tensor) -> Tensor:
    """The largest singular value, infinite where `u` is not finite."""
    finite = u.isfinite().all(-1).all(-1)
    values: Tensor = torch.linalg.svdvals(torch.where(finite[..., None, None], u, 0.0))
    return torch.where(finite, values.amax(-1), math.inf)
