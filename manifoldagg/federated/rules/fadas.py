"""FADAS: an AMSGrad step along a buffer mean, with a smaller rate for stale buffers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from manifoldagg._validation import check_choice, check_count, check_decay, check_number
from manifoldagg.federated.rules._buffer import BufferedRule, BufferMean
from manifoldagg.federated.rules._gaussian_mechanism import GaussianMechanism
from manifoldagg.federated.rules.fedadam import adam_step, model_distance, update_moments
from manifoldagg.federated.schedules import Rate
from manifoldagg.federated.types import Outcome, State, Update
from manifoldagg.kernels.alloc import empty_like
from manifoldagg.manifolds import Manifold

__all__ = ["FADAS"]

ADAPTIVE_MODES = ("bound", "scale", "none")


@dataclass(frozen=True)
class FADAS(BufferedRule):
    r"""Adaptive asynchronous optimization (FADAS): an AMSGrad step along a buffer mean with a delay-adaptive rate.

    Let $\Delta = \frac1M \sum_i \Delta_i$ be the mean of M displacements, each measured from the base of its client.
    The moments $m$, $v$ and $\hat v$ and the model become

    $$m \leftarrow \beta_1 m + (1 - \beta_1)\, \Delta, \qquad
      v \leftarrow \beta_2 v + (1 - \beta_2)\, \Delta \odot \Delta, \qquad
      \hat v \leftarrow \max(\hat v, v), \qquad
      \Theta \leftarrow \Theta + \eta_\tau\, \frac{m}{\sqrt{\hat v} + \epsilon}.$$

    The moments have no bias correction. The rate depends on $\tau_{\max}$, the largest staleness in the buffer: if
    $\tau_{\max}$ is at most the threshold $\tau_c$, $\eta_\tau = \eta$. Otherwise, $\eta_\tau = \min(\eta, 1 /
    \tau_{\max})$. With $\beta_1 = \beta_2 = 0$, the step is $\eta_\tau \Delta / (\max_s |\Delta_s| + \epsilon)$, with
    the maximum over all buffers so far.

    Use this rule when Adam works well for the model and some clients are much slower than others. The rule stores no
    client states, so clients can join, leave or fail at any time.

    Published implementations differ from each other. Some of them divide by $\sqrt v$, correct the bias of the moments,
    use the rate $\eta / \tau_{\max}$, or measure displacements from the current model. This class follows the paper.
    The option `adaptive="scale"` selects the rate $\eta / \tau_{\max}$.

    Args:
        size: the number M of updates per step.
        rate: the rate $\eta$: a number or a function of the version $\tau$.
        transport: the transport of tangents on a curved space: `"parallel"`, `"ladder"` or `"projection"`. The default
            `None` uses parallel transport where a closed form exists, and a ladder otherwise. A flat space accepts only
            `None`.
        rungs: the number of rungs of a ladder.
        beta1: the decay $\beta_1$ of the first moment.
        beta2: the decay $\beta_2$ of the second moment.
        epsilon: the constant $\epsilon > 0$.
        initial_square: the initial value of $\hat v$. The initial values of $v$ and $m$ are 0.
        delay_threshold: the threshold $\tau_c$, in versions.
        adaptive: the rate for $\tau_{\max} > \tau_c$: `"bound"` is $\min(\eta, 1 / \tau_{\max})$, `"scale"` is
            $\eta / \tau_{\max}$, and `"none"` is $\eta$.

    Raises:
        ArgumentError: if an option is out of range, or if the space is curved.

    Source: Wang et al. 2024 (ICML), Algorithm 1 and its delay-adaptive rate.

    Cost: a step reads 17 words per parameter, writes 4 and allocates 3. A buffered update reads 7, writes 1 and
    allocates 2.

    Example:
        >>> import manifoldagg, torch
        >>> model, update = [torch.tensor([0.0, 0.0])], [torch.tensor([1.0, -100.0])]
        >>> manifoldagg.aggregate(FADAS(1, rate=0.5), None, model, model, update)[0]
        [tensor([ 0.5000, -0.5000])]
        >>> manifoldagg.aggregate(FADAS(1, rate=0.5), None, model, model, update, staleness=8)[0]
        [tensor([ 0.1250, -0.1250])]
    """

    cohort: ClassVar[int] = 1
    rate_kind: ClassVar[str] = ""
    self_checked: ClassVar[tuple[str, ...]] = ("points",)
    needs_flat: ClassVar[str] = "elementwise squares"
    size: int = 10
    rate: Rate = 1e-3
    beta1: float = field(default=0.9, kw_only=True)
    beta2: float = field(default=0.99, kw_only=True)
    epsilon: float = field(default=1e-8, kw_only=True)
    initial_square: float = field(default=0.0, kw_only=True)
    delay_threshold: int = field(default=1, kw_only=True)
    adaptive: str = field(default="bound", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("size", self.size)
        check_decay("beta1", self.beta1)
        check_decay("beta2", self.beta2)
        check_number("epsilon", self.epsilon, above=0)
        check_number("initial_square", self.initial_square, at_least=0)
        check_count("delay_threshold", self.delay_threshold, at_least=0)
        check_choice("adaptive", self.adaptive, ADAPTIVE_MODES)

    @property
    def buffer_size(self) -> int:
        return self.size

    def init(self, space: Manifold, start: Tensor) -> State:
        check_number("initial_square", self.initial_square, at_most=torch.finfo(start.dtype).max)
        # An entry whose moments are 0 is divided by epsilon alone, so epsilon must not round to 0 in this dtype.
        least = torch.tensor(self.epsilon, dtype=torch.float64).to(start.dtype).item()
        check_number(f"epsilon: in {start.dtype}", least, above=0)
        largest = torch.full_like(start, self.initial_square)
        zeros = {"m": torch.zeros_like(start), "v": torch.zeros_like(start), "largest": largest}
        return super().init(space, start) | zeros | {"max_staleness": 0}

    def plan_with_noise(
        self,
        space: Manifold,
        state: State,
        update: Update,
        mechanism: GaussianMechanism | None = None,
        *,
        out: Tensor | None = None,
    ) -> tuple[State, Outcome]:
        late = max(state["max_staleness"], update.staleness)
        return super().plan_with_noise(space, {**state, "max_staleness": late}, update, mechanism, out=out)

    def step_size(self, state: State) -> float:
        return self.delay_adapted_rate(super().step_size(state), state["max_staleness"])

    def delay_adapted_rate(self, rate: float, max_staleness: int) -> float:
        r"""Return $\eta_\tau$ for a buffer whose largest staleness is `max_staleness`, in versions.

        Example:
            >>> [FADAS().delay_adapted_rate(0.5, late) for late in (0, 1, 2, 4)]
            [0.5, 0.5, 0.5, 0.25]
        """
        if max_staleness <= self.delay_threshold or self.adaptive == "none":
            return rate
        return rate / max_staleness if self.adaptive == "scale" else min(rate, 1 / max_staleness)

    def apply_step(
        self, state: State, mean: BufferMean, rate: float, out: Tensor | None
    ) -> tuple[Tensor, float, dict[str, Any]]:
        model = empty_like(mean.current) if out is None else out
        names = ("m", "v", "largest")
        after = {name: empty_like(state[name]) for name in names}
        vectors = [after[name] for name in names] + [state[name] for name in names]
        for delta, reached, current, *news, m, v, largest in mean.iter_chunks(model, mean.current, *vectors):
            update_moments(m, v, delta, (self.beta1, self.beta2), out=news[:2])
            torch.maximum(largest, news[1], out=news[2])
            adam_step(current, news[0], news[2], self.epsilon, rate, out=reached)
        return model, model_distance(model, mean.current), after | {"max_staleness": 0}
