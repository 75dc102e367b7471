"""FLOCO: a cohort jointly learns a simplex of models, and each client trains in its own region."""

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
"""How many sizes of the simplex are tried."""
MIN_CENTRE_DISTANCE = 1e-4
"""Centres nearer than this count as this near, so that two equal ones do not decide."""


@dataclass(frozen=True)
class FLOCO(ServerRule):
    r"""Rule that averages the vertices of a simplex of models.

    $\Phi_j \leftarrow \sum_i w_i\, \Phi_{ij} / \sum_i w_i$ over a cohort of k clients.

    Clients return the n vertices of a simplex as their points. The model is the centroid, $\Theta = \tfrac1n \sum_j
    \Phi_j$; it moves as under [`FedAvg`][manifoldagg.federated.rules.FedAvg] of the clients' centroids, and with one
    vertex it is FedAvg.

    A client draws its models in the region $(1 - \lambda)\, c + \lambda\, y$, $y$ uniform in the simplex, with
    $\lambda$ half the `radius`: the copy of the simplex within the ball $\|x - c\|_1 \le$ `radius`. (In that ball the
    published code draws coordinates that may be negative and do not sum to 1.) The centre $c$ is stored in the client
    state:

    - Without `personalize_from` and up to that version there is none: the region is the whole simplex.
    - The signals of the cohort of that step are the displacements $d_i$ of its centroids. Their n principal axes A
      (about the mean $\bar d$) are kept, and the scale z at which the $A (d_i - \bar d) / z$, projected on the
      simplex, have the least Riesz energy.
    - A later client without a centre gets $c = \operatorname{proj}(A (d_i - \bar d) / z)$, for good.

    *Participation*: a late joiner trains in the whole simplex until its first update has placed it; one that comes back
    finds its region. The vertices of an old ticket count with the drift of the model added to them, as a displacement
    from the centroid that they started from; `max_staleness=0` of the server rejects them. One that fails is waited
    for no longer than for another update.

    Args:
        cohort: k.
        vertices: n.
        radius: of the regions, in (0, 2].
        personalize_from: the version from which clients have regions; `None`: never.
        weighted: by each client's share of the data $w_i$; equally otherwise.
        initial_std: standard deviation of the first vertices about the start, which is their centroid.
        seed: of these.

    Raises:
        ArgumentError: naming the option that is out of range; where a space is curved, naming its leaves.

    Source: Grinwald, Wiesner, Nakajima 2024, Algorithm 1; Report §5.1.

    Cost: an update that moves the model reads 28 words a parameter, writes 5 and makes 4; one that waits reads 19,
        writes 2 and makes 3.

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
        # Where the server rounds what clients start from, the vertices lie about that point.
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
        # As in FedAvg: the weights of one cohort are shares of different totals, where these grew meanwhile.
        weight = update.weight if update.share is None else update.share
        share = check_number("weight", weight if self.weighted else 1.0, above=0)
        count = state["count"] + 1
        total = state["total"] + share
        # A client's vertices less the server's, and the drift, which is 0 but for old tickets.
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
        """Return the signals of the cohort and the client state, with the client's centre if it can be computed."""
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
    r"""Project onto the simplex: $\min_y \|y - x / z\|$ over $y_i \ge 0$, $\sum_i y_i = 1$, with $z$ = `scale`.

    Source: Held, Wolfe, Crowder 1974: $y_i = \max(x_i / z - t, 0)$, $t$ from the largest entries.

    Example:
        >>> project_to_simplex(torch.tensor([2.0, 1.5, -1.0], dtype=torch.float64))
        tensor([0.7500, 0.2500, 0.0000], dtype=torch.float64)
    """
    # Less the largest, which moves no projection: sums of entries of any size keep the digits that count.
    x = (x - x.amax(-1, keepdim=True)) / scale
    falling = x.sort(-1, descending=True).values
    shifts = (falling.cumsum(-1) - 1) / torch.arange(1, x.shape[-1] + 1, dtype=x.dtype, device=x.device)
    last = (falling > shifts).sum(-1, keepdim=True) - 1
    return (x - shifts.gather(-1, last)).clamp(min=0)


def principal_axes(signals: list[Float[Tensor, " P"]], count: int) -> tuple[Tensor, Float64[Tensor, "m n"]]:
    r"""Return the principal axes of m vectors about 0, and the coordinates of the vectors on them.

    From the Gram matrix of the vectors alone. Axes beyond their rank are 0. The sign of an axis is that of the largest
    of its weights.

    Args:
        signals: m vectors.
        count: n axes.

    Returns:
        The axes (n, P) and coordinates (m, n) in float64.

    Example:
        >>> axes, places = principal_axes([torch.tensor([3.0, 0.0]), torch.tensor([0.0, 1.0])], 1)
        >>> axes.abs(), places.abs()
        (tensor([[1., 0.]]), tensor([[3.],
                [0.]], dtype=torch.float64))
    """
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
    r"""Return the $z$ that spreads the projections of `coordinates` / z on the simplex best.

    Of `NUM_SCALES` equal parts of the largest norm the one with the least energy $\sum_{i < j} \|y_i - y_j\|^{-2}$; the
    smallest where all places are one.
    """
    reach = float(coordinates.norm(dim=-1).max())
    if reach == 0:
        return 1.0
    energies = []
    for k in range(1, NUM_SCALES + 1):
        spread = project_to_simplex(coordinates, reach * k / NUM_SCALES)
        energies.append(float(torch.pdist(spread).clamp(min=MIN_CENTRE_DISTANCE).pow(-2).sum()))
    return reach * (1 + energies.index(min(energies))) / NUM_SCALES
