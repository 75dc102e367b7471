"""Client-level differential privacy: clipped displacements, and Gaussian noise on their sum."""

import math
import secrets
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import Tensor

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import ServerRule, commit
from manifoldagg.federated.rules._buffer import BufferedRule
from manifoldagg.federated.rules._gaussian_mechanism import GaussianMechanism, derive_key
from manifoldagg.federated.rules._wrapper import WrapperRule
from manifoldagg.federated.schedules import check_options
from manifoldagg.federated.types import (
    ClientState,
    Message,
    Outcome,
    Point,
    Rule,
    State,
    Update,
    check_rule_protocol,
)
from manifoldagg.manifolds import Manifold, ParameterSpace

__all__ = ["Private"]


@dataclass(frozen=True)
class Private(WrapperRule):
    r"""Wrapper that adds client-level differential privacy to a rule.

    The wrapped rule must step along a sum $\sum_i a_i \Delta_i$ of displacements. The wrapper clips each displacement
    and adds noise to the sum:

    $$\sum_i a_i \min\Bigl(1, \frac{C}{\|\Delta_i\|}\Bigr) \Delta_i + \sigma C z, \qquad z \sim N(0, I), \; a_i \le 1.$$

    Adding or removing one update changes the sum before the noise by at most C. The rest of the step depends only on
    this sum. With $\sigma = 0$ and $C = \infty$, the results are bit-identical to those of the wrapped rule.

    Use this rule when a published model must not reveal whether a client took part. The threat model is described in
    [Differential privacy](../guide/differential_privacy.md).

    Privacy accounting:

    - Each model is the output of a Gaussian mechanism. For a client with m updates in the buffer, the noise multiplier
      is $\sigma / m$.
    - Over all buffers j, the total privacy loss of a client is at most that of one Gaussian mechanism with noise
      multiplier $\sigma / \sqrt n$, where $n = \sum_j m_j^2$.
    - The metric `numbers["participations"]` is the largest n over all clients. The function
      [`epsilon`][manifoldagg.integrations.accounting.epsilon] converts n to $\varepsilon$.

    If a displacement is not finite or overflows in the dtype of the model, the rule treats the update as zero. A
    rejection would reveal private data.

    Args:
        rule: `FedAvg`, `DeFedAvg`, `FedBuff`, `FADAS` or `FedAdam`, with `weighted=False`. The error for any other rule
            states the reason. `Momentum(Private(rule))` is as private as `Private(rule)`.
        clip: the clipping norm C, in the units of the norm of an update.
        noise: the noise multiplier $\sigma$.
        participations: the limit of n for each client. The rule rejects an update that would exceed this limit.
        seed: a seed for experiments. Do not use a seed in production, because anyone who knows it can subtract the
            noise. With `None`, the key comes from the random source of the operating system.

    Raises:
        ArgumentError: if an option is out of range, if the rule cannot be private, if the space is not flat, or if the
            rule is used in an outer optimizer.
        RuleError: if a staleness weight is above 1.

    Source: McMahan et al. 2018 (Learning Differentially Private Recurrent Language Models), Algorithm 1; Dong, Roth, Su
    2022, Corollary 3.3, for the composition.

    Cost: a step reads 19 words per parameter, writes 3 and allocates 2. A buffered update reads 7, writes 1 and
    allocates 2. These numbers are for `FedBuff` with noise. Sampling the noise and hashing the sum take most of the
    time.

    Example:
        >>> import manifoldagg, torch
        >>> from manifoldagg.federated.rules import FedBuff
        >>> rule, model = Private(FedBuff(1), clip=5.0, noise=0.0), [torch.zeros(2)]
        >>> manifoldagg.aggregate(rule, None, model, model, [torch.tensor([30.0, 40.0])])[0]
        [tensor([3., 4.])]
        >>> Private(FedBuff(10), clip=5.0, noise=1.1, participations=20).cohort
        1
    """

    not_private_because: ClassVar[str] = "it is already private"
    is_private: ClassVar[bool] = True
    """Whether the server must reject options that would reveal the data of a single client."""
    rule: Rule
    clip: float
    noise: float
    participations: int | None = field(default=None, kw_only=True)
    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        check_options(self)
        check_rule_protocol(self.rule)
        name = type(self.rule).__name__
        if not isinstance(self.rule, BufferedRule) or self.rule.not_private_because:
            why = getattr(self.rule, "not_private_because", ServerRule.not_private_because)
            raise ArgumentError(f"rule: {name} cannot be private: {why}")
        if getattr(self.rule, "weighted", False):
            raise ArgumentError(f"rule: expected {name}(weighted=False), as sample counts are private data of clients")
        check_number("noise", self.noise, at_least=0)
        if self.noise or self.clip != math.inf:
            check_number("clip", self.clip, above=0)
        if self.participations is not None:
            check_count("participations", self.participations)
        if self.seed is not None:
            check_count("seed", self.seed, at_least=0)

    @property
    def self_checked(self) -> tuple[str, ...]:
        """The names of the inputs that the rule checks for NaN and infinity in place of the server.

        If the server checked these inputs, the rejection of an update would reveal private data.
        """
        return ("points", *getattr(self.rule, "self_checked", ()))

    def carried_displacements(self, space: ParameterSpace, state: State) -> list[list[tuple[float, Tensor]]]:
        """Return the displacements that the wrapped rule carries to the next step."""
        carried: list[list[tuple[float, Tensor]]] = self.rule.carried_displacements(space, state["rule"])  # type: ignore[attr-defined]
        return carried

    def init(self, space: Manifold, start: Point) -> State:
        inner = self.rule.init(space, start)
        if not space.flat:
            curved = ", ".join(str(leaf) for leaf in space.leaves(start) if not leaf.space.flat)
            raise ArgumentError(
                f"space: expected flat leaves for the clipping and noise of Private, got curved leaves: {curved}"
            )
        secret = secrets.token_bytes(64) if self.seed is None else str(self.seed).encode()
        return {"rule": inner, "participations": 0, "key": derive_key(secret)}

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        return self.rule.message(space, state["rule"], current, None)

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        return commit(self.plan(space, state, update, out=out), out)

    def plan(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        """Prepare a step of the wrapped rule with clipped displacements and added noise.

        If the wrapped rule is `FedAdam` or another rule that computes whole vectors, the method also computes the new
        model, and may write it to `out`, an optional output buffer. Otherwise, the caller computes the new model.
        """
        if update.is_pseudo_gradient:
            raise ArgumentError("rule: Private requires client identities, which an outer optimizer does not have")
        memory: dict[str, Any] = update.client_state or {"n": 0, "version": None, "here": 0}
        version = state["rule"]["version"]
        # A further update increases the square of the number m of updates in the buffer by 2 m + 1.
        here = memory["here"] if memory["version"] == version else 0
        mine = memory["n"] + 2 * here + 1
        if self.participations is not None and mine > self.participations:
            most = f"{self.participations} participations"
            raise ArgumentError(f"client: expected at most {most}, got {mine} with this update")
        mechanism = GaussianMechanism(self.clip, self.noise, state["key"])
        rule: Any = self.rule  # a BufferedRule
        told: dict[str, float] = {}
        try:
            inner, outcome = rule.plan_with_noise(space, state["rule"], update, mechanism, out=out)
        except ArgumentError:
            # After a rejection, every later update would be one position earlier, so every later buffer would depend
            # on this update.
            inner, outcome = rule.plan_with_noise(space, state["rule"], _zero_update(update), mechanism, out=out)
            told = {"clip": 0.0}
        largest = max(state["participations"], mine)
        kept = {"n": mine, "version": version, "here": here + 1}
        told = {**outcome.numbers, "participations": float(largest), **told}
        after = {**state, "rule": inner, "participations": largest}
        return after, Outcome(outcome.model, kept, told, outcome.state_is_finite)


def _zero_update(update: Update) -> Update:
    """Return a copy of an update with the server's current model in place of the client's."""
    current: Any = update.current
    points = (current,) if isinstance(update.points, tuple) else current[None]
    # The base is also the current model, so the displacement is zero.
    return replace(update, base=current, points=points)
