"""The Stiefel manifold, which consists of the matrices with orthonormal columns, with the Frobenius metric.

The exponential map has a closed form. The logarithm is computed by Newton's method.
"""

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
"""The number of Newton steps of a log, and the number of steps before the better of two starts is selected."""

MAX_STEP_LENGTH = 0.7
"""The maximum length of a Newton step. Longer steps leave the region of convergence."""


@dataclass(frozen=True)
class CertifiedLog:
    r"""A logarithm $\log_x y$ on the Stiefel manifold, with a certificate of its accuracy.

    The method `log` of [`Stiefel`][manifoldagg.manifolds.Stiefel] returns this object if `certificate=True`.

    Attributes:
        tangent: the tangent at $x$ that the iteration returns (*batch, n, p).
        residual: the error $\|\exp_x(\mathrm{tangent}) - y\|$ (*batch,) in float64, for $x$ and $y$ after
            orthonormalisation.
        converged: whether `tangent` is the logarithm (*batch,). This is the case if the residual is at the level of
            rounding errors, and `tangent` is provably the shortest tangent that `exp` maps to $y$.
    """

    tangent: Tangent
    residual: Float[Tensor, "..."]
    converged: Bool[Tensor, "..."]

    def __repr__(self) -> str:
        return format_result(self, tangent=self.tangent, residual=self.residual, converged=self.converged)


@dataclass(frozen=True)
class Stiefel(Embedded):
    r"""The $n \times p$ matrices with orthonormal columns, with $\langle u, v \rangle = \operatorname{tr}(u^\top v)$.

    For a tangent $u$ at $x$, the matrix $A = x^\top u$ is skew-symmetric. With $S = u^\top u$, the exponential is

    $$\exp_x u = [x, u]\; \exp\left(\left[A, -S;\; I, A\right]\right) [I;\, 0]\; e^{-A},$$

    which is smooth everywhere. Parallel transport has no closed form. Use
    `rungs * pole_ladder(space, x, y, u / rungs, rungs=rungs)`, whose error is proportional to $1/\mathrm{rungs}^2$.
    Without the scaling of `u`, an error of third order in its length remains.

    **Equation of the log.** $x$ and $y$ span at most $2p$ dimensions, and this span contains the shortest geodesic. Let
    $q$ (n, m), $m = \min(p, n - p)$, complete $x$ to an orthonormal basis of the span. The log $u = xA + qR$ solves

    $$\exp\left(\left[2A, -R^\top;\; R, 0\right]\right) [I;\, 0]\; e^{-A} = [x^\top y;\; q^\top y]$$

    for the $d = p(p-1)/2 + mp$ entries of $A$ and $R$.

    **Iteration.** `log` executes 12 Newton steps of length at most 0.7 with the exact derivative. It starts from two
    completions of the right-hand side to a rotation, and selects the better iterate after 4 steps. The first start is
    exact if $R = 0$, the second start if $A = 0$, and one of them for $p = 1$ and for $n = p$.

    **Cost.** A log costs $O(n p^2)$, and a step $O(d^3 + d p^3)$ time and $O(d p^2)$ complex numbers of memory. A log
    takes tens of milliseconds for $p \le 4$, about one second for $p = 16$, and one minute for $p = 32$.

    **Certificate.** `x` and `y` are orthonormalised first. They can have errors of 1 %, as in bfloat16. `log` returns
    NaN if the residual exceeds the rounding level $256 \sqrt{p}\, \varepsilon$ of float64. It also returns NaN if the
    tangent is not shorter than the injectivity radius, because a shorter tangent may then exist. For $n = p$, the
    second condition is that every angle is below $\pi$, and the result is NaN if $y$ is in the other component.
    `certificate=True` returns the result of the iteration in all cases.

    **Accuracy.** The log was tested on 9,000 pairs at each of several distances, for ten shapes from (2, 1) to (10, 4).
    The tangents were random, or had $A = 0$, $R = 0$, rank 1 or equal angles. At 0.6 and 0.9 times $\pi$, every log
    converged with errors below $10^{-14}$. At 0.95 and 0.98 times $\pi$, 1 and 31 logs did not converge and were NaN.

    **Other properties.**

    - All primitives are computed in float64 and cast back.
    - First and second derivatives are correct, also at $y = x$. Higher derivatives of `log`, `project` and `retract`
      are not correct.
    - The injectivity radius is $\pi$. For $n = p$, the orthogonal matrices, it is $\pi\sqrt{2}$. For $n = p = 1$, the
      manifold has two points, and the radius is infinite.
    - `project` is the polar factor $x (x^\top x)^{-1/2}$, the nearest point. Its derivative is finite if `x` has full
      rank. `retract` is the polar factor of $x + u$.
    - `random_point` is uniform (Haar measure), for $n = p$ in both components.

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
        # If xᵀx = 1 + E, a step reduces the error to -3E²/4. After three steps, an error of 1 % is about 1e-17.
        for _ in range(3):
            a = _reorthonormalise(a)
            b = _reorthonormalise(b)
        tangent = _logarithm(a, b)
        with torch.no_grad():
            residual = (_exponential(a, tangent) - b).square().sum((-2, -1)).sqrt().detach()
            square = tangent.detach().nan_to_num(nan=math.inf)
            # For n = p, the principal log of a rotation is the shortest if all angles are below π.
            length = _max_singular_value(square) if self.n == self.p else square.square().sum((-2, -1)).sqrt()
            # Each of the p unit columns has an error of a few ε, so the norm of the error is proportional to √p.
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
        # With a positive diagonal, the QR factors are unique, so the distribution of the first factor is invariant.
        signs = torch.where(triangle.diagonal(dim1=-2, dim2=-1) < 0, -1.0, 1.0)
        frame: Tensor = basis * signs.unsqueeze(-2)
        return frame.to(dtype)


def _project_to_tangent(x: Tensor, u: Tensor) -> Tensor:
    """Project the vector `u` onto the tangent space at `x`."""
    # The first projection leaves a normal component of about ε‖u‖ because of rounding. The second projection removes
    # this component.
    for _ in range(2):
        u = u - x @ sym(x.mT @ u)
    return u


def _reorthonormalise(x: Tensor) -> Tensor:
    """Apply one Newton step for the polar factor, which squares the error of orthonormality."""
    return x + x @ (eye(x, x.shape[-1]) - x.mT @ x) / 2


def _exponential(x: Tensor, u: Tensor) -> Tensor:
    """Compute exp_x u by the closed form of Edelman, Arias and Smith 1998."""
    p = x.shape[-1]
    u = _project_to_tangent(x, u)
    # The closed form requires a skew-symmetric A. A symmetric rounding error would change the result.
    turn = skew(x.mT @ u)
    gram = u.mT @ u
    # With the basis [x, u/c], c = ‖u‖, the exponent is almost a normal matrix. The value does not depend on c.
    scale = u.detach().square().sum((-2, -1), keepdim=True).sqrt()
    scale = torch.where(scale == 0, 1.0, scale)
    top = torch.cat([turn, -gram / scale], -1)
    bottom = torch.cat([(scale * eye(x, p)).expand(turn.shape), turn], -1)
    power = matrix_exp(torch.cat([top, bottom], -2))[..., :p]
    # The rounding errors of both exponentials grow with ‖u‖. A Newton step squares the error of orthonormality.
    return _reorthonormalise((x @ power[..., :p, :] + (u / scale) @ power[..., p:, :]) @ matrix_exp(-turn))


class _Linearisation(NamedTuple):
    """The derivative of a map F. Newton's method uses it to compute a logarithm on the Stiefel manifold.

    Let the columns of [x, q] be an orthonormal basis of the span of the columns of x and y. The logarithm of y at x is
    xA + qR, where A and R are unknown matrices. They solve the equation F(A, R) = [xᵀy; qᵀy]. The map is
    F(A, R) = e^W [I; 0] e^-A with the block matrix W = [2A, -Rᵀ; R, 0].
    """

    exp_w: Tensor  # e^W
    exp_a: Tensor  # e^A
    jacobian: Tensor  # the Jacobian (d, d) with respect to the entries that `_coordinates` returns
    normal_factor: Tensor  # the first p rows and columns of ∫ e^sW ds, for directions orthogonal to x and y


def _logarithm(x: Tensor, y: Tensor) -> Tensor:
    """Compute the logarithm of y at x by Newton's method, twice differentiable in x and y."""
    p = x.shape[-1]
    m = min(x.shape[-1], x.shape[-2] - x.shape[-1])
    # The iteration runs in a basis of the span of x and y, and without autograd.
    with torch.no_grad():
        a = x.detach()
        b = y.detach()
        # The computation uses y - x instead of y, which is accurate for small distances.
        step = b - a
        # A QR decomposition of both completes x to a basis even if the orthogonal part of y does not have full rank.
        q = torch.linalg.qr(torch.cat([a, step - a @ (a.mT @ step)], -1)).Q[..., p : p + m]
        frame = torch.cat([a, q], -1)
        unit = eye(a, p + m)[:, :p]
        target = unit + frame.mT @ step
        # Decompositions raise an error for the whole batch if one matrix is not finite. Such a matrix is replaced by
        # y = x here, and the residual below makes its result NaN.
        target = torch.where(target.isfinite().all(-1).all(-1)[..., None, None], target, unit)
        z = _solve(target)
        at = _linearise(z)
        value = frame @ z
        inverse = torch.linalg.inv_ex(at.normal_factor).inverse

    def solve(e: Tensor) -> Tensor:
        inside = frame.mT @ e
        tangent = frame @ _newton_step(at, inside)
        # A direction r orthogonal to the frame changes exp by r (∫ e^sW ds) e^-A to first order. This map is inverted.
        return tangent + ((e - frame @ inside) @ at.exp_a @ inverse if x.shape[-2] > p + m else 0)

    u = _project_to_tangent(x, value)
    # Two further Newton steps with autograd compute the derivatives.
    for _ in range(2):
        # The residual is 0, so the value does not change. Each pass makes the derivatives of one more order correct.
        residual = y - _exponential(x, u)
        u = _project_to_tangent(x, u + solve(residual - residual.detach()))
    return u


def _solve(target: Tensor) -> Tensor:
    """Solve the equation of the log for [A; R] (*batch, p + m, p). `target` is [xᵀy; qᵀy]."""
    z = _iterate(_initial_logs(target), target.unsqueeze(0), TRIAL_STEPS)
    at = _linearise(z)
    square = z.square().sum((-2, -1))
    unit = eye(z, z.shape[-2])[:, : z.shape[-1]]
    residual = (at.exp_w.mT @ target @ at.exp_a - unit).square().sum((-2, -1))
    # If both starts converge, the shorter solution is selected. Otherwise, the smaller residual decides.
    score = torch.where(residual < 1e-16, square - 1e3, residual)
    best = torch.where((score[-1] < score[0])[..., None, None], z[-1], z[0])
    return _iterate(best, target, MAX_NEWTON_STEPS - TRIAL_STEPS)


def _iterate(z: Tensor, target: Tensor, steps: int) -> Tensor:
    """Execute Newton steps of limited length from the starting value [A; R]."""
    for _ in range(steps):
        step = _newton_step(_linearise(z), target)
        # At a conjugate point, the derivative is singular and the step is not finite. The element then stays unchanged,
        # and the certificate reports that it did not converge.
        step = torch.where(step.isfinite(), step, 0.0)
        length = step.square().sum((-2, -1), keepdim=True).sqrt()
        z = z + step * (MAX_STEP_LENGTH / length).clamp(max=1.0)
    return z


def _initial_logs(target: Tensor) -> Tensor:
    """Compute starting values for the Newton iteration that computes the logarithm.

    Returns:
        The starting values [A; R] (1 or 2, *batch, p + m, p), two of them if m > 0.
    """
    # The columns of `target` are completed to a rotation. The first columns of the logarithm of this rotation are a
    # starting value. The additional columns are unknown, so there are two guesses for them.
    k, p = target.shape[-2:]
    top = target[..., :p, :]
    bottom = target[..., p:, :]
    whole = [target]
    if k > p:
        rest = torch.linalg.qr(target, mode="complete").Q[..., p:]
        left, _, right = torch.linalg.svd(bottom, full_matrices=False)
        along = left @ right
        whole = []
        # If R = 0, the remaining block of the rotation is the identity. If A = 0, it is cos √(RRᵀ). This is the top
        # block cos √(RᵀR), conjugated by the polar factor of the bottom block.
        for guess in (eye(target, k - p).expand(*target.shape[:-2], k - p, k - p), along @ sym(top) @ along.mT):
            one, _, other = torch.linalg.svd(rest[..., p:, :].mT @ guess)
            sign = torch.linalg.det(torch.cat([target, rest @ one @ other], -1)).sign()
            # The nearest completion with determinant 1 inverts the smallest singular direction (Kabsch 1976).
            one = torch.cat([one[..., :-1], one[..., -1:] * sign[..., None, None]], -1)
            whole.append(torch.cat([target, rest @ one @ other], -1))
    rotation = torch.stack(whole)
    # The symmetric and the skew part of a rotation commute, so they have common invariant subspaces.
    cosines, vectors = torch.linalg.eigh(sym(rotation))
    across = skew(rotation)
    sines = (across @ vectors).square().sum(-2).sqrt()
    ratios = torch.where(sines == 0, 1.0, torch.atan2(sines, cosines) / torch.where(sines == 0, 1.0, sines))
    return skew((vectors * ratios.unsqueeze(-2)) @ vectors.mT @ across)[..., :p]


def _newton_step(linearisation: _Linearisation, target: Tensor) -> Tensor:
    """Solve the linearised equation of `_Linearisation` for the Newton step [δA; δR]."""
    # The step is a linear function of the right-hand side `target`, so `target` can also be a small residual.
    e = _coordinates(linearisation.exp_w.mT @ target @ linearisation.exp_a)
    numbers = torch.linalg.solve_ex(linearisation.jacobian, e.unsqueeze(-1)).result.squeeze(-1)
    return _matrix(numbers, *target.shape[-2:])


def _linearise(z: Tensor) -> _Linearisation:
    """Compute the derivative of the left-hand side of the equation of the log at z = [A; R]."""
    p = z.shape[-1]
    # -iW is Hermitian, so its eigenvectors are orthonormal also for repeated angles.
    (mu, v), (nu, w) = (torch.linalg.eigh(-1j * a) for a in (_exponent(z), z[..., :p, :]))
    # gᵀ dg for g = e^W, and -(de^-A) e^A, which is the same expression in A. The coordinates of A come first.
    of_w = _coordinates(_left_derivative(mu, v, p))
    of_a = _coordinates(_left_derivative(nu, w, p))
    d = of_w.shape[-1]
    inner = of_a.shape[-1]
    # W contains 2A, so derivatives with respect to the coordinates of A are doubled.
    factor = 1 + (torch.arange(d, device=z.device) < inner).to(z.dtype)
    slopes = of_w * factor.unsqueeze(-1) - torch.nn.functional.pad(of_a, (0, d - inner, 0, d - inner))
    # (e^iμ - 1) / iμ, in a form that does not cancel at 0.
    average = torch.exp(0.5j * mu) * torch.sinc(mu / (2 * math.pi))
    return _Linearisation(
        ((v * torch.exp(1j * mu).unsqueeze(-2)) @ v.mH).real,
        ((w * torch.exp(1j * nu).unsqueeze(-2)) @ w.mH).real,
        slopes.mT,
        ((v * average.unsqueeze(-2)) @ v.mH).real[..., :p, :p],
    )


def _left_derivative(angles: Tensor, frame: Tensor, p: int) -> Tensor:
    """Compute e^-X ∂e^X/∂x for each entry x below the diagonal in the first p columns of X.

    Args:
        angles: the vector μ of the eigendecomposition X = V diag(iμ) V* of the skew-symmetric matrix X (k, k).
        frame: the matrix V.
        p: the number of columns.

    Returns:
        The first p columns of the matrices e^-X ∂e^X/∂x, (*batch, number of entries x, k, p).
    """
    k = frame.shape[-1]
    rows, columns = torch.tril_indices(k, p, -1, device=frame.device)
    gap = angles.unsqueeze(-1) - angles.unsqueeze(-2)
    # (1 - e^-iδ) / iδ, in a form that does not cancel at equal angles.
    slopes = torch.exp(-0.5j * gap) * torch.sinc(gap / (2 * math.pi))
    # V* (e_a e_bᵀ - e_b e_aᵀ) V for every pair (a, b). Then V (...) V* is computed as two products of large matrices.
    one = frame[..., rows, :]
    other = frame[..., columns, :]
    along = one.conj().unsqueeze(-1) * other.unsqueeze(-2) - other.conj().unsqueeze(-1) * one.unsqueeze(-2)
    right = (slopes.unsqueeze(-3) * along).flatten(-3, -2) @ frame[..., :p, :].mH
    transposed = right.unflatten(-2, (-1, k)).transpose(-3, -2).flatten(-2)
    result: Tensor = (frame @ transposed).real.unflatten(-1, (len(rows), p)).transpose(-3, -2)
    return result


def _exponent(z: Tensor) -> Tensor:
    """Return the exponent [2A, -Rᵀ; R, 0] of [A; R]."""
    k, p = z.shape[-2:]
    a = z[..., :p, :]
    r = z[..., p:, :]
    right = torch.cat([-r.mT, z.new_zeros(*z.shape[:-2], k - p, k - p)], -2)
    return torch.cat([torch.cat([2 * a, r], -2), right], -1)


def _coordinates(t: Tensor) -> Tensor:
    """Return the entries below the diagonal of a matrix [A; R], whose block A is skew-symmetric."""
    # The function ignores a symmetric part of A, and the diagonal of a skew-symmetric matrix is 0.
    k, p = t.shape[-2:]
    rows, columns = torch.tril_indices(k, p, -1, device=t.device)
    return torch.cat([skew(t[..., :p, :]), t[..., p:, :]], -2)[..., rows, columns]


def _matrix(numbers: Tensor, k: int, p: int) -> Tensor:
    """Return [A; R] (*batch, k, p) for given coordinates. This is the inverse of `_coordinates`."""
    rows, columns = torch.tril_indices(k, p, -1, device=numbers.device)
    # Entries on and above the diagonal get the index of a 0 that is appended to the coordinates.
    index = torch.full((k, p), len(rows), device=numbers.device)
    index[rows, columns] = torch.arange(len(rows), device=numbers.device)
    lower = torch.nn.functional.pad(numbers, (0, 1))[..., index]
    return torch.cat([lower[..., :p, :] - lower[..., :p, :].mT, lower[..., p:, :]], -2)


def _max_singular_value(u: Tensor) -> Tensor:
    """Return the largest singular value of each matrix, or infinity if the matrix is not finite."""
    finite = u.isfinite().all(-1).all(-1)
    values: Tensor = torch.linalg.svdvals(torch.where(finite[..., None, None], u, 0.0))
    return torch.where(finite, values.amax(-1), math.inf)
