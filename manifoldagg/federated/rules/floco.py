"""FLOCO: a cohort learns a simplex of models together, each client in a region of its own."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from manifoldagg.errors import ArgumentError, check_choice, check_count, check_finite, check_number
from manifoldagg.federated.contract import Memory, Message, Outcome, State, Update
from manifoldagg.federated.rules._flat import check_flat
from manifoldagg.federated.rules._reading import root
from manifoldagg.federated.rules._subregion import best_scale, onto_simplex, principal_axes
from manifoldagg.kernels import combine, gram
from manifoldagg.manifolds import Manifold


@dataclass(frozen=True)
class FLOCO:
    r"""$\Phi_j \leftarrow \sum_i w_i\, \Phi_{ij} / \sum_i w_i$ over a cohort of k clients.

    Clients return the n vertices of a simplex as their points. The model is the centroid, $\Theta = \tfrac1n \sum_j
    \Phi_j$; it moves as under [`FedAvg`][manifoldagg.federated.rules.FedAvg] of the clients' centroids, and with one
    vertex it is FedAvg.

    A client draws its models in the region $(1 - \lambda)\, c + \lambda\, y$, $y$ uniform in the simplex, with
    $\lambda$ half the `radius`: the copy of the simplex within the ball $\|x - c\|_1 \le$ `radius`. (In that ball the
    published code draws coordinates that may be negative and do not sum to 1.) The centre $c$ is kept in its memory:

    - Without `personal` and up to that version there is none: the region is the whole simplex.
    - The signals of the cohort that answers then are the displacements $d_i$ of its centroids. Their n principal axes A
      (about the mean $\bar d$) are kept, and the scale z at which the $A (d_i - \bar d) / z$, projected on the
      simplex, have the least Riesz energy.
    - A client that answers later and has no centre yet gets $c = \operatorname{proj}(A (d_i - \bar d) / z)$, for good.

    *Participation*: a late joiner trains in the whole simplex until its first answer has placed it; one that comes back
    finds its region. The vertices of an old ticket count with the drift of the model added to them, as a displacement
    from the centroid that they started from; `max_staleness=0` of the server refuses them. One that fails is waited
    for no longer than for another answer.

    Args:
        cohort: k.
        vertices: n.
        radius: of the regions, in (0, 2].
        personal: the version from which clients have regions; `None`: never.
        weighted: by each client's share of the data $w_i$; equally otherwise.
        spread: standard deviation of the first vertices about the start, which is their centroid.
        seed: of these.

    Raises:
        ArgumentError: naming the option that is out of range; where a space is curved, naming its leaves.

    Source: Grinwald, Wiesner, Nakajima 2024, Algorithm 1; Report §5.1.

    Example:
        >>> import manifoldagg, torch
        >>> start, ends = [torch.tensor([0.0])], [[torch.tensor([1.0])], [torch.tensor([3.0])]]
        >>> manifoldagg.aggregate(FLOCO(cohort=1, vertices=2), None, start, start, ends)[0]
        [tensor([2.])]
    """

    cohort: int
    vertices: int = 3
    radius: float = field(default=0.1, kw_only=True)
    personal: int | None = field(default=None, kw_only=True)
    weighted: bool = field(default=True, kw_only=True)
    spread: float = field(default=0.0, kw_only=True)
    seed: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_count("cohort", self.cohort)
        check_count("vertices", self.vertices)
        check_number("radius", self.radius, above=0, at_most=2)
        if self.personal is not None:
            check_count("personal", self.personal, at_least=0)
        check_number("spread", self.spread, at_least=0)
        if check_count("seed", self.seed, at_least=0) >= 2**64:
            raise ArgumentError(f"seed: expected an integer below 2**64, got {self.seed}")
        check_choice("weighted", self.weighted, (False, True))

    def init(self, space: Manifold, start: Tensor) -> State:
        check_flat(space, start, "simplices of models")
        noise = torch.zeros(self.vertices, *start.shape, dtype=start.dtype)
        if self.spread:
            noise.normal_(std=self.spread, generator=torch.Generator().manual_seed(self.seed))
        vertices = check_finite("spread: first vertices", start + (noise - noise.mean(0)).to(start.device))
        return {"version": 0, "count": 0, "total": 0.0, "vertices": vertices, "signals": []}

    def message(self, space: Manifold, state: State, current: Tensor, memory: Memory) -> Message:
        placed = {"centre": memory["centre"]} if memory and "centre" in memory else {}
        # Where the server rounds what clients start from, the vertices lie about that point.
        centroid = combine(None, [*state["vertices"]], [1 / self.vertices] * self.vertices)
        vertices = torch.empty_like(state["vertices"])
        for j, row in enumerate(vertices):
            combine(state["vertices"][j], [current], [1.0], minus=[centroid], out=row)
        return Message(current, {"vertices": vertices, **placed}, {"radius": self.radius})

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        n, base, current = self.vertices, update.base.detach(), update.current.detach()
        points, vertices = update.points.detach(), state["vertices"]
        if len(points) != n:
            raise ArgumentError(f"points: expected {n} vertices, (n, P); got {len(points)}")
        for j, square in enumerate(gram([*points], minus=base)[0].diagonal().tolist()):
            check_number(f"points[{j}]: squared distance from the base", square)
        # As in FedAvg: the weights of one cohort are shares of different totals, where these grew meanwhile.
        weight = update.weight if update.share is None else update.share
        share = check_number("weight", weight if self.weighted else 1.0, above=0)
        count, total = state["count"] + 1, state["total"] + share
        # A client's vertices less the server's, and the drift, which is 0 but for old tickets.
        waiting = torch.empty_like(vertices)
        for j, row in enumerate(waiting):
            before = state["buffer"][j] if "buffer" in state else None
            combine(before, [points[j], current], [share, share], minus=[vertices[j], base], out=row)
        check_finite("points: sum over the cohort", waiting)
        signals, memory = self._placed(state, update)
        after = {**state, "count": count, "total": total, "buffer": waiting, "signals": signals}
        numbers = {"weight": share, "buffered": float(count)}
        if count < self.cohort:
            return after, Outcome(None, memory, numbers)
        moved = torch.empty_like(vertices)
        for j, row in enumerate(moved):
            combine(vertices[j], [waiting[j]], [1 / total], out=row)
        model = combine(None, [*moved], [1 / n] * n, out=out)
        after |= {"version": state["version"] + 1, "count": 0, "total": 0.0, "vertices": moved, "signals": []}
        del after["buffer"]
        if signals:
            mean = combine(None, signals, [1 / len(signals)] * len(signals))
            axes, places = principal_axes([combine(None, [d], [1.0], minus=mean) for d in signals], n)
            after |= {"mean": mean, "axes": axes, "scale": best_scale(places)}
        norm = root(gram([model], minus=current)[0, 0, 0].item())
        return after, Outcome(model, memory, numbers | {"buffered": 0.0, "step": 1.0, "norm": norm})

    def _placed(self, state: State, update: Update) -> tuple[list[Tensor], Memory]:
        """The signals of the cohort, and the client's memory, with its centre where it can be found."""
        memory, now = update.memory, state["version"] == self.personal
        known = "axes" in state and not (memory and "centre" in memory)
        if not (now or known):
            return state["signals"], memory
        n = self.vertices
        signal = combine(None, [*update.points.detach()], [1 / n] * n, minus=update.base.detach())
        if now:
            return [*state["signals"], signal], memory
        rows, minus = [*state["axes"], signal], [*(None for _ in range(n)), state["mean"]]
        places = gram(rows, minus=minus)[0, -1, :n]
        return [], {**(memory or {}), "centre": onto_simplex(places, state["scale"])}
