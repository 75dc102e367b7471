"""Simplices of models, with their volumes, nearest points and ensembles.

A simplex is the convex hull of its vertices, and the vertices are models. Each point of a simplex is a weighted mean of
the vertices. The weights are called barycentric coordinates.
"""

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
    """Base class for embeddings whose points are weighted means of their control points.

    The weights are barycentric coordinates, which are nonnegative and sum to 1.
    """

    @property
    def domain(self) -> tuple[int, ...]:
        return (self.size,)

    def __call__(self, phi: Float[Tensor, "size ..."], x: Coordinates) -> Float[Tensor, "..."]:
        r"""Compute the points $\iota_\varphi(x)$.

        Args:
            phi: the vertices (size, *space.shape).
            x: barycentric coordinates (*batch, size). They must be nonnegative with the sum 1, up to the square root of
                the machine epsilon of their dtype.

        Returns:
            The points (*batch, *space.shape) in the dtype of `phi`. The coordinates of a vertex map to this vertex.

        Raises:
            ArgumentError: if a shape or a value of `x` is invalid. For a simplicial complex, also if no face contains
                all vertices with nonzero coordinates. Inside `torch.func` transforms, only shapes are checked, because
                the values are not accessible.
            DivergenceError: if the Karcher mean is not found because the vertices are too far apart.
        """
        self._check_phi(phi)
        weights = self.weights(x).to(phi.device)
        if not self.space.flat:
            return self._curved_mean(phi, x, weights)
        rows = phi.flatten(1)
        # `combine` sums in float64 without copies of the vertices. A batch is one matrix product.
        flat = combine(None, rows, weights) if weights.ndim == 1 else (weights @ rows.double()).to(phi.dtype)
        return flat.reshape(*weights.shape[:-1], *phi.shape[1:])

    def weights(self, x: Coordinates) -> Float64[Tensor, "..."]:
        """Return the float64 weights of the vertices at `x` (*batch, size): `x` divided by its sum."""
        weights = check_barycentric(x, self.size).double()
        return weights / weights.sum(-1, keepdim=True)

    def pull_phi(
        self, phi: Float[Tensor, "size ..."], x: Coordinates, w: Float[Tensor, "..."]
    ) -> Float[Tensor, "size ..."]:
        """Compute the derivative of a loss with respect to the vertices, by the chain rule.

        The coordinates `x` and the vertices determine a batch of points. The argument `w` (*batch, *space.shape) is the
        derivative of the loss with respect to these points. On a flat space, the derivative with respect to vertex $i$
        is the sum of $x_i w$ over the batch.
        """
        if not self.space.flat:
            return super().pull_phi(phi, x, w)
        self._check_phi(phi)
        weights = self.weights(x).to(phi.device)
        check_shape("w", w, *weights.shape[:-1], *self.space.shape)
        # The sum over a batch is accumulated in float64 and rounded once.
        rows = w.double().reshape(weights.shape[:-1].numel(), phi[0].numel())
        return (weights.reshape(len(rows), self.size).mT @ rows).to(phi.dtype).reshape(phi.shape)

    def contains(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."], tolerance: float | None = None
    ) -> Tensor:
        r"""Return whether each given point is within `tolerance` of the simplex or simplicial complex.

        Args:
            phi: the vertices (size, *space.shape).
            point: points (*batch, *space.shape).
            tolerance: the maximum distance. The default allows for rounding errors. It is
                $4\,$`size`$\,\varepsilon \max_i \|\varphi_i\|$ for the vertices $\varphi_i$. Here, $\varepsilon$ is the
                machine epsilon of the dtype of `phi` or of `point`, whichever is less precise.

        Returns:
            One Boolean for each point, (*batch,).

        Raises:
            ArgumentError: for the same reasons as in `nearest`, or if `tolerance` is negative.
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
        r"""Compute the mean prediction of n models that are drawn at random from the embedding.

        The mean prediction is $\frac1n \sum_j f(\iota_\varphi(x_j))$, where $f$ is the function `predict`, and
        $\iota_\varphi(x_j)$ is the model with the random coordinates $x_j$. The models are evaluated one after another,
        so only one of them is in memory at a time.

        Args:
            phi: the control points of the embedding.
            predict: $f$, a function from a point (*space.shape) to a floating tensor, such as class probabilities.
            num_draws: $n$, the number of models.
            generator: the random generator.

        Returns:
            The mean in the shape and dtype of the predictions, accumulated in float64, without derivatives.

        Raises:
            ArgumentError: if `num_draws` is not a positive integer, or the predictions are not floating tensors of the
                same shape.
        """
        total = prediction = torch.zeros(())
        with torch.no_grad():
            for n, x in enumerate(self.sample(check_count("num_draws", num_draws), generator=generator)):
                prediction = predict(self(phi, x))
                check_shape("predict", prediction, *getattr(total if n else prediction, "shape", ()))
                total = total.to(prediction.device) + prediction.double()
        return (total / num_draws).to(prediction.dtype)

    def _curved_mean(self, phi: Tensor, x: Coordinates, weights: Tensor) -> Tensor:
        """Compute the weighted Karcher means of the control points on a curved space."""
        points = phi.expand(*weights.shape[:-1], *phi.shape)
        return weighted_mean(self.space, points.double(), weights).to(phi.dtype)


@dataclass(frozen=True)
class Simplex(Hull):
    r"""The simplex with the vertices $\varphi_0, \dots, \varphi_k$, in barycentric coordinates.

    The coordinates are $x \in \mathbb{R}^{k+1}$ with $x_i \ge 0$ and $\sum_i x_i = 1$. On a flat space, they determine
    the point by the first formula. On a curved space, the second formula defines the point, which is the weighted
    Karcher mean of the vertices:

    $$\iota_\varphi(x) = \sum_i x_i\, \varphi_i, \qquad \sum_i x_i \log_{\iota_\varphi(x)} \varphi_i = 0 .$$

    $x$ is divided by its sum, so a change of the sum does not change the point. On a flat space, the derivative along
    $u$ is $d\iota(x)\,u = \sum_i u_i (\varphi_i - \iota(x))$. If $\sum_i u_i = 0$, the derivative is $\sum_i u_i
    \varphi_i$.

    The start is $\varphi_0$, and the end point is the last vertex $\varphi_k$. The path from the start to the end point
    is the edge $x(s) = (1 - s, 0, \dots, 0, s)$.

    On a curved space:

    - The residual of the mean is at most $10^{-12}$.
    - The first and second derivatives with respect to $\varphi$ and $x$ are correct, because the computation ends with
      two Newton steps with the exact Hessian. Third and higher derivatives are not correct.
    - For products and powers of manifolds, each factor is solved separately. Derivatives with respect to $D$
      coordinates cost $O(D^3)$.
    - Volumes and nearest points are not available, because they have no closed form.

    Args:
        space: a flat space, or a space with exp, log, inner, project and project_tangent. With `None`, only the method
            `on` can be called. It returns a simplex in a given space.
        vertices: $k + 1 \ge 1$, the number of vertices. $\varphi$ has the shape (vertices, *space.shape).

    Raises:
        ArgumentError: if `space` is not a manifold, or `vertices` is not a positive integer.

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

    space: Manifold = None  # type: ignore[assignment]  # a simplex without a space has only the method `on`
    vertices: int = 3

    def __post_init__(self) -> None:
        check_count("vertices", self.vertices)
        if self.space is not None:
            check_is_manifold(self.space)

    @property
    def size(self) -> int:
        return self.vertices

    def path_coordinates(self, s: Float[Tensor, "*batch"]) -> Float[Tensor, "..."]:
        r"""Return $x(s) = (1 - s, 0, \dots, 0, s)$, (*batch, k + 1)."""
        if self.vertices == 1:
            return torch.ones_like(s)[..., None]
        inner = s.new_zeros(*s.shape, self.vertices - 2)
        return torch.cat([1 - s[..., None], inner, s[..., None]], -1)

    def sample(self, *batch: int, generator: torch.Generator | None = None) -> Float64[Tensor, "..."]:
        """Draw uniformly distributed barycentric coordinates (*batch, k + 1)."""
        device = None if generator is None else generator.device
        # Normalised exponential variables have the Dirichlet(1, ..., 1) distribution, which is uniform on a simplex.
        spacings = torch.empty(*batch, self.vertices, dtype=torch.float64, device=device)
        spacings.exponential_(generator=generator)
        return spacings / spacings.sum(-1, keepdim=True)

    def log_volume(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, ""]:
        r"""Compute the log-volume $\tfrac12 \log\det(E E^\top) - \log k!$ in float64, on a flat space.

        $E$ contains the k edges $\varphi_i - \varphi_0$. The log-volume is $\sum_i \log(h_i / i)$, where the height
        $h_i$ of vertex $i$ above the span of the previous vertices is a pivot of the Cholesky factor of $E E^\top$.

        - The error is about $\varepsilon / \sin^2\alpha$, where $\varepsilon$ is the machine epsilon and $\alpha$ is
          the smallest angle between an edge and the span of the previous edges.
        - If $\sin\alpha$ is below $\sqrt{8 k \varepsilon}$, the simplex counts as degenerate. Its log-volume is
          $-\infty$, and the gradient is 0.
        - The volume of a single vertex is 1.

        Cost: one pass over `phi`.

        Raises:
            ArgumentError: if the space is curved, `phi` has another shape, or a squared edge length is not finite.
        """
        parts, solid = self._heights(phi)
        return torch.where(solid, parts.log().sum(), -math.inf)

    def volume(self, phi: Float[Tensor, "size ..."]) -> Float64[Tensor, ""]:
        r"""Compute the volume of the simplex on a flat space, or 0 for a degenerate simplex.

        The volume is $\sqrt{\det(E E^\top)} / k!$, where $E$ is the matrix of the k edges from the first vertex to the
        other vertices. It is computed as the product of the quotients $h_i / i$ for i = 1, …, k. Here, $h_i$ is the
        distance of vertex $i$ from the span of the vertices before it.
        """
        parts, solid = self._heights(phi)
        return torch.where(solid, parts.prod(), 0.0)

    def log_volume_gradient(self, phi: Float[Tensor, "size ..."]) -> Float[Tensor, "size ..."]:
        r"""Compute the gradient of the logarithm of the simplex volume with respect to the vertices.

        Let $E$ be the matrix of the k edges from the first vertex to the other vertices. The edges are differences of
        the vertices $\varphi$, so $E = B \varphi$ for a constant matrix $B$. The gradient is
        $g = B^\top (E E^\top)^{-1} E$.

        Returns:
            The gradient (k + 1, *space.shape) in the dtype of `phi`, without derivatives. It satisfies
            $\sum_i \langle \varphi_i, g_i \rangle = k$ and $\sum_i g_i = 0$. For a degenerate simplex it is 0.
        """
        vertices = phi.detach()
        factor, solid = _cholesky(self._edge_gram(vertices))
        if self.vertices == 1 or not bool(solid):
            return torch.zeros_like(vertices)
        inverse = torch.cholesky_inverse(factor)
        rows = vertices.flatten(1)
        # The gradients of all vertices sum to 0, because a translation does not change the volume.
        coefficients = torch.cat([-inverse.sum(0, keepdim=True), inverse])
        return torch.stack([combine(None, rows[1:], c, minus=rows[0]) for c in coefficients]).reshape(phi.shape)

    def nearest(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]
    ) -> tuple[Float64[Tensor, "..."], Float64[Tensor, "..."]]:
        r"""Find the nearest point of the simplex for each given point, on a flat space.

        The nearest point has the barycentric coordinates $x$ that minimise $\|\sum_i x_i \varphi_i - p\|$, where
        $\varphi_i$ are the vertices of the simplex, and $p$ is the given point.

        Args:
            phi: the vertices (size, *space.shape).
            point: points (*batch, *space.shape).

        Returns:
            Barycentric coordinates (*batch, k + 1), without derivatives, and distances (*batch,), both in float64. The
            first derivatives of the distances with respect to `phi` and `point` are correct. At distance 0, they are 0.
            Higher derivatives are not correct, because $x$ is treated as a constant.

        Raises:
            ArgumentError: if the space is curved, a shape is invalid, or a value is not finite.

        Source: Wolfe 1976 (an active-set method).

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
        offsets = point.double().reshape(-1, math.prod(self.space.shape)) - rows[0]
        # Coordinates in an orthonormal basis of the edges. A Gram matrix would square the condition number.
        basis, columns = torch.linalg.qr(edges[1:].detach().mT)
        corners = torch.cat([columns.new_zeros(1, len(columns)), columns.mT]).cpu()
        targets = offsets.detach() @ basis
        if not all(map(is_finite, (edges, offsets, corners, targets))):
            raise ArgumentError("phi, point: expected values with finite distances, got NaN or infinity")
        x = targets.new_zeros(len(targets), self.vertices)
        for row, target in zip(x, targets.cpu(), strict=True):
            row.copy_(_nearest_on_simplex(corners, target))
        gaps = (offsets - x @ edges).reshape(-1, *self.space.shape)
        distances = norm(self.space, gaps, gaps)
        return x.reshape(*batch, self.vertices), distances.reshape(batch)

    def add_vertex(
        self, phi: Float[Tensor, "size ..."], point: Float[Tensor, "..."]
    ) -> tuple[Float[Tensor, "more ..."], "Simplex"]:
        r"""Append a vertex to the vertices $\varphi$, and return the extended vertices and the larger simplex.

        The new vertex must have the dtype and the device of $\varphi$.
        """
        self._check_phi(phi)
        self.space._check({"phi": phi, "point": check_shape("point", point, *self.space.shape)})
        return torch.cat([phi, point.unsqueeze(0)]), replace(self, vertices=self.vertices + 1)

    def _heights(self, phi: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the factors (k,) of the volume on the device of `phi`, and whether the simplex is nondegenerate."""
        # The factors are h_i / i, where the height h_i is the distance of vertex i from the span of the vertices before
        # it. The heights are the diagonal of the Cholesky factor.
        inner = self._edge_gram(phi)
        # The derivative of the decomposition of a singular matrix would be NaN. For a degenerate simplex, the identity
        # replaces the matrix, so all heights are 1.
        nondegenerate = _cholesky(inner.detach())[1]
        safe = torch.where(nondegenerate, inner, torch.eye(len(inner), dtype=inner.dtype, device=inner.device))
        heights = torch.linalg.cholesky(safe).diagonal()
        factors = heights / torch.arange(1, self.vertices, device=inner.device)
        return factors.to(phi.device), nondegenerate.to(phi.device)

    def _edge_gram(self, phi: Tensor) -> Tensor:
        """Compute the Gram matrix (k, k) of the edges from the first vertex to the other vertices."""
        self._require_flat("volumes")
        self._check_phi(phi)
        rows = phi.flatten(1)
        inner = gram(rows[1:], minus=rows[0])[0] if len(rows) > 1 else rows.new_zeros(0, 0, dtype=torch.float64)
        if not needs_autograd_path([inner.detach()]) and not is_finite(inner):
            raise ArgumentError("phi: expected vertices with finite squared edge lengths, got NaN or infinity")
        return inner

    def _require_flat(self, operation: str) -> None:
        """Raise an `ArgumentError` if the space is curved, where `operation` has no closed form."""
        if not self.space.flat:
            raise ArgumentError(f"space: expected a flat space for {operation}, got {self.space}")


def _cholesky(inner: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the Cholesky factor, and whether all pivots exceed their rounding errors."""
    # A diagonal entry of the factor is the distance h of a vertex from the span of the previous vertices. The rounding
    # error of h² is about k ε |edge|².
    factor, info = torch.linalg.cholesky_ex(inner)
    return factor, (info == 0) & (factor.diagonal().square() > 8 * len(inner) * EPS * inner.diagonal()).all()


def _nearest_on_simplex(vertices: Tensor, target: Tensor) -> Tensor:
    r"""Find the point of a simplex that is nearest to a target $t$, as barycentric coordinates $x$.

    The coordinates minimise $\|\sum_i x_i c_i - t\|$, where $c_i$ are the vertices of the simplex. The function uses an
    active-set method, which starts at the vertex nearest to the target. It then adds vertices to the current face as
    long as this decreases the distance.
    """
    x = torch.zeros_like(vertices.sum(-1)).index_fill(0, (vertices - target).square().sum(-1).argmin(), 1.0)
    scale = math.sqrt(vertices.square().sum(-1).max().item() + target.square().sum().item())
    # A distance below the rounding error of the coordinates counts as 0.
    while (gap := x @ vertices - target).norm() > EPS * scale:
        slopes = vertices @ gap
        # Only vertices outside of the face can improve the minimum over the face. In a thin simplex, rounding errors
        # can hide that a step towards a vertex is a descent, so the tolerance includes such vertices as candidates.
        candidate = (x == 0) & (slopes <= x @ slopes + 8 * len(x) * EPS * scale**2)
        trials = (_add_vertex_to_face(vertices, target, x, i) for i in slopes.argsort().tolist() if candidate[i])
        # A step is accepted only if it decreases the distance. The number of faces is finite, so the iteration ends.
        better = next((y for y in trials if (y @ vertices - target).norm() < gap.norm()), None)
        if better is None:
            break
        x = better
    return x


def _add_vertex_to_face(vertices: Tensor, target: Tensor, x: Tensor, vertex: int) -> Tensor:
    """Perform one step of an active-set method that minimises the distance to `target`.

    The active set contains `vertex` and all vertices with positive barycentric coordinates `x`. The step minimises the
    distance over the coordinates of the set, and returns the new `x`. Vertices whose coordinates would become negative
    leave the set.
    """
    # The vertices of the active set span the face of the simplex that contains x. The distance never increases.
    face = (x > 0).index_fill(0, torch.tensor(vertex), True)
    while True:
        first, *others = face.nonzero().squeeze(-1).tolist()
        # The minimum over the affine hull of the face is an unconstrained least-squares problem in the edges.
        edges = (vertices[others] - vertices[first]).mT
        best = torch.zeros_like(x)
        # The driver `gelsd` uses an SVD, so it also solves problems without full rank.
        if others:
            best[others] = torch.linalg.lstsq(edges, (target - vertices[first])[:, None], driver="gelsd").solution[:, 0]
        best[first] = 1 - best.sum()
        blocked = face & (best <= 0)
        if not bool(blocked.any()):
            return best
        # The step ends where the first coordinate becomes 0. This vertex leaves the face. The clamp avoids 0 / 0 for a
        # vertex that has just been added.
        fractions = torch.where(blocked, x / (x - best).clamp(min=TINY), math.inf)
        face = face & (fractions > fractions.min())
        x = torch.where(face, (x + fractions.min() * (best - x)).clamp(min=0), 0.0)
