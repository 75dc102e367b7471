"""FLOCO: a simplex of models that a cohort trains jointly, with one region for each client."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_count, check_finite, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import check_points, safe_sqrt
from manifoldagg.federated.types import ClientState, Message, Outcome, State, Update
from manifoldagg.kernels import combine, gram
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold

__all__ = ["FLOCO"]

NUM_SCALES = 1000
"""The number of candidate scales in `min_energy_scale`."""
MIN_CENTRE_DISTANCE = 1e-4
"""The lower limit of the distances in the energy, which would otherwise be infinite for two equal centres."""


@dataclass(frozen=True)
class FLOCO(ServerRule):
    r"""Federated learning over connected models (FLOCO): a simplex of models, with one training region for each client.

    After the updates of a cohort, each vertex of the simplex becomes the weighted mean of the clients' vertices. The
    server model is the centroid:

    $$\Phi_j \leftarrow \frac{\sum_i w_i\, \Phi_{ij}}{\sum_i w_i}, \qquad \Theta = \frac1n \sum_{j=1}^n \Phi_j.$$

    Use this rule when clients have heterogeneous data and need personalised models. The centroid moves as in
    [`FedAvg`][manifoldagg.federated.rules.FedAvg] of the clients' centroids. With one vertex, the rule equals FedAvg.

    Each client samples models from its own region of the simplex. The region with centre $c$ contains the points
    $(1 - \lambda)\, c + \lambda\, y$, where $y$ is uniform in the simplex and $\lambda$ is half the `radius`. The
    region lies within the ball $\|x - c\|_1 \le$ `radius`. (The published code samples coordinates that can be
    negative and do not sum to 1.)

    The rule determines the centres as follows:

    1. Up to the version `personalize_from`, the region of each client is the whole simplex.
    2. For the cohort of that version, the rule computes the displacements $d_i$ of the clients' centroids. It stores
       their n principal axes A about the mean $\bar d$.
    3. The rule chooses the scale z that minimises the Riesz energy of the projections of $A (d_i - \bar d) / z$ onto
       the simplex.
    4. Each later client gets the permanent centre $c = \operatorname{proj}(A (d_i - \bar d) / z)$ with its next update.

    Participation:

    - A client that joins late trains in the whole simplex until its first update.
    - A client that returns keeps its region.
    - The rule adds the drift of the model to the vertices of an update on an old ticket. To reject such updates, set
      `max_staleness=0` of the server.
    - After a failed task, the cohort waits for another update.

    Args:
        cohort: the number k of updates per step.
        vertices: the number n of vertices.
        radius: the radius of the regions, in (0, 2].
        personalize_from: the version from which clients have regions. `None` disables regions.
        weighted: whether to weight updates by the client's share of the data $w_i$. Otherwise, all weights are equal.
        initial_std: the standard deviation of the initial vertices. Their centroid is the start model.
        seed: the seed of the initial vertices.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved.

    Source: Grinwald, Wiesner, Nakajima 2024, Algorithm 1; Report §5.1.

    Cost: a step reads 28 words per parameter, writes 5 and allocates 4. A buffered update reads 19, writes 2 and
    allocates 3.

    Example:
        >>> import manifoldagg, torch
        >>> start, ends = [torch.tensor([0.0])], [[torch.tensor([1.0])], [torch.tensor([3.0])]]
        >>> manifoldagg.aggregate(FLOCO(cohort=1, vertices=2), None, start, start, ends)[0]
        [tensor([2.])]
    """

    needs_flat: ClassVar[str] = "simplices of models"
    cohort: int
    vertices: int = 3
    radius: float = field(default=0.1, kw_only=True)
    personalize_from: int | None = field(default=None, kw_only=True)
    weighted: bool = field(default=True, kw_only=True)
    initial_std: float = field(default=0.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cohort", self.cohort)
        check_count("vertices", self.vertices)
        check_number("radius", self.radius, above=0, at_most=2)
        if self.personalize_from is not None:
            check_count("personalize_from", self.personalize_from, at_least=0)
        check_number("initial_std", self.initial_std, at_least=0)
        if check_count("seed", self.seed, at_least=0) >= 2**64:
            raise ArgumentError(f"seed: expected an integer below 2**64, got {self.seed}")

    def init(self, space: Manifold, start: Tensor) -> State:
        state = super().init(space, start)
        noise = torch.zeros(self.vertices, *start.shape, dtype=start.dtype)
        if self.initial_std:
            noise.normal_(std=self.initial_std, generator=torch.Generator().manual_seed(self.seed))
        vertices = check_finite("initial_std: first vertices", start + (noise - noise.mean(0)).to(start.device))
        return state | {"count": 0, "total": 0.0, "vertices": vertices, "signals": []}

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        placed = {"centre": client_state["centre"]} if client_state and "centre" in client_state else {}
        # The server may round dispatched models. The vertices are therefore shifted so that their centroid is the
        # rounded model.
        centroid = combine(None, [*state["vertices"]], [1 / self.vertices] * self.vertices)
        vertices = empty_like(state["vertices"])
        for j, row in enumerate(vertices):
            combine(state["vertices"][j], [current], [1.0], minus=[centroid], out=row)
        return Message(current, {"vertices": vertices, **placed}, {"radius": self.radius})

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        n = self.vertices
        check_points(self, update, n, f"{n} vertices")
        base = update.base.detach()
        current = update.current.detach()
        points = update.points.detach()
        vertices = state["vertices"]
        for j, square in enumerate(gram([*points], minus=base)[0].diagonal().tolist()):
            check_number(f"points[{j}]: squared distance from the base", square)
        # The total sample count can grow within a cohort, so `weight` may refer to different totals.
        weight = update.weight if update.share is None else update.share
        share = check_number("weight", weight if self.weighted else 1.0, above=0)
        count = state["count"] + 1
        total = state["total"] + share
        # Each row is the client's vertex minus the server's vertex plus the drift. The drift is nonzero only if the
        # model has moved since the dispatch.
        waiting = empty_like(vertices)
        for j, row in enumerate(waiting):
            before = state["buffer"][j] if "buffer" in state else None
            combine(before, [points[j], current], [share, share], minus=[vertices[j], base], out=row)
        check_finite("points: sum over the cohort", waiting)
        signals, memory = self._project_client(state, update)
        after = {**state, "count": count, "total": total, "buffer": waiting, "signals": signals}
        numbers = {"weight": share, "buffered": float(count)}
        if count < self.cohort:
            return after, Outcome(None, memory, numbers)
        moved = empty_like(vertices)
        for j, row in enumerate(moved):
            combine(vertices[j], [waiting[j]], [1 / total], out=row)
        model = combine(None, [*moved], [1 / n] * n, out=out)
        after |= {"version": state["version"] + 1, "count": 0, "total": 0.0, "vertices": moved, "signals": []}
        del after["buffer"]
        if signals:
            mean = combine(None, signals, [1 / len(signals)] * len(signals))
            axes, places = principal_axes([combine(None, [d], [1.0], minus=mean) for d in signals], n)
            after |= {"mean": mean, "axes": axes, "scale": min_energy_scale(places)}
        norm = safe_sqrt(gram([model], minus=current)[0, 0, 0].item())
        return after, Outcome(model, memory, numbers | {"buffered": 0.0, "step": 1.0, "norm": norm})

    def _project_client(self, state: State, update: Update) -> tuple[list[Tensor], ClientState]:
        """Choose the centre of the client's region in the simplex of models, in which the client trains.

        When the model has the version `personalize_from`, the method only collects the displacement of the client: the
        mean of its trained models minus the server model. The rule later computes principal axes from these vectors.
        After that version, the method computes the coordinates of the displacement on these axes, unless the client
        already has a centre. It projects them onto the simplex, and stores the result as the centre.

        Returns:
            The displacements that are collected so far, and the next state of the client.
        """
        memory = update.client_state
        now = state["version"] == self.personalize_from
        known = "axes" in state and not (memory and "centre" in memory)
        if not (now or known):
            return state["signals"], memory
        n = self.vertices
        signal = combine(None, [*update.points.detach()], [1 / n] * n, minus=update.base.detach())
        if now:
            return [*state["signals"], signal], memory
        places = gram([*state["axes"], signal], minus=[*[None] * n, state["mean"]])[0, -1, :n]
        return [], {**(memory or {}), "centre": project_to_simplex(places, state["scale"])}


def project_to_simplex(x: Float64[Tensor, "*batch n"], scale: float = 1.0) -> Float64[Tensor, "*batch n"]:
    r"""Project vectors onto the probability simplex after dividing them by `scale`.

    For a vector $x$ and the scale $z$, the result is the point $y$ of the simplex $y_i \ge 0$, $\sum_i y_i = 1$ that is
    nearest to $x / z$. Its entries are $y_i = \max(x_i / z - t, 0)$, where the shift $t$ follows from the sorted
    entries of $x / z$ (Held, Wolfe, Crowder 1974).

    Example:
        >>> project_to_simplex(torch.tensor([2.0, 1.5, -1.0], dtype=torch.float64))
        tensor([0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    # Subtracting the largest entry does not change the projection and avoids cancellation in the sums.
    x = (x - x.amax(-1, keepdim=True)) / scale
    falling = x.sort(-1, descending=True).values
    shifts = (falling.cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    last = (falling > shifts).sum(-1, keepdim=True) - 1
    return (x - shifts.gather(-1, last)).clamp(min=0)


def principal_axes(signals: list[Float[Tensor, " P"]], count: int) -> tuple[Tensor, Float64[Tensor, "m n"]]:
    """Compute the principal axes of m vectors without centring, and the coordinates of the vectors on these axes.

    The function computes each axis as a linear combination of the vectors, from an eigenvector of their m × m Gram
    matrix. The sign of an axis is chosen so that the coefficient with the largest magnitude is positive. If the rank of
    the vectors is smaller than `count`, the remaining axes are zero vectors.

    Args:
        signals: the m vectors.
        count: the number n of axes.

    Returns:
        The axes (n, P) and the coordinates (m, n) in float64.

    Example:
        >>> axes, places = principal_axes([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])], 1)
        >>> axes.abs(), places.abs()
        (tensor([[1., 0.]]), tensor([[3.],
                [0.]], dtype=torch.float64))
    """
    # The Gram matrix is small even if the vectors are long.
    values, vectors = torch.linalg.eigh(gram(signals)[0])
    axes = signals[0].new_zeros(count, len(signals[0]))
    places = values.new_zeros(len(signals), count)
    floor = len(signals) * torch.finfo(torch.float64).eps * values[-1]
    for j, (value, u) in enumerate(zip(values.flip(0)[:count], vectors.flip(1).T, strict=False)):
        if value <= floor:
            break
        u = u * u[u.abs().argmax()].sign()
        combine(None, signals, u / value.sqrt(), out=axes[j])
        places[:, j] = u * value.sqrt()
    return axes, places


def min_energy_scale(coordinates: Float64[Tensor, "m n"]) -> float:
    r"""Choose the scale that spreads projected points as far apart as possible on the simplex.

    For a scale $z$, let $y_i$ be the projection of the i-th row of `coordinates` / $z$ onto the simplex. The function
    returns the scale with the lowest Riesz energy $\sum_{i < j} \|y_i - y_j\|^{-2}$. Close points have a high energy.
    The candidates are `NUM_SCALES` equidistant scales, up to the largest norm of a row of `coordinates`.

    If all points are equal, the result is the smallest of these scales. If all coordinates are 0, the result is 1.
    """
    reach = float(coordinates.norm(dim=-1).max())
    if reach == 0:
        return 1.0
    energies = []
    for k in range(1, NUM_SCALES + 1):
        spread = project_to_simplex(coordinates, reach * k / NUM_SCALES)
        energies.append(float(torch.pdist(spread).clamp(min=MIN_CENTRE_DISTANCE).pow(-2).sum()))
    return reach * (1 + energies.index(min(energies))) / NUM_SCALES
