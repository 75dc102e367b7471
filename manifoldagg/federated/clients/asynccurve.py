"""Client trainer for the rule AsyncCurve.

The trainer learns a quadratic Bézier curve that starts at the server model. It trains the end of the curve, which is
the local model, and the control point between the start and the end.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import (
    check_choice,
    check_count,
    check_decay,
    check_number,
    check_shape,
    renamed_arguments,
    short_repr,
)
from manifoldagg.curves import Bezier, Control, Phases, ProximalTerm, Sharpness, Training
from manifoldagg.curves.proximal import check_proximal
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import BaseTrainer, TrainingTask
from manifoldagg.federated.types import Message, Payload
from manifoldagg.kernels import combine
from manifoldagg.manifolds.optimizers import Optimizer

__all__ = ["AsyncCurve"]

BIAS_FREE_STEPS = 1e9
"""A number of steps so large that Adam's bias correction has no effect."""


@dataclass(frozen=True)
class AsyncCurve(BaseTrainer):
    r"""Trainer that alternately learns the end $\theta$ and the control point $\varphi$ of a quadratic curve.

    Each epoch for the end is followed by an epoch for the control point:

    - Adam trains the end on the loss $\ell(\theta)$ plus a proximal term. This optimizer starts from the moments $m$
      and $v$ in the server's message.
    - A second Adam optimizer, which restarts in each epoch, trains the control point. It minimises the mean loss at
      random points $\lambda \sim U[0, 1]$ of the curve, which starts at the server's model $\Theta^t$. The control
      point is the midpoint $M$ plus a trained displacement $\delta$, from which the fraction $\gamma$ of the component
      along $\theta - \Theta^t$ is removed:

    $$\varphi = M + \delta - \gamma \operatorname{proj}_{\theta - \Theta^t} \delta, \qquad M = \tfrac12 (\Theta^t +
      \theta), \qquad \min_\delta\; \mathbb{E}_\lambda\, \ell((1 - \lambda)^2\, \Theta^t + 2 \lambda (1 - \lambda)\,
      \varphi + \lambda^2\, \theta).$$

    The proximal term only applies to the end.

    Moments from the server are already means over many steps. By default, Adam therefore does not apply the bias
    correction $1 - \beta^k$ to them. With `as_printed`, Adam applies the correction from k = 1. The first step is then
    about $\beta_1 / (1 - \beta_1)$ times as long as a step of the server. A client without moments starts with a new
    Adam optimizer.

    The printed algorithm contradicts the paper's text in two points. The trainer follows the text:

    - The curve has the weight 2 on $\varphi$.
    - The trainer returns the projected $\varphi$, which was trained.

    Args:
        epochs: the number of epochs for the end, and also for the control point.
        rate: the learning rate of the end.
        control_rate: the learning rate of the control point. The default is a tenth of `rate`.
        betas: the decay rates $(\beta_1, \beta_2)$ of the moments in both Adam optimizers.
        eps: the constant $\epsilon$ that both Adam optimizers add to the denominator of a step.
        projection: the fraction $\gamma \in [0, 1]$ of the motion along $\theta - \Theta^t$ that is removed from the
            control point.
        proximal: the weight $\mu$ of the proximal term $\tfrac{\mu}{2} \|\theta - \Theta^t\|^2$, or another
            [`ProximalTerm`][manifoldagg.curves.ProximalTerm], such as
            [`LorentzProximal`][manifoldagg.federated.clients.LorentzProximal].
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`, for sharpness-aware gradients.
        as_printed: whether Adam applies its bias correction to the server's moments.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

    Source: Report (24), (28), (30), Algorithm 2.

    Example:
        >>> from manifoldagg.federated.clients import LorentzProximal
        >>> AsyncCurve(epochs=2, rate=1e-3, proximal=LorentzProximal(0.01)).proximal.variance
        1.0
    """

    epochs: int = 2
    rate: float = 1e-3
    control_rate: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    projection: float = 1.0
    proximal: float | ProximalTerm = 0.0
    sharpness: Sharpness | None = None
    as_printed: bool = False

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        if not isinstance(self.betas, tuple) or len(self.betas) != 2:
            raise ArgumentError(f"betas: expected a pair of numbers, got {short_repr(self.betas)}")
        for i, beta in enumerate(self.betas):
            check_decay(f"betas[{i}]", beta)
        check_number("eps", self.eps, at_least=0)
        check_number("projection", self.projection, at_least=0, at_most=1)
        check_proximal(self.proximal)
        check_choice("as_printed", self.as_printed, (False, True))
        self._options()

    def num_steps(self, message: Message, num_batches: int) -> int:
        return 2 * self.epochs * num_batches

    def _train(self, task: TrainingTask) -> Payload:
        base = task.message.start
        moments = {name: task.message.tensors[name] for name in ("m", "v") if name in task.message.tensors}
        if len(moments) == 1:
            raise ArgumentError(f"message: expected both moments m and v, got only {', '.join(moments)}")
        for name, moment in moments.items():
            check_shape(f"message: {name}", moment, *task.space.axes)

        def begin(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
            descent = torch.optim.Adam(groups, lr=lr, betas=self.betas, eps=self.eps)
            end = descent.param_groups[0]["params"][0]
            if moments:
                steps = torch.tensor(0.0 if self.as_printed else BIAS_FREE_STEPS)
                m, v = (moment.detach().clone().to(end) for moment in moments.values())
                descent.state[end] = {"step": steps, "exp_avg": m, "exp_avg_sq": v}
            descent.register_step_pre_hook(lambda *_: self._add_proximal_gradient(end, base))
            return descent

        samples = task.samples
        learned = task.fit(Bezier(task.space, 2), **self._options(begin))
        passed = len(learned.losses) / (2 * self.epochs)
        buffers = task.buffers(at=learned.phi[-1])
        return Payload(learned.phi[1:], samples, numbers={"batches": passed}, buffers=buffers)

    def _options(self, optimizer: Optimizer = torch.optim.Adam) -> dict[str, Any]:
        training = Training(optimizer, self.rate, sharpness=self.sharpness)
        rate = self.rate / 10 if self.control_rate is None else self.control_rate
        with renamed_arguments({"rate": "control_rate"}):
            control = Control(rate, projection=self.projection)
        return {
            "phases": Phases((self.epochs, self.epochs), alternate=True),
            "training": training,
            "control": control,
        }

    @torch.no_grad()
    def _add_proximal_gradient(self, end: Tensor, base: Tensor) -> None:
        """Add the gradient of the proximal term at the local model `end` to `end.grad`."""
        if end.grad is None:
            return
        if isinstance(self.proximal, ProximalTerm):
            end.grad += self.proximal.gradient(end, base)
        elif self.proximal:
            combine(end.grad, [end.detach()], [self.proximal], minus=base, out=end.grad)
