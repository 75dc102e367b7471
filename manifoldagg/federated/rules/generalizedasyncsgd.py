"""Generalized AsyncSGD: asynchronous SGD without a bias towards clients that are sampled more often.

The rule divides each gradient by the sampling probability of its client.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from manifoldagg._validation import check_number, other_type_hint, short_repr
from manifoldagg.corrections import Correction, Tangent
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._correction_rule import CorrectionRule
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import State, Update

__all__ = ["GeneralizedAsyncSGD"]

SUM_TOLERANCE = 1e-6


class RoutingShares(Mapping[Hashable, float]):
    """Immutable and hashable mapping from clients to their shares of the tasks."""

    def __init__(self, shares: Mapping[Any, float]) -> None:
        self._shares: dict[Hashable, float] = dict(shares)

    def __getitem__(self, client: Hashable) -> float:
        return self._shares[client]

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._shares)

    def __len__(self) -> int:
        return len(self._shares)

    def __hash__(self) -> int:
        return hash(frozenset(self._shares.items()))

    def __repr__(self) -> str:
        return repr(self._shares)


@dataclass(frozen=True)
class GeneralizedAsyncSGD(CorrectionRule):
    r"""Generalized AsyncSGD: each gradient is divided by the sampling probability of its client.

    After each task that client i completes, the new model is

    $$\Theta \leftarrow \Theta - \frac{\eta}{n\, p_i}\, g_i(\Theta^t).$$

    Here, n is the number of clients in `routing`, and $p_i$ is the probability that a task is assigned to client i.
    After each completed task, the server assigns a new task, even if the sampled client is busy. Each client processes
    its tasks in first-in, first-out order. The expected step is then
    $-\eta \cdot \frac1n \sum_i g_i$ for any probabilities p.

    Use this rule when you want to choose how often each client trains without a bias towards fast clients.

    The client returns the model $\Theta^t - g_i$, which is one step of gradient descent with rate 1. The trainer
    [`Gradient`][manifoldagg.federated.clients.Gradient] computes this model. The step is not clamped and not
    weighted by staleness.

    Participation:

    - The rule rejects a client without a positive share. A client that joins late needs a new routing and a new rule.
    - A client that leaves keeps its share. To keep the expected step, assign its tasks again with the probabilities p.
    - After a failed task, one gradient is missing.
    - A client may have several tickets at the same time. Updates on old tickets count in full.

    Args:
        routing: the probabilities p, with sum 1 up to 1e-6. Pass a mapping from clients, or a sequence for the clients
            0 to n - 1, such as `p` of the result of `manifoldagg.routing.optimise_routing`.
        rate: the rate $\eta$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved, because a point on a curved leaf does
            not determine the norm of the gradient.

    Source: Queue, Algorithm 1, line 9 (Leconte et al. 2024).

    Cost: a step reads 3 words per parameter, writes 1 and allocates 0.

    Example:
        >>> import manifoldagg, torch
        >>> rule, model, gradient = GeneralizedAsyncSGD([0.25, 0.75], rate=0.5), [torch.tensor([1.0])], 2.0
        >>> info = manifoldagg.UpdateInfo(client=0)
        >>> manifoldagg.aggregate(rule, None, model, model, [model[0] - gradient], info=info)[0]
        [tensor([-1.])]
    """

    needs_flat: ClassVar[str] = "gradients"
    overshoot = "extend"
    routing: Mapping[Any, float] | Iterable[float]
    rate: Rate = 0.01  # type: ignore[assignment]  # an option in place of the method

    def __post_init__(self) -> None:
        super().__post_init__()
        given = self.routing
        if not isinstance(given, Iterable):
            raise ArgumentError(f"routing: expected a mapping from clients or a sequence, got {short_repr(given)}")
        shares = dict(given) if isinstance(given, Mapping) else dict(enumerate(given))
        shares = {client: check_number(f"routing[{short_repr(client)}]", p, at_least=0) for client, p in shares.items()}
        if abs(sum(shares.values()) - 1) > SUM_TOLERANCE:
            raise ArgumentError(f"routing: expected shares that sum to 1, got a sum of {sum(shares.values()):.9g}")
        object.__setattr__(self, "routing", RoutingShares(shares))

    @property
    def correction(self) -> Correction:
        return Tangent()

    def step_size(self, state: State, update: Update, penalty: Callable[[float], float]) -> float:
        shares = cast(Mapping[Any, float], self.routing)
        share = shares.get(update.client, 0.0)
        if not share > 0:
            hint = other_type_hint(update.client, shares)
            given = f"{short_repr(update.client)}{hint}"
            raise ArgumentError(f"client: expected a client with a share of the routing, got {given}")
        return rate_at(self.rate, state["version"]) / (len(shares) * share)
