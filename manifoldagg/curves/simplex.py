"""Simplices: the hull of a few models, its volume, its nearest points, and ensembles drawn from it."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_count, check_number, check_shape, is_finite
from manifoldagg.curves.barycentre import check_barycentric, weighted_mean
from manifoldagg.curves.embedding import Coordinates, Embedding, rounding_error
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import combine, gram
from manifoldagg.kernels.operands import needs_autograd_path
from manifoldagg.manifolds import Manifold
from manifoldagg.manifolds.formulas import norm
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["Hull", "Simplex"]

EPS = torch.finfo(torch.float64).eps
TINY = torch.finfo(torch.float64).tiny


class Hull(Embedding):
    r"""An embedding of combinations of the points of $\varphi$, whose places are barycentric coordinates."""

    @property
    def domain(self) -> tuple[int, ...]:
        return (self.size,)

    def __call__(self, phi: Float[Tensor, "size ..."], x: Coordinates) -> Float[Tensor, "..."]:
        r"""The points $\iota_\varphi(x)$.

        Args:
            phi: the vertices (size, *space.shape).
            x: barycentric coordinates (*batch, size).

        Returns:
            (*batch, *space.shape) in the dtype of `phi`; a vertex where `x` is one.

        Raises:
            ArgumentError: if a shape differs, or an entry of `x` is negative or its sum not 1, beyond the square root
                of its dtype's precision; functorch transforms hide values, so that only shapes are checked there;
                of a complex, if no face holds all vertices of a place.
            DivergenceError: if the Karcher mean is not found: the vertices lie too far apart.
        """
        self._check_phi(phi)
        weights = self.weights(x).to(phi.device)
        if not self.space.flat:
            return self._curved_mean(phi, x, weights)
        rows = phi.flatten(1)
        flat = combine(None, rows, weights) if weights.ndim == 1 else (weights @ rows.double()).to(phi.dtype)
        return flat.reshape(*weights.shape[:-1], *phi.shape[1:])

    def weights(self, x: Coordinates) -> Float64[Tensor, "..."]:
        """Return the float64 weights of the vertices at `x` (*batch, size): `x` over its sum."""
        weights = check_barycentric(x, self.size).double()
        return weights / weights.sum(-1, keepdim=True)

    def pull_phi(
        self, phi: Float[Tensor, "size ..."], x: Coordinates, w: Float[Tensor, "..."]
    ) -> Float[Tensor, "size ..."]:
        r"""Pull derivatives `w` (*batch, *space.shape) at $\iota_\varphi(x)$ back to the vertices: flat, $x_i w$."""
        if not self.space.flat:
            return super().pull_phi(phi, x, w)
        self._check_phi(phi)
        weights = self.weights(x).to(phi.device)
        check_shape("w", w, *weights.shape[:-1], *self.space.shape)
        rows = w.double().reshape(weights.shape[:-1].numel(), phi[0].numel())
        return (weights.reshape(len(rows), self.size).mT @ rows).to(phi.dtype).reshape(phi.shape)

    def contains(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."], tolerance: float | None = None
    ) -> Tensor:
        r"""Return whether points (*batch, *space.shape) are within `tolerance` of the image: (*batch,).

        The default is the rounding of $\iota_\varphi$: $4\,$`size`$\,\varepsilon \max_i \|\varphi_i\|$, $\varepsilon$
        of the coarser dtype. Errors are those of `nearest`, and one for a negative `tolerance`.
        """
        _, distances = self.nearest(phi.detach(), point.detach())
        if tolerance is None:
            tolerance = 4 * self.size * rounding_error(phi, point)
        return distances <= check_number("tolerance", tolerance, at_least=0)

    def ensemble(
        self,
        phi: Float[Tensor, "size ..."],
        predict: Callable[[Tensor], Tensor],
        num_draws: int,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        r"""Compute $\frac1n \sum_j f(\iota_\varphi(x_j))$, the mean prediction of n draws, one model at a time.

        Args:
            phi: the points that draw the embedding.
            predict: $f$, from a point (*space.shape) to a floating tensor of one shape, such as class probabilities.
            num_draws: $n$.
            generator: of the draws.

        Returns:
            A tensor like those of `predict`, without derivatives, summed in float64.

        Raises:
            ArgumentError: if `num_draws` is no positive integer, or predictions are no floating tensors of one shape.
        """
        total = made = torch.zeros(())
        with torch.no_grad():
            for n, x in enumerate(self.sample(check_count("num_draws", num_draws), generator=generator)):
                made = predict(self(phi, x))
                check_shape("predict", made, *getattr(total if n else made, "shape", ()))
                total = total.to(made.device) + made.double()
        return (total / num_draws).to(made.dtype)

    def _curved_mean(self, phi: Tensor, x: Coordinates, weights: Tensor) -> Tensor:
        """The points of a curved space: Karcher means."""
        points = phi.expand(*weights.shape[:-1], *phi.shape)
        return weighted_mean(self.space, points.double(), weights).to(phi.dtype)


@dataclass(frozen=True)
class Simplex(Hull):
    r"""The simplex whose vertices are $\varphi_0, \dots, \varphi_k$, in barycentric coordinates.

    A place is $x \in \mathbb{R}^{k+1}$ with $x_i \ge 0$ and $\sum_i x_i = 1$, and

    $$\iota_\varphi(x) = \sum_i x_i\, \varphi_i, \qquad \sum_i x_i \log_{\iota_\varphi(x)} \varphi_i = 0,$$

    the first on a flat space, the second, the weighted Karcher mean, on a curved one.
    $x$ is divided by its sum, so that derivatives do not see a change of the sum: on a flat space $d\iota(x)\,u =
    \sum_i u_i (\varphi_i - \iota(x))$, which is $\sum_i u_i \varphi_i$ for the tangents, $\sum_i u_i = 0$.

    On a curved space the mean is found to $10^{-12}$ and has the derivatives, in $\varphi$ and $x$, of the equation
    that it solves, by two Newton steps with the exact Hessian: right up to the second, the third and higher ones are
    not. Factors of a product and copies of a power are solved apart; $D$ coordinates cost $O(D^3)$ where derivatives
    are followed. Volumes and nearest points are those of flat spaces: a curved simplex has no closed form of either.

    Args:
        space: with exp, log, inner, project and project_tangent, unless it is flat.
        vertices: $k + 1 \ge 1$; $\varphi$ has shape (vertices, *space.shape).

    Raises:
        ArgumentError: if `space` is not a manifold or `vertices` no positive integer.

    Source: Benton, Maddox, Lotfi, Wilson 2021.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> triangle = Simplex(Flat(2), vertices=3)
        >>> phi = torch.tensor([[0.0, 0.0], [4.0, 0.0], [0.0, 2.0]])
        >>> triangle(phi, torch.tensor([0.25, 0.5, 0.25]))
        tensor([2.0000, 0.5000])
        >>> triangle.volume(phi)
        tensor(4., dtype=torch.float64)
    """

    space: Manifold
    vertices: int

    def __post_init__(self) -> None:
        check_count("vertices", self.vertices)
        check_is_manifold(self.space)

    @property
    def size(self) -> int:
        return self.vertices

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "..."]:
        """Draw places (*batch, k + 1) uniformly: Dirichlet(1, ..., 1), by normalised exponential variables."""
        device = None if generator is None else generator.device
        spacings = torch.empty(*batch, self.vertices, dtype=torch.float64, device=device)
        spacings.exponential_(generator=generator)
        return spacings / spacings.sum(-1, keepdim=True)

    def log_volume(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, ""]:
        r"""Compute $\tfrac12 \log\det(E E^\top) - \log k!$ in float64, $E$ the edges $\varphi_i - \varphi_0$; flat.

        It is $\sum_i \log(h_i / i)$, the heights $h_i$ the pivots of the Cholesky factor of $E E^\top$. The error is
        about $\varepsilon / \sin^2\alpha$, $\alpha$ the smallest angle of an edge with the span of those before it.
        Where $\sin\alpha$ is rounding, below $\sqrt{8 k \varepsilon}$, the simplex is degenerate: $-\infty$, with
        gradient 0. A single vertex has volume 1. It costs one pass over `phi`.

        Raises:
            ArgumentError: if the space is curved, or `phi` has another shape or edges without a finite square.
        """
        parts, solid = self._heights(phi)
        return torch.where(solid, parts.log().sum(), -math.inf)

    def volume(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, ""]:
        r"""Compute $\sqrt{\det(E E^\top)} / k! = \prod_i h_i / i$; 0 if the simplex is degenerate."""
        parts, solid = self._heights(phi)
        return torch.where(solid, parts.prod(), 0.0)

    def log_volume_gradient(self, phi: Float[Tensor, "size ..."]) -> Float[Tensor, "size ..."]:
        r"""Compute the gradient of `log_volume`: $B^\top (E E^\top)^{-1} E$, $E = B \varphi$, 0 at $-\infty$.

        Returns:
            (k + 1, *space.shape) in the dtype of `phi`, combinations of the edges that carry no derivative:
            $\sum_i \langle \varphi_i, g_i \rangle = k$ and $\sum_i g_i = 0$.
        """
        vertices = phi.detach()
        factor, solid = _cholesky(self._edge_gram(vertices))
        if self.vertices == 1 or not bool(solid):
            return torch.zeros_like(vertices)
        inverse = torch.cholesky_inverse(factor)
        rows = vertices.flatten(1)
        coefficients = torch.cat([-inverse.sum(0, keepdim=True), inverse])
        return torch.stack([combine(None, rows[1:], c, minus=rows[0]) for c in coefficients]).reshape(phi.shape)

    def nearest(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]
    ) -> tuple[Float64[Tensor, "..."], Float64[Tensor, "..."]]:
        r"""Compute $\min_x \|\iota_\varphi(x) - p\|$ over the simplex on a flat space: the place and the distance.

        Returns:
            For points (*batch, *space.shape) $x$ (*batch, k + 1), without derivatives, and the distances (*batch,),
            both float64. Distances have the first derivatives of the minimum in `phi` and `point`, 0 where they vanish;
            higher ones take $x$ for fixed.

        Raises:
            ArgumentError: if the space is curved, or a shape differs or a value is not finite.

        Source: Wolfe 1976: an active set, each face solved exactly in k coordinates of the edges' span.

        Example:
            >>> import torch
            >>> from manifoldagg.manifolds import Flat
            >>> Simplex(Flat(2), 2).nearest(torch.eye(2), torch.tensor([1.0, 1.0]))[0]
            tensor([0.5000, 0.5000], dtype=torch.float64)
        """
        self._require_flat("nearest points")
        self._check_phi(phi)
        batch = check_shape("point", point, *self.space.shape, batch=True).shape[: point.ndim - len(self.space.shape)]
        rows = phi.double().flatten(1)
        edges = rows - rows[0]
        ways = point.double().reshape(-1, math.prod(self.space.shape)) - rows[0]
        # In an orthonormal basis of the edges: a Gram matrix would square their condition.
        basis, columns = torch.linalg.qr(edges[1:].detach().mT)
        corners = torch.cat([columns.new_zeros(1, len(columns)), columns.mT]).cpu()
        targets = ways.detach() @ basis
        if not all(map(is_finite, (edges, ways, corners, targets))):
            raise ArgumentError("phi, point: expected finite values, whose distances are finite")
        x = targets.new_zeros(len(targets), self.vertices)
        for line, target in zip(x, targets.cpu(), strict=True):
            line.copy_(_nearest_on_simplex(corners, target))
        gaps = (ways - x @ edges).reshape(-1, *self.space.shape)
        distances = norm(self.space, gaps, gaps)
        return x.reshape(*batch, self.vertices), distances.reshape(batch)

    def add_vertex(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]
    ) -> tuple[Float[Tensor, "more ..."], "Simplex"]:
        r"""Append a vertex of the same dtype and device to $\varphi$, and return it with the larger simplex."""
        self._check_phi(phi)
        self.space._check({"phi": phi, "point": check_shape("point", point, *self.space.shape)})
        return torch.cat([phi, point.unsqueeze(0)]), replace(self, vertices=self.vertices + 1)

    def _heights(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """The heights by their number, $h_i / i$, and whether the simplex is solid (ones if it is not)."""
        inner = self._edge_gram(phi)
        solid = _cholesky(inner.detach())[1]
        safe = torch.where(solid, inner, torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
        heights = torch.linalg.cholesky(safe).diagonal()
        return heights / torch.arange(1, self.vertices, device=inner.device), solid

    def _edge_gram(self, phi: Tensor) -> Tensor:
        """The Gram matrix (k, k) of the edges."""
        self._require_flat("volumes")
        self._check_phi(phi)
        rows = phi.flatten(1)
        inner = gram(rows[1:], minus=rows[0])[0] if len(rows) > 1 else rows.new_zeros(0, 0, dtype=torch.float64)
        if not needs_autograd_path([inner.detach()]) and not is_finite(inner):
            raise ArgumentError("phi: expected finite vertices, with edges whose squared lengths are finite")
        return inner

    def _require_flat(self, operation: str) -> None:
        if not self.space.flat:
            raise ArgumentError(f"space: expected a flat one, curved {operation} have no closed form; got {self.space}")


def _cholesky(inner: Tensor) -> tuple[Tensor, Tensor]:
    """The Cholesky factor, and whether its pivots are more than rounding."""
    factor, info = torch.linalg.cholesky_ex(inner)
    return factor, (info == 0) & (factor.diagonal().square() > 8 * len(inner) * EPS * inner.diagonal()).all()


def _nearest_on_simplex(vertices: Tensor, target: Tensor) -> Tensor:
    r"""$\min_x \|\sum_i x_i c_i - t\|$ over the simplex, by faces that each improve on the one before."""
    x = torch.zeros_like(vertices.sum(-1)).index_fill(0, (vertices - target).square().sum(-1).argmin(), 1.0)
    reach = math.sqrt(vertices.square().sum(-1).max().item() + target.square().sum().item())
    while (gap := x @ vertices - target).norm() > EPS * reach:
        slopes = vertices @ gap
        # A thin simplex has vertices whose descent is below the rounding of its slope: they are tried.
        steep = (x == 0) & (slopes <= x @ slopes + 8 * len(x) * EPS * reach**2)
        tried = (_add_vertex_to_face(vertices, target, x, i) for i in slopes.argsort().tolist() if steep[i])
        better = next((y for y in tried if (y @ vertices - target).norm() < gap.norm()), None)
        if better is None:
            break
        x = better
    return x


def _add_vertex_to_face(vertices: Tensor, target: Tensor, x: Tensor, vertex: int) -> Tensor:
    """The nearest place of the face of x and one vertex more, or of a face of that: a walk there that never climbs."""
    face = (x > 0).index_fill(0, torch.tensor(vertex), True)
    while True:
        first, *others = face.nonzero().squeeze(-1).tolist()
        edges = (vertices[others] - vertices[first]).mT
        best = torch.zeros_like(x)
        if others:
            best[others] = torch.linalg.lstsq(edges, (target - vertices[first])[:, None], driver="gelsd").solution[:, 0]
        best[first] = 1 - best.sum()
        blocked = face & (best <= 0)
        if not bool(blocked.any()):
            return best
        # As far as the first coordinate that vanishes, and on without it.
        parts = torch.where(blocked, x / (x - best).clamp(min=TINY), math.inf)
        face = face & (parts > parts.min())
        x = torch.where(face, (x + parts.min() * (best - x)).clamp(min=0), 0.0)
