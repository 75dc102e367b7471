"""Learning a curve: two phases of stochastic gradient steps on its control points."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.curves.bezier import Bezier
from manifoldagg.errors import (
    ArgumentError,
    DivergenceError,
    check_choice,
    check_count,
    check_finite,
    check_number,
    check_shape,
    is_finite,
)
from manifoldagg.manifolds import Loss

CONTROL_STARTS = ("chord", "base")
Phases = tuple[int, int]


@dataclass(frozen=True)
class Fit:
    """A learned curve: control points `phi` (n + 1, P) and the loss of every step, both phases in order."""

    phi: Float[Tensor, "control P"]
    losses: tuple[float, ...]


def fit(
    curve: Bezier,
    loss: Loss,
    batches: Iterable[Any],
    *,
    start: Float[Tensor, " P"],
    epochs: Phases = (2, 2),
    steps: Phases | None = None,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    rate: float = 1e-3,
    control_rate: float | None = None,
    freeze_end: bool = True,
    control_start: str = "chord",
    proximal: float = 0.0,
    generator: torch.Generator | None = None,
) -> Fit:
    r"""Learn a curve of low loss from $\Theta^t$ = `start`:

    $$\min_\varphi\; \mathbb{E}_{S \sim P,\, X}\Big[\ell(X; \iota_\varphi(S))
        + \tfrac{\mu}{2}\,\|\iota_\varphi(S) - \Theta^t\|^2\Big], \qquad \varphi_0 = \Theta^t .$$

    First $P = \delta_1$: ordinary training of the end point. Then $P = U[0, 1]$: one $S$ a batch, and the
    gradient $g$ at $\iota_\varphi(S)$ reaches control point i as $b_i(S)\,g$. So every step costs one forward
    and one backward pass of the model, whatever the degree, and the optimiser works on the flat points.

    Args:
        curve: the curve to fit.
        loss: `loss(theta, batch)` to a scalar, as from
            [`ParameterSpace.loss`][manifoldagg.ParameterSpace.loss].
        batches: what can be iterated again and again, such as a list or a `DataLoader`.
        start: $\Theta^t$ (P,); it is not written.
        epochs: passes over `batches` in the first and in the second phase.
        steps: optimiser steps ($K_1$, $K - K_1$) in place of `epochs`; batches are cycled.
        optimizer: any optimiser of `torch.optim` that steps without a closure, called with parameter groups
            and `lr`; bind further options with `functools.partial`.
        rate: learning rate of the end point.
        control_rate: learning rate of the control points; `rate` where not given.
        freeze_end: whether the end point rests in the second phase.
        control_start: where the inner control points are when the second phase begins: evenly on the
            `"chord"`, or all at the `"base"` $\Theta^t$.
        proximal: $\mu \ge 0$.
        generator: draws $S$; torch's default generator where not given.

    Returns:
        The learned control points and the losses (without the proximal term).

    Raises:
        ArgumentError: naming the argument that does not fit.
        DivergenceError: if a loss is not finite, naming the step, or a control point is not.

    Source: Manifold (6), Algorithm 2.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> target = torch.tensor([3.0, 4.0])
        >>> result = fit(
        ...     Bezier(Flat(2), degree=2),
        ...     lambda theta, batch: (theta - batch).square().sum(),
        ...     [target],
        ...     start=torch.zeros(2),
        ...     steps=(100, 10),
        ...     rate=0.1,
        ... )
        >>> bool((result.phi[-1] - target).norm() < 0.1)
        True
    """
    check_choice("control_start", control_start, CONTROL_STARTS)
    check_finite("start", check_shape("start", start, *curve.space.shape))
    rate = check_number("rate", rate, above=0)
    control_rate = rate if control_rate is None else check_number("control_rate", control_rate, above=0)
    proximal = check_number("proximal", proximal, at_least=0)
    name, phases = ("epochs", epochs) if steps is None else ("steps", steps)
    if not (isinstance(phases, Sequence) and len(phases) == 2):
        raise ArgumentError(f"{name}: expected a pair, first and second phase; got {phases!r}")
    for i, amount in enumerate(phases):
        check_count(f"{name}[{i}]", amount, at_least=0)
    if phases[1] and freeze_end and curve.degree == 1:
        raise ArgumentError(f"{name}[1]: a curve of degree 1 with a frozen end has nothing to learn in phase two")

    phi = curve.collapse(start.detach())
    end, controls = torch.nn.Parameter(phi[-1]), torch.nn.Parameter(phi[1:-1])
    descent = optimizer([{"params": [end], "lr": rate}, {"params": [controls], "lr": control_rate}], lr=rate)
    losses: list[float] = []

    def gradient(theta: Tensor, batch: Any) -> Tensor:
        with torch.enable_grad():
            theta = theta.detach().requires_grad_()
            value = loss(theta, batch)
            (slope,) = torch.autograd.grad(value, theta)
        losses.append(value.item())
        if not torch.isfinite(value):
            raise DivergenceError(f"the loss is {losses[-1]} at step {len(losses) - 1}; try a smaller rate")
        return slope if proximal == 0 else slope + proximal * (theta.detach() - start)

    for batch in _take(batches, phases[0], count_steps=steps is not None):
        end.grad = gradient(end, batch)
        descent.step()
    end.grad = None

    if control_start == "chord":
        with torch.no_grad():
            for i in range(1, curve.degree):
                torch.lerp(phi[0], phi[-1], i / curve.degree, out=phi[i])

    for batch in _take(batches, phases[1], count_steps=steps is not None):
        s = torch.rand((), generator=generator, device=None if generator is None else generator.device).item()
        weights = phi.new_tensor(curve.weights(s))
        slope = gradient(weights @ phi, batch)
        controls.grad = torch.outer(weights[1:-1], slope)
        if not freeze_end:
            end.grad = weights[-1] * slope
        descent.step()
    if not is_finite(phi):
        raise DivergenceError("the control points left the finite numbers although every loss was finite")
    return Fit(phi, tuple(losses))


def _take(batches: Iterable[Any], amount: int, *, count_steps: bool) -> Iterator[Any]:
    """`amount` batches, cycling, or all batches `amount` times."""
    taken = 0
    while taken < amount:
        empty = True
        iterator = iter(batches)
        if iterator is batches:
            raise ArgumentError("batches: expected what can be iterated again, such as a list; got an iterator")
        for batch in iterator:
            empty = False
            yield batch
            taken += count_steps
            if count_steps and taken == amount:
                return
        if empty:
            raise ArgumentError("batches: expected at least one batch, got none")
        taken += not count_steps
