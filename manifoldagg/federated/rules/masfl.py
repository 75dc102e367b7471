"""MasFL: server momentum with a control variate for each client.

The control variates remove the bias that heterogeneous client data and delayed updates cause.
"""

import abc
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_finite, check_number
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.rules._base import ServerRule
from manifoldagg.federated.rules._geometry import check_points, safe_sqrt
from manifoldagg.federated.schedules import Rate, rate_at
from manifoldagg.federated.types import ClientState, Message, Outcome, State, Update
from manifoldagg.kernels import combine, gram
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.kernels.chunking import chunks
from manifoldagg.manifolds import Manifold

__all__ = ["MasFL", "MasFLRates"]

INITIAL_MODES = ("gradient", "zero")


class MasFLRates(NamedTuple):
    r"""Momentum coefficient and learning rates for which Theorem 1 of the MasFL paper guarantees convergence.

    Attributes:
        beta: the momentum coefficient $\beta$.
        gamma: the learning rate $\gamma$ of the server, which is the option `rate` of `MasFL`.
        eta: the largest local learning rate $\eta$ for which the theorem holds.
    """

    beta: float
    gamma: float
    eta: float


MAX_NORM = sys.float_info.max / 4
"""The largest norm that is represented exactly. Larger norms are stored as the largest finite number."""


@dataclass(frozen=True)
class ControlVariateRule(ServerRule):
    """Base class for MasFL and AdaMasFL, which implements momentum with control variates.

    The control variate $c_i$ of client i is its last mean gradient, which the client state stores. The state of the
    rule contains the mean $c$ of all control variates, the momentum $g$ and one sum for the buffered updates. Both $c$
    and the sum are in float64, so an extremely long gradient cancels when the client's next gradient replaces it.

    If a client returns two updates before a step, it counts once, because the differences $c_i^+ - c_i$ of successive
    gradients add up to the difference of the last and the first.

    The rule rejects an update after which a step would not be finite. Usually, the norms in the state prove that the
    step is finite. Otherwise, the rule computes the step before it buffers the update.
    """

    cohort: ClassVar[int] = 1
    tensors: ClassVar[Mapping[str, int | None]] = {"gradient": None}
    numbers: ClassVar[Sequence[str]] = ("opening",)
    self_checked: ClassVar[Sequence[str]] = ("gradient",)
    not_private_because: ClassVar[str] = "it stores a control variate of each client"
    needs_flat: ClassVar[str] = "control variates"
    size: int = 10
    clients: int | None = field(default=None, kw_only=True)
    initial: str = field(default="gradient", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size", self.size)
        check_choice("initial", self.initial, INITIAL_MODES)
        if self.clients is not None and check_count("clients", self.clients) < self.size:
            raise ArgumentError(f"clients: expected at least size = {self.size}, got {self.clients}")

    @property
    @abc.abstractmethod
    def momentum(self) -> float:
        r"""The momentum coefficient $\beta$."""

    @abc.abstractmethod
    def apply_step(
        self, state: State, update: Update, g: Tensor, out: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the new model and the metrics of a step along the momentum `g`.

        The rule calls this method when its buffer of updates is full. It may also call the method earlier to check that
        a step with the buffered updates would be finite, and then discards the result.
        """

    @abc.abstractmethod
    def entry_change_bound(self, state: State, pending: Mapping[str, Any], g_norm: float) -> float:
        """Return an upper bound for the absolute change of every model entry in the next step.

        The argument `pending` contains the buffered updates. The norm of the next momentum $g$ is at most `g_norm`.
        """

    def accumulate(self, pending: dict[str, Any], update: Update) -> dict[str, Any]:
        """Return the entries of the buffer other than the sum, after adding an update."""
        return {}

    def message_numbers(self) -> dict[str, float]:
        """Return the numbers that a subclass adds to the message."""
        return {}

    def init(self, space: Manifold, start: Tensor) -> State:
        zeros = {"g": torch.zeros_like(start), "c": torch.zeros_like(start, dtype=torch.float64)}
        reach = {"norms": {"g": 0.0, "c": 0.0}}
        return (
            super().init(space, start) | {"joined": 0, "num_clients": self.clients or 0, "pending": {}} | zeros | reach
        )

    def message(self, space: Manifold, state: State, current: Tensor, client_state: ClientState) -> Message:
        opening = self.initial == "gradient" and (client_state is None or state["joined"] < (self.clients or 0))
        numbers = {"opening": float(opening), "beta": self.momentum} | self.message_numbers()
        if opening:
            return Message(current, numbers=numbers)
        beta = self.momentum
        tensors = {"direction": combine(None, [state["g"], state["c"]], [1 - beta, beta])}
        return Message(
            current, tensors | ({} if client_state is None else {"control": client_state["control"]}), numbers
        )

    def step(
        self, space: Manifold, state: State, update: Update, *, out: Tensor | None = None
    ) -> tuple[State, Outcome]:
        check_points(self, update)
        opening = update.numbers["opening"]
        beta = self.momentum
        memory = update.client_state
        allowed = (0,) if self.initial == "zero" else (1,) if memory is None else (0, 1)
        if opening not in allowed:
            expected = "1 for the first update of a client" if allowed == (1,) else " or ".join(map(str, allowed))
            raise ArgumentError(f"numbers: opening: expected {expected}, got {opening:g}")
        gradient = update.tensors["gradient"].detach()
        length = _saturated_norm(gradient)
        joined = state["joined"] + (memory is None)
        among = max(state["num_clients"], joined)
        kept = {"control": gradient.clone(), "length": length}
        rows = [gradient]
        minus: list[Tensor | None] = [None if memory is None else memory["control"]]
        waiting = state["pending"]
        who = waiting.get("clients", [])
        if opening:
            c = combine(None, [state["c"], *rows], [state["num_clients"] / among, 1 / among], minus=[None, *minus])
            check_finite("tensors: gradient: mean", c)
            after = {**state, "joined": joined, "num_clients": among, "c": c}
            if state["version"] == 0:
                after["g"] = check_finite("tensors: gradient: mean", c.to(gradient.dtype, copy=True))
            return after | {"norms": _norms(after)}, Outcome(
                None, kept, {"buffered": float(len(who))}, state_is_finite=True
            )
        if waiting:
            rows.append(waiting["sum"])
            minus.append(None)
        who = who if update.client in who else [*who, update.client]
        far = waiting.get("length", 0.0) + length + (0.0 if memory is None else memory["length"])
        ahead = {
            "g": beta * (far / self.size + state["norms"]["c"]) + (1 - beta) * state["norms"]["g"],
            "c": state["norms"]["c"] + far / among,
        }
        if len(who) < self.size:
            wide = empty_like(gradient, dtype=torch.float64)
            total = combine(None, rows, [1.0] * len(rows), minus=minus, out=wide)
            held = {"clients": who, "sum": total, "length": far} | self.accumulate(waiting, update)
            after = {**state, "joined": joined, "pending": held}
            settled = self._is_bounded(state, held, ahead, gradient.dtype)
            if not settled:
                check_finite("tensors: gradient: sum over the buffer", total)
                g, _ = self._next_momentum_and_mean(state, rows, minus, among)
                model, _ = self.apply_step(state, update, g, out)
                # An update that would cause the rejection of other updates is rejected itself.
                check_finite("tensors: gradient: model after a step", model)
                after |= {"pending": {**held, "length": _saturated_norm(total)}, "norms": _norms(state)}
            return after, Outcome(None, kept, {"buffered": float(len(who))}, state_is_finite=settled)
        settled = self._is_bounded(state, waiting, ahead, gradient.dtype)
        g, c = self._next_momentum_and_mean(state, rows, minus, among, check=not settled)
        model, numbers = self.apply_step(state, update, g, out)
        after = {"version": state["version"] + 1, "joined": joined, "num_clients": among, "pending": {}, "g": g, "c": c}
        after["norms"] = ahead if settled else _norms(after)
        return after, Outcome(model, kept, {"buffered": 0.0} | numbers, state_is_finite=True)

    def _next_momentum_and_mean(
        self, state: State, rows: list[Tensor], minus: list[Tensor | None], num_clients: int, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return the momentum and the mean control variate of all clients after a step."""
        # The sum of the control variates changes by D, the sum of `rows` minus the sum of `minus` (`None` is zero).
        # With the buffer size S, the momentum g becomes beta * (D / S + c) + (1 - beta) * g. If the number of clients
        # grows from N to N', the mean c becomes (N c + D) / N'.
        beta = self.momentum
        count = len(rows)
        shares = [beta / self.size] * count + [beta, 1 - beta]
        means = [state["num_clients"] / num_clients] + [1 / num_clients] * count
        g = empty_like(state["g"])
        c = empty_like(state["c"])
        # Only the first row can have a subtrahend, because the second row is the buffered sum.
        less = [row for row in minus if row is not None]
        for here, there, old, before, *parts in chunks(g, c, state["c"], state["g"], *rows, *less):
            lines = parts[:count]
            taken = [*parts[count:], *[None] * (count - len(less))]
            combine(None, [*lines, old, before], shares, minus=[*taken, None, None], out=here)
            combine(None, [old, *lines], means, minus=[None, *taken], out=there)
        if check:
            check_finite("tensors: gradient: momentum", g)
            check_finite("tensors: gradient: mean", c)
        return g, c

    def _is_bounded(
        self, state: State, pending: Mapping[str, Any], norm_bounds: Mapping[str, float], dtype: torch.dtype
    ) -> bool:
        """Return whether bounds on the norms of vectors prove that the result of a step is finite.

        The absolute value of each entry of a vector is at most the norm of the vector. A bound on the norm therefore
        bounds all entries.
        """
        most = torch.finfo(dtype).max
        wide = max(norm_bounds["c"], pending.get("length", 0.0)) <= MAX_NORM
        # If a change is below a quarter of the spacing of the largest finite numbers, rounding discards it there, so a
        # finite model entry cannot overflow.
        still = self.entry_change_bound(state, pending, norm_bounds["g"]) <= most * torch.finfo(dtype).eps / 8
        return wide and norm_bounds["g"] <= most / 4 and still


def _saturated_norm(vector: Tensor) -> float:
    """Return the norm, or the largest finite number if the square of the norm overflows."""
    length = safe_sqrt(gram([vector])[0, 0, 0].item())
    return length if length <= MAX_NORM else sys.float_info.max


def _norms(state: State) -> dict[str, float]:
    """Return the norms of $g$ and $c$."""
    return {name: _saturated_norm(state[name]) for name in ("g", "c")}


@dataclass(frozen=True)
class MasFL(ControlVariateRule):
    r"""MasFL: momentum on the server, and a control variate for each client.

    Client i returns the mean $c_i^+$ of K local gradients. Its control variate $c_i$ is the mean that it returned
    before. After the updates of S distinct clients, the momentum $g$, the model and the mean $c$ of the control
    variates become

    $$g \leftarrow \beta \Big(\frac1S \sum_{i \in S} (c_i^+ - c_i) + c\Big) + (1 - \beta)\, g, \qquad
      \Theta \leftarrow \Theta - \gamma\, g, \qquad c \leftarrow c + \frac1N \sum_{i \in S} (c_i^+ - c_i).$$

    The new $g$ uses the old $c$. The server sends $\Theta$, $\beta c + (1 - \beta) g$ and the client's $c_i$ to the
    trainer [`ControlVariate`][manifoldagg.federated.clients.ControlVariate].

    Use this rule when clients have heterogeneous data. At a stationary point of the joint loss $\frac1N \sum f_i$ with
    $g = c = 0$ and $c_i = \nabla f_i$, no client moves. The method is therefore unbiased for any K, any delays and any
    data.

    Participation:

    - When a client joins late, N grows, so that $c$ remains the mean. The option `initial` determines the first $c_i$.
    - If a client leaves, its last $c_i$ remains in $c$.
    - An update on an old ticket counts like any other update.
    - A dropped ticket changes nothing.

    Args:
        size: the number S of distinct clients per step.
        rate: the rate $\gamma$: a number or a function of the version. The paper uses $\beta / (4L)$, see `theory`.
        beta: the momentum coefficient $\beta \in (0, 1]$. The paper uses $\sqrt{SK/T}$, see `theory`.
        clients: the number N of clients. With `initial="gradient"`, the model does not move before all N clients have
            returned their first updates. With `initial="zero"`, $c$ is a mean over N clients. With `None`, N is the
            number of clients that have joined. More than N clients can join.
        initial: the initial $c_i$. `"gradient"` requests the mean gradient of K batches at the client's first start,
            and starts with $g = c$. `"zero"` starts with 0.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved.

    Source: MasFL, Algorithms 1 and 2.

    Cost: a step reads 14 words per parameter, writes 5 and allocates 4. A buffered update reads 7, writes 3 and
    allocates 4. The rule does not read the points of a payload. The server stores 2 vectors for the state, 1 vector for
    the buffer, and 1 vector per client.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import Payload, Server
        >>> from manifoldagg.manifolds import Flat
        >>> server = Server(Flat(1), MasFL(1, 0.5, 0.5, initial="zero"), torch.zeros(1))
        >>> def update(gradient):
        ...     tensors = {"gradient": torch.tensor([gradient])}
        ...     return Payload(torch.zeros(1, 1), 1, tensors, {"opening": 0.0})
        >>> _ = server.receive(server.dispatch("a").id, update(4.0))
        >>> server.model, server.dispatch("a").message.tensors
        (tensor([-1.]), {'direction': tensor([3.]), 'control': tensor([4.])})
    """

    rate: Rate = 0.1
    beta: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("beta", self.beta, above=0, at_most=1)

    @staticmethod
    def theory(S: int, K: int, T: int, L: float, max_delay: float) -> MasFLRates:
        r"""Compute the rates for which Theorem 1 of the MasFL paper guarantees convergence.

        The result contains the momentum coefficient $\beta$, the server rate $\gamma$ and the largest local rate
        $\eta$:

        $$\beta = \sqrt{\frac{SK}{T}}, \qquad \gamma = \frac{1}{4L} \sqrt{\frac{SK}{T}}, \qquad
          \eta \le \frac{\sqrt{T - \sqrt{SKT} - 4 S K \tau_{\max}^2}}{4 \sqrt5\, e\, K L \sqrt T}.$$

        Here, S is the number of distinct clients per step, K is the number of local steps, and T is the number of
        server steps. L is the smoothness constant of the losses, $\tau_{\max}$ is the largest staleness, and $e$ is
        Euler's number.

        The bound on $\eta$ follows from the condition $1 - 4a - \sqrt{SK/T} \ge 0$ of the theorem, with
        $a = \tau_{\max}^2 \beta^2 + 20 e^2 \eta^2 K^2 L^2$. The theorem also requires a "sufficiently large" T. It does
        not state a number, so this method cannot check the requirement.

        Args:
            S: the number of distinct clients per step.
            K: the number of local steps.
            T: the number of server steps.
            L: the smoothness constant of the losses.
            max_delay: $\tau_{\max}$, the largest staleness in versions.

        Raises:
            ArgumentError: if an argument is out of range, or if T is so small that no positive $\eta$ satisfies the
                condition. The message contains the smallest T.

        Source: MasFL, Theorem 1.

        Example:
            >>> rates = MasFL.theory(S=4, K=4, T=1600, L=2.0, max_delay=0)
            >>> rates.beta, rates.gamma, round(rates.eta, 6)
            (0.1, 0.0125, 0.004877)
            >>> MasFL(4, rates.gamma, rates.beta).beta
            0.1
        """
        work = check_count("S", S) * check_count("K", K)
        check_number("L", L, above=0)
        check_number("max_delay", max_delay, at_least=0)
        left = check_count("T", T) - math.sqrt(work * T) - 4 * work * max_delay**2
        if not left > 0:
            # T must exceed the square of the positive root of x² - x √(SK) - 4 SK τ², where x = √T.
            least = math.floor(work * ((1 + math.sqrt(1 + 16 * max_delay**2)) / 2) ** 2) + 1
            raise ArgumentError(f"T: expected at least {least} for these S, K and max_delay, got {T}")
        beta = math.sqrt(work / T)
        eta = math.sqrt(left / T) / (4 * math.sqrt(5) * math.e * K * L)
        return MasFLRates(beta, beta / (4 * L), eta)

    @property
    def momentum(self) -> float:
        return self.beta

    def apply_step(
        self, state: State, update: Update, g: Tensor, out: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        rate = rate_at(self.rate, state["version"])
        model = combine(update.current.detach(), [g], [-rate], out=out)
        return model, {"rate": rate, "norm": rate * safe_sqrt(gram([g])[0, 0, 0].item())}

    def entry_change_bound(self, state: State, pending: Mapping[str, Any], g_norm: float) -> float:
        return rate_at(self.rate, state["version"]) * g_norm
