"""Fits of curves, simplices and tunnels in parameter space to the models of a training run."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._io import new_figure
from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, check_count, check_number, check_shape, short_repr
from manifoldagg.averaging._curved_fit import fit_curved
from manifoldagg.averaging._flat_fit import FitOptions, FitResult, fit_flat
from manifoldagg.averaging.karcher import check_versions, check_weights, karcher
from manifoldagg.curves import Bezier, Embedding, Simplex, Tunnel
from manifoldagg.curves._legend import legend_below
from manifoldagg.curves.plane import View
from manifoldagg.curves.shape import coordinates
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import combine

__all__ = ["Subspace", "fit_subspace"]

REQUIRED_PRIMITIVES = {"exp", "log", "inner", "project", "project_tangent"}
POWERS = (1, 2)
MIN_SPREAD = 1e-100
MAX_SPREAD = 1e100
"""The range of distances for which squares, and products of two squares, are representable in float64."""
RANK_TOLERANCE = 8 * torch.finfo(torch.float64).eps
r"""The rounding error of an entry of $\log_x x$, which is 0 in exact arithmetic."""


@dataclass(frozen=True, eq=False)
class Subspace:
    r"""A subspace $\iota_\xi(\mathcal{S})$ that was fitted to points, such as the models of a run.

    The embedding $\iota$ maps coordinates in its domain $\mathcal{S}$ to points of the space. It depends on the control
    points $\xi$.

    Attributes:
        embedding: $\iota$, a curve, a simplex or a tunnel.
        phi: the control points $\xi$ (size, *shape), in the dtype of the points.
        coordinates: $x_j$ (m, *domain): for each point, the coordinates of the nearest point of the subspace.
        residuals: $d(\Theta_j, \iota_\xi(x_j))$ (m,), before $\xi$ was rounded to the dtype of the points.
        steps: the number of steps of the fit.
        converged: whether the fit converged.
        view: the plane of the plot, spanned by the two directions in which the points vary most.
        projected_points: the points in this plane (m, 2).
    """

    embedding: Embedding
    phi: Float[Tensor, "size ..."]
    coordinates: Float64[Tensor, "m ..."]
    residuals: Float64[Tensor, " m"]
    steps: int
    converged: bool
    view: View = field(repr=False)
    projected_points: Float64[Tensor, "m 2"] = field(repr=False)

    def __repr__(self) -> str:
        return format_result(
            self, embedding=self.embedding, value=self.value, steps=self.steps, converged=self.converged
        )

    @property
    def value(self) -> float:
        """The sum of the residuals."""
        return float(self.residuals.sum())

    def average(self, weights: Float[Tensor, " m"] | Sequence[float] | None = None) -> Float[Tensor, "..."]:
        r"""Compute the point of the subspace at the weighted mean of the coordinates of all models.

        Each model has coordinates $x_j$, which are those of the nearest point of the subspace. The method returns the
        point $\iota_\xi(\sum_j w_j x_j)$, where $\iota_\xi$ maps coordinates to points and $w_j$ are the weights. In
        general, the mean of the models themselves is not a point of the subspace.

        - On a curve, the coordinates of a point are its parameter.
        - On a simplex, they are its barycentric coordinates.
        - In a tunnel, which is a tube around a curve, they are the parameter of a point on the curve and an offset from
          this point. In the ambient form, the offset is a vector normal to the curve. The method therefore removes the
          tangential component of the mean offset.

        Args:
            weights: the weights of the points, which are normalised. The default is equal weights.

        Returns:
            A model (*shape) in the dtype of the points.
        """
        shares = check_weights(weights, len(self.coordinates)).to(self.coordinates.device)
        place = (shares.reshape(-1, *(1 for _ in self.embedding.domain)) * self.coordinates).sum(0)
        # The normal spaces at different parameters differ, so a mean of normal offsets has a tangential component.
        if isinstance(self.embedding, Tunnel) and self.embedding.form == "ambient":
            velocity = self.embedding.curve.velocity(self.phi, place[0]).flatten().double()
            square = velocity @ velocity
            along = place[1:] @ velocity / torch.where(square > 0, square, 1.0)
            place = torch.cat([place[:1], place[1:] - along * velocity])
        return self.embedding(self.phi, place)

    def plot(self, axes: Any = None) -> Any:
        """Plot the subspace, the points in their order, and their distances from the subspace.

        Args:
            axes: matplotlib axes. The default is the axes of a new figure.

        Returns:
            The axes.
        """
        axes = new_figure(6.4, 5.2).subplots() if axes is None else axes
        for line in self._outlines():
            axes.plot(*line.T, color="black", linewidth=1.8)
        if isinstance(self.embedding, Tunnel):
            for line in self._tunnel_walls():
                axes.plot(*line.T, "--", color="black", linewidth=0.9)
        corners = self.view(self.phi)
        axes.plot(*corners.T, "^", color="white", markeredgecolor="black", markersize=8, label="points of the subspace")
        nearest = self.view(self.embedding(self.phi, self.coordinates))
        for point, foot in zip(self.projected_points, nearest, strict=True):
            axes.plot(*torch.stack([point, foot]).T, color="grey", linewidth=0.7)
        shades = axes.scatter(
            *self.projected_points.T,
            c=range(len(self.projected_points)),
            cmap="viridis",
            s=22,
            zorder=4,
            label="models",
        )
        axes.figure.colorbar(shades, ax=axes, label="index of the model")
        axes.set_xlabel("longest axis of the models")
        axes.set_ylabel("second longest axis")
        axes.set_aspect("equal", adjustable="datalim")
        legend_below(axes)
        return axes

    def _outlines(self) -> list[Tensor]:
        """Return the lines that represent the subspace: a curve, or the edges of a simplex."""
        t = torch.linspace(0, 1, 65, dtype=torch.float64, device=self.phi.device)
        if not isinstance(self.embedding, Simplex):
            curve = self.embedding.curve if isinstance(self.embedding, Tunnel) else self.embedding
            return [self.view(curve(self.phi, t))]
        pairs = torch.combinations(torch.arange(self.embedding.size), 2).tolist()
        # An edge is a geodesic, so fewer points suffice than for a curve.
        edge = Bezier(self.embedding.space, 1)
        return [self.view(edge(self.phi[pair], t[::8])) for pair in pairs]

    def _tunnel_walls(self) -> list[Tensor]:
        """Return the two walls of a tunnel as lines in the plane of the plot."""
        line = self._outlines()[0]
        # The direction at the last point is that of the previous segment.
        ahead = line.diff(dim=0, append=2 * line[-1:] - line[-2:-1])
        side = torch.stack([-ahead[:, 1], ahead[:, 0]], -1)
        side = side / side.norm(dim=-1, keepdim=True).clamp(min=torch.finfo(side.dtype).tiny)
        # The distance of the walls from the curve is the radius of the tunnel.
        reach = self.embedding.radius * float((self.phi[-1] - self.phi[0]).double().norm())  # type: ignore[attr-defined]
        return [line + reach * side, line - reach * side]


# Tensors that are created in inference mode cannot be differentiated, and the fit on a curved space needs derivatives.
@torch.inference_mode(False)
@torch.no_grad()
def fit_subspace(
    points: Float[Tensor, "m ..."] | Sequence[Float[Tensor, "..."]],
    embedding: Embedding,
    *,
    power: int = 1,
    start: Float[Tensor, "size ..."] | None = None,
    tolerance: float = 1e-6,
    max_steps: int = 200,
) -> Subspace:
    r"""Fit the subspace that is nearest to the models of a run.

    $$\xi^* = \operatorname{argmin}_\xi \sum_j \min_{x \in \mathcal{S}} d(\Theta_j, \iota_\xi(x))^p .$$

    On a flat space, one pass over the points computes their coordinates in their own span, which has at most m - 1
    dimensions. The fit uses these coordinates, and $\xi$ is a linear combination of the points. Properties:

    - For each $\xi$, the nearest coordinates are global minima.
    - The minimisation over $\xi$ has no closed form. The result is the best local minimum from several starting points.
    - If the minimiser is not unique, the result is a small subspace. A curve is restricted to the part next to the
      points. Every facet of a simplex contains a nearest point.
    - The volume is not penalised. Points away from the vertices can therefore enlarge a simplex.

    On a curved space, the fit in the tangent space at the Karcher mean is the starting point. A descent on the space
    itself then optimises $\xi$ and the coordinates together. Tunnels need a flat space.

    Args:
        points: $\Theta_j$, a tensor (m, *space.shape) or a sequence of tensors, in the order of the run.
        embedding: $\iota$, a `Bezier`, `Simplex` or `Tunnel`. Its space must be flat, or have `exp`, `log`, `inner`,
            `project` and `project_tangent`.
        power: p. The default 1, as in (13), is robust to a few outliers. The value 2 gives least squares.
        start: the initial $\xi$ (size, *space.shape), for flat spaces only. By default, the function computes it.
        tolerance: the tolerance for the relative decrease of the sum in one step.
        max_steps: the largest number of steps.

    Returns:
        The subspace, the coordinates and the residual of each point, and whether the descent converged.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.

    Source: Manifold (13). Cost: one pass over the points, $O(m^2 P)$, then algebra on m points in m - 1 coordinates.

    Example:
        >>> from manifoldagg.manifolds import Flat
        >>> points = torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 3.0]])
        >>> line = fit_subspace(points, Bezier(Flat(2), degree=1))
        >>> round(line.value, 4)  # four of the five points are on it
        0.7071
    """
    if not isinstance(embedding, Bezier | Simplex | Tunnel):
        raise ArgumentError(f"embedding: expected a Bezier, Simplex or Tunnel, got {short_repr(embedding)}")
    space = embedding.space
    check_choice("power", power, POWERS)
    check_number("tolerance", tolerance, at_least=0)
    check_count("max_steps", max_steps)
    if not space.flat and (isinstance(embedding, Tunnel) or not space.capabilities >= REQUIRED_PRIMITIVES):
        lacks = (
            "flat" if isinstance(embedding, Tunnel) else f"with {sorted(REQUIRED_PRIMITIVES - space.capabilities)[0]}"
        )
        raise ArgumentError(
            f"embedding: expected a space that is {lacks} to fit {type(embedding).__name__}, got {space}"
        )
    models = torch.stack(check_versions(space, points, "points"))
    if len(models) < embedding.size:
        raise ArgumentError(f"points: expected at least {embedding.size} for {embedding}, got {len(models)}")
    if start is not None:
        if not space.flat:
            raise ArgumentError(f"start: expected None unless the space is flat, got a start on {space}")
        check_shape("start", start, embedding.size, *models.shape[1:])
    search = FitOptions(power, float(tolerance), max_steps)
    return (
        _fit_on_flat_space(models, embedding, start, search)
        if space.flat
        else _fit_on_curved_space(models, embedding, search)
    )


def _fit_on_flat_space(models: Tensor, embedding: Embedding, start: Tensor | None, options: FitOptions) -> Subspace:
    """Fit an embedding in the span of the models, and convert the result back to models."""
    rows = list(models.flatten(1))
    # The start must be in the same coordinates as the points, so its control points are appended to the rows.
    if start is not None:
        rows += check_versions(embedding.space, start.to(models), "start")
        rows = [row.flatten() for row in rows]
    projected = coordinates(torch.stack(rows))
    _check_spread(float(projected.abs().amax()) if projected.numel() else 0.0, minimum=MIN_SPREAD)
    data = projected[: len(models)]
    initial = None if start is None else projected[len(models) :]
    fit = fit_flat(embedding, data, initial, options) if bool(data.any()) else _constant_fit(embedding, data)
    # The first point is the origin of the coordinates, so ξ is this point plus a combination of differences.
    shares = (fit.phi @ torch.linalg.pinv(projected[1:]) if len(rows) > 1 else fit.phi[:, :0]).to(models.device)

    def from_coordinates(lines: Tensor, dtype: torch.dtype, base: Tensor | None) -> Tensor:
        outputs = [torch.empty_like(rows[0], dtype=dtype) for _ in lines]
        results = [
            combine(base, rows[1:], line, minus=rows[0], out=out) if len(rows) > 1 else out.copy_(rows[0])
            for line, out in zip(lines, outputs, strict=True)
        ]
        return torch.stack(results).reshape(len(results), *models.shape[1:])

    phi = from_coordinates(shares, models.dtype, rows[0])
    # The principal axes of the points span the plane of the plot. If the points span fewer dimensions, an axis is 0.
    middle = data.mean(0)
    axes = torch.linalg.svd(data - middle, full_matrices=False).Vh[:2]
    axes = torch.cat([axes, axes.new_zeros(2 - len(axes), axes.shape[1])])
    if len(rows) > 1:
        inverse = torch.linalg.pinv(projected[1:]).to(models.device)
        center = from_coordinates((middle @ inverse)[None], torch.float64, rows[0])[0]
        lines = from_coordinates(axes @ inverse, torch.float64, None)
    else:
        center = models[0].double()
        lines = torch.zeros(2, *models.shape[1:], dtype=torch.float64, device=models.device)
    view = View(embedding.space, center, lines)
    # The fit of a tunnel works in the span of the points. The coordinates of its ambient form have P entries,
    # so they are computed from the models themselves.
    places = fit.coordinates
    if isinstance(embedding, Tunnel):
        places = embedding.nearest(phi.double(), models.double())[0].double()
    return Subspace(embedding, phi, places, fit.distances, fit.steps, fit.converged, view, (data - middle) @ axes.mT)


def _check_spread(spread: float, minimum: float = 0.0) -> None:
    """Check that the squared distances between the points neither overflow nor underflow.

    Raises:
        ArgumentError: if the spread of the points is too small or too large.
    """
    if not (spread == 0 or minimum <= spread <= MAX_SPREAD):
        raise ArgumentError(
            f"points: expected distances from their mean between {minimum:g} and {MAX_SPREAD:g}, got {spread:g}"
        )


def _fit_on_curved_space(models: Tensor, embedding: Embedding, options: FitOptions) -> Subspace:
    """Fit a curve or a simplex to models on a curved manifold."""
    # The starting point is a fit in the tangent space at the Karcher mean of the models.
    space = embedding.space
    x = space._project(models.double())
    center = karcher(space, x).point
    middle = center.expand_as(x)
    logs = space._log(middle, x)
    # The eigenvectors of the Gram matrix of the logarithms give coordinates in an orthonormal basis of their span. A
    # basis of the tangent space itself would have P vectors.
    inner = torch.stack([space._inner(middle, logs, log.expand_as(x)) for log in logs])
    _check_spread(float(inner.diagonal().clamp(min=0).sqrt().max()))
    values, vectors = torch.linalg.eigh((inner + inner.mT) / 2)
    # Eigenvalues are squared lengths. Below the first limit they are rounding errors of the decomposition, and below
    # the second limit rounding errors of the logarithms.
    significant = values > (1e-14 * values[-1]).clamp(min=RANK_TOLERANCE**2 * x.numel())
    roots = values[significant].sqrt()
    projected = vectors[:, significant] * roots
    frame = torch.einsum("jk,j...->k...", vectors[:, significant] / roots, logs)
    # `eigh` sorts the eigenvalues in ascending order, so the longest axis is the last.
    axes = torch.cat([frame.flip(0)[:2], frame.new_zeros(max(0, 2 - len(frame)), *frame.shape[1:])])
    view = View(space, center, axes)
    if len(roots) == 0:
        fit = _constant_fit(embedding, models.double())
    else:
        fit = fit_curved(embedding, x, View(space, center, frame), projected, options)
    phi = fit.phi.to(models.dtype)
    return Subspace(embedding, phi, fit.coordinates, fit.distances, fit.steps, fit.converged, view, view(models))


def _constant_fit(embedding: Embedding, points: Tensor) -> FitResult:
    """Return the fit to points that are all equal: the embedding is collapsed onto this point."""
    place = torch.zeros((), dtype=torch.float64, device=points.device)
    if isinstance(embedding, Simplex):
        place = torch.full((embedding.size,), 1 / embedding.size, dtype=torch.float64, device=points.device)
    zeros = torch.zeros(len(points), dtype=torch.float64, device=points.device)
    phi = points[:1].expand(embedding.size, *points.shape[1:]).clone()
    return FitResult(phi, place.expand(len(points), *place.shape), zeros, 0, True)
