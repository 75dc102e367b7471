"""Learning a curve, or another embedding: two phases of stochastic gradient steps on its points."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg.curves.embedding import Embedding
from manifoldagg.curves.fit_points import FreePoints, begin, free_points, straighten
from manifoldagg.curves.fit_schedule import Phases, Plateau, Schedule
from manifoldagg.curves.sampling import check_sampling, places
from manifoldagg.curves.sharpness import Sharpness, check_sharpness, sharp_gradient
from manifoldagg.errors import (
    ArgumentError,
    DivergenceError,
    ManifoldAggError,
    check_choice,
    check_count,
    check_number,
    check_shape,
    is_finite,
)
from manifoldagg.manifolds import Loss
from manifoldagg.manifolds.optimizers import lower, optimizer_on

CONTROL_STARTS = ("chord", "base")
STATE = frozenset({"phi", "shift", "optimizer", "losses", "schedule", "plateaus", "generator"})


@dataclass(frozen=True, eq=False)
class Fit:
    """A learned embedding.

    Attributes:
        phi: its points (size, *space.shape).
        losses: of every step, both phases in order of time, without the proximal and volume terms.
        state: what `resume=` goes on from: a tree of tensors and numbers, which `torch.save` can keep.
        converged: whether every phase that had steps to take ended on a plateau.
    """

    phi: Float[Tensor, "size ..."]
    losses: tuple[float, ...]
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    converged: bool = False


def fit(
    curve: Embedding,
    loss: Loss,
    batches: Iterable[Any],
    *,
    start: Float[Tensor, "..."] | None = None,
    end: Float[Tensor, "..."] | None = None,
    phi: Float[Tensor, "size ..."] | None = None,
    epochs: Phases = (2, 2),
    steps: Phases | None = None,
    alternate: bool = False,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    rate: float = 1e-3,
    control_rate: float | None = None,
    freeze_start: bool = True,
    freeze_end: bool = True,
    free: Sequence[int] | None = None,
    control_start: str = "chord",
    control_projection: float = 0.0,
    sampling: str = "uniform",
    samples: int = 1,
    proximal: float = 0.0,
    volume: float = 0.0,
    sharpness: Sharpness | None = None,
    patience: int | None = None,
    plateau: float = 1e-3,
    callback: Callable[[int, float, Tensor], object] | None = None,
    resume: Mapping[str, Any] | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    r"""Learn a curve of low loss from $\Theta^t$ = `start`:

    $$\min_\varphi\; \mathbb{E}_{S \sim P,\, X}\Big[\ell(X; \iota_\varphi(S))
        + \tfrac{\mu}{2}\,d(\iota_\varphi(S), \Theta^t)^2\Big] - \lambda \log \operatorname{vol} \varphi,
        \qquad \varphi_0 = \Theta^t .$$

    First $P = \delta_1$: ordinary training of the last point. Then $P$ is uniform, on $[0, 1]$ for a curve: the
    gradient at $\iota_\varphi(S)$, $S$ drawn for each batch, is pulled back to the free points, for a Bézier curve on
    a flat space $b_i(S)$ times it. So every step costs `samples` forward and backward passes of the model, whatever
    the size of $\varphi$.

    Two trained models are connected by `start=a, end=b, steps=(0, n)`. A simplex with a new vertex is
    `phi=vertices, free=[-1]`, with `volume`. A tunnel learns the control points of its curve at places within it, each
    held fixed where it was drawn.

    Args:
        curve: the embedding to fit: a curve, a tunnel, a simplex.
        loss: `loss(theta, batch)` to a scalar, as from
            [`ParameterSpace.loss`][manifoldagg.ParameterSpace.loss].
        batches: what can be iterated again and again, such as a list or a `DataLoader`.
        start: $\Theta^t$ (*space.shape); it is not written. The first point of `phi` where not given.
        end: where the last point begins; `start` where not given.
        phi: where all points begin (size, *space.shape), in place of `end` and `control_start`.
        epochs: passes over `batches` in the first and in the second phase.
        steps: optimiser steps ($K_1$, $K - K_1$) in place of `epochs`; batches are cycled.
        alternate: let the phases take turns, a pass over `batches` each; the inner control points keep their
            displacement from the chord when the end moves, and the optimiser forgets theirs before each turn. Flat
            spaces only.
        optimizer: any optimiser of `torch.optim` that steps without a closure, called with parameter groups
            and `lr`; bind further options with `functools.partial`. On a curved space SGD or Adam, which become
            [Riemannian][manifoldagg.manifolds.optimizers].
        rate: learning rate of the end points.
        control_rate: learning rate of the inner points; `rate` where not given.
        freeze_start: whether the first point rests in the second phase.
        freeze_end: whether the last point rests in the second phase.
        free: indices of the points that learn in the second phase, in place of `freeze_start` and `freeze_end`.
        control_start: where the inner control points are when the second phase begins: evenly on the
            `"chord"`, or all at the `"base"` $\Theta^t$.
        control_projection: $\gamma \in [0, 1]$: how much of a control point's displacement from the chord is
            removed along the chord. What is returned is without it. Flat spaces only.
        sampling: how $S$ is drawn: `"uniform"`; on a curve also `"stratified"`, one in each of `samples` equal parts
            of $[0, 1]$, or `"quadrature"`, the Gauss–Legendre nodes, exact for losses that are polynomials of degree
            2·samples - 1 along the curve.
        samples: places for each batch.
        proximal: $\mu \ge 0$.
        volume: $\lambda \ge 0$, in the second phase, for an embedding that has a `log_volume`.
        sharpness: [`SAM`][manifoldagg.curves.sharpness.SAM] or [`ASAM`][manifoldagg.curves.sharpness.ASAM]: gradients
            of the loss are taken uphill, for two passes each.
        patience: end a phase when the running mean of its losses has not improved for so many steps; a phase that has
            ended so stays ended where a fit is resumed.
        plateau: the relative improvement that counts.
        callback: called as `callback(step, loss, phi)` after every step, counted from 0, with a copy of the points;
            the fit stops where it returns `True`.
        resume: the `state` of a fit with the same arguments, to go on from; `epochs` or `steps` are totals that may
            be larger. The generator is set back to where it was. Batches that were taken are skipped; those of a
            `DataLoader` that shuffles are the same ones if it draws from `generator`.
        generator: draws $S$; torch's default generator where not given, which `resume` leaves alone.

    Returns:
        The learned points, the losses, the state, and whether the losses have stopped to fall.

    Raises:
        ArgumentError: naming the argument that does not fit.
        DivergenceError: if a loss is not finite, naming the step, or a control point is not.

    Source: Manifold (6), Algorithm 2; Report, Algorithm 2, for `alternate` and `control_projection`; Garipov et al.
        2018 for two given ends; Benton et al. 2021 for `volume`.

    Example:
        >>> import torch
        >>> from manifoldagg.curves.bezier import Bezier
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
    if not isinstance(curve, Embedding):
        raise ArgumentError(f"curve: expected an Embedding, got {curve!r}")
    space = curve.space
    check_choice("control_start", control_start, CONTROL_STARTS)
    check_sampling(curve, sampling, samples)
    check_sharpness(space, sharpness)
    rate = check_number("rate", rate, above=0)
    control_rate = rate if control_rate is None else check_number("control_rate", control_rate, above=0)
    proximal = check_number("proximal", proximal, at_least=0)
    volume = check_number("volume", volume, at_least=0)
    if volume and not hasattr(curve, "log_volume"):
        raise ArgumentError(f"volume: {curve} has no log_volume")
    patience = None if patience is None else check_count("patience", patience)
    plateau = check_number("plateau", plateau, at_least=0)
    gamma = check_number("control_projection", control_projection, at_least=0, at_most=1)
    name, amounts = ("epochs", epochs) if steps is None else ("steps", steps)
    if not (isinstance(amounts, Sequence) and len(amounts) == 2):
        raise ArgumentError(f"{name}: expected a pair, first and second phase; got {amounts!r}")
    amounts = (check_count(f"{name}[0]", amounts[0], at_least=0), check_count(f"{name}[1]", amounts[1], at_least=0))
    base, points = begin(curve, start, end, phi)
    moving = free_points(curve.size, free, freeze_start=freeze_start, freeze_end=freeze_end)
    if amounts[1] and not moving:
        raise ArgumentError(f"{name}[1]: {curve} with all its points frozen has nothing to learn in phase two")
    relative = bool(gamma) or alternate
    if relative:
        _check_relative("control_projection" if gamma else "alternate", curve, free, control_start)
    if resume is not None:
        if not (isinstance(resume, Mapping) and resume.keys() == STATE):
            raise ArgumentError("resume: expected the state of a Fit")
        points.copy_(check_shape("resume['phi']", resume["phi"], *points.shape))
    elif relative and phi is None:
        straighten(space, points, control_start)

    learner = FreePoints(space, points, moving, gamma if relative else None)
    try:
        descent = optimizer_on(space, optimizer)(learner.groups(rate, control_rate), lr=rate)
    except ManifoldAggError:
        raise
    except (TypeError, ValueError) as problem:
        raise ArgumentError(f"optimizer: expected one that takes parameter groups and lr; {problem}") from None
    schedule = Schedule(
        batches, amounts, count_steps=steps is not None, alternate=alternate, generator=generator,
        resume=None if resume is None else resume["schedule"],
    )  # fmt: skip
    losses: list[float] = []
    watches = [None if patience is None else Plateau(patience, plateau) for _ in amounts]
    if resume is not None:
        losses.extend(resume["losses"])
        learner.load(resume["shift"])
        try:
            if [group.keys() for group in descent.param_groups] != [
                g.keys() for g in resume["optimizer"]["param_groups"]
            ]:
                raise ValueError("its optimizer has other options")
            descent.load_state_dict(copy.deepcopy(resume["optimizer"]))
        except ValueError as problem:
            raise ArgumentError(f"resume: expected the state of a fit with the same arguments; {problem}") from None
        for watch, kept in zip(watches, resume["plateaus"], strict=True):
            if watch is not None and kept is not None:
                watch.load(kept)
        if generator is not None and resume["generator"] is not None:
            generator.set_state(resume["generator"])

    def gradient(theta: Tensor, batch: Any) -> tuple[float, Tensor]:
        """The loss, and the derivative of the loss and the proximal term."""
        loss_there, slope = sharp_gradient(space, loss, theta, batch, sharpness)
        if not torch.isfinite(loss_there):
            raise DivergenceError(f"the loss is {loss_there.item()} at step {len(losses)}; try a smaller rate")
        if not (space.flat or is_finite(slope)):
            raise DivergenceError(f"the gradient is not finite at step {len(losses)} although the loss is")
        if proximal:
            home = space.log(theta, base)
            slope = slope - proximal * (home if space.flat else lower(space, theta, home))
        return loss_there.item(), slope

    def objective(batch: Any) -> tuple[float, Tensor]:
        """The mean loss over places, and the derivative of the second phase by all points."""
        mean, total = 0.0, torch.zeros(())
        for k, (weight, x) in enumerate(places(curve, points, sampling, samples, generator)):
            value, slope = gradient(curve(points, x), batch)
            pulled = curve.pull_phi(points, x, slope if weight == 1 else weight * slope)
            mean, total = mean + weight * value, total + pulled if k else pulled
        return mean, total - volume * _log_volume_slope(curve, points) if volume else total

    for phase, batch in schedule:
        if phase == 0:
            value, learner.end.grad = gradient(points[-1], batch)
        else:
            if schedule.steps[1] == 1 and phi is None and not relative:
                straighten(space, points, control_start)
            if alternate and schedule.position == 1:
                for parameter in learner.inner.values():
                    descent.state.pop(parameter, None)
            learner.refresh()
            value, total = objective(batch)
            learner.set_gradients(total)
        losses.append(value)
        descent.step()
        descent.zero_grad()
        watch = watches[phase]
        schedule.done[phase] = watch is not None and watch.reached(value)
        if callback is not None:
            learner.refresh()
            if callback(len(losses) - 1, value, points.clone()) is True:
                break
    if schedule.steps[1] == 0 and phi is None and not relative:
        straighten(space, points, control_start)
    learner.refresh()
    if not is_finite(points):
        raise DivergenceError("the control points left the finite numbers although every loss was finite")
    state = {
        "phi": points.clone(),
        "shift": learner.shift(),
        "optimizer": descent.state_dict(),
        "losses": tuple(losses),
        "schedule": schedule.state(),
        "plateaus": [None if watch is None else watch.state() for watch in watches],
        "generator": None if generator is None else generator.get_state(),
    }
    converged = any(amounts) and all(done for done, amount in zip(schedule.done, amounts, strict=True) if amount)
    return Fit(points, tuple(losses), state, converged)


def _check_relative(name: str, curve: Embedding, free: Sequence[int] | None, control_start: str) -> None:
    """Displacements from the chord are those of all inner points of a flat curve, and begin at 0."""
    if not curve.space.flat or curve.domain or curve.size < 3:
        raise ArgumentError(f"{name}: needs a curve with inner control points on a flat space, got {curve}")
    if free is not None:
        raise ArgumentError(f"free: does not go with {name}, which moves all inner points")
    if control_start == "base":
        raise ArgumentError(f"control_start: {name} begins at the chord, got base")


def _log_volume_slope(embedding: Any, phi: Tensor) -> Tensor:
    with torch.enable_grad():
        leaf = phi.detach().requires_grad_()
        value = embedding.log_volume(leaf)
        if not bool(torch.isfinite(value)):
            raise ArgumentError(f"volume: the log of it is {value.item()}; begin with points in general position")
        (slope,) = torch.autograd.grad(value, leaf)
    return slope
