"""Fitting of embeddings, such as curves of models, by gradient steps on their control points.

A fit has two phases. The first phase trains only the last control point, as in the ordinary training of a model. The
second phase trains all free control points, which are usually those between the first and the last one. It reduces the
loss of the models between the ends.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_number, check_shape, is_finite, short_repr
from manifoldagg.curves.control import Control, FreePoints, initial_points
from manifoldagg.curves.embedding import Coordinates, Embedding
from manifoldagg.curves.phases import Phases, Schedule
from manifoldagg.curves.proximal import ProximalTerm, add_proximal_gradient, check_proximal
from manifoldagg.curves.sampling import Sampling
from manifoldagg.curves.sharpness import Sharpness, sharpness_aware_gradient
from manifoldagg.errors import ArgumentError, DivergenceError, ManifoldAggError
from manifoldagg.manifolds import Loss
from manifoldagg.manifolds.optimizers import Optimizer, optimizer_on
from manifoldagg.tensor_file import load as load_file
from manifoldagg.tensor_file import save as save_file

__all__ = ["Fit", "Training", "fit"]

FILE_KIND = "fit"
STATE_KEYS = frozenset({"phi", "shift", "optimizer", "losses", "schedule", "generator"})


@dataclass(frozen=True)
class Training:
    r"""Settings for the gradient steps of a fit and for their regularisers.

    Args:
        optimizer: an optimiser class of `torch.optim` whose step needs no closure. It is called with parameter groups
            and `lr`. Other options can be bound with `partial(torch.optim.SGD, momentum=0.9)`. On a curved space, it
            must be SGD or Adam, which is replaced by its [Riemannian][manifoldagg.manifolds.RiemannianSGD] equivalent.
        rate: the learning rate.
        proximal: $\mu \ge 0$, the weight of the proximal term $\tfrac{\mu}{2}\, d(\theta, \Theta^t)^2$. On a flat
            space, also another [`ProximalTerm`][manifoldagg.curves.ProximalTerm], such as
            [`LorentzProximal`][manifoldagg.federated.clients.LorentzProximal].
        sharpness: [`SAM`][manifoldagg.curves.sharpness.SAM] or [`ASAM`][manifoldagg.curves.sharpness.ASAM], which
            evaluates gradients at an ascent point. Each gradient then needs two forward and backward passes.

    Raises:
        ArgumentError: if an option is invalid.

    Example:
        >>> Training(torch.optim.SGD, rate=0.1).proximal
        0.0
    """

    optimizer: Optimizer = torch.optim.Adam
    rate: float = 1e-3
    proximal: float | ProximalTerm = 0.0
    sharpness: Sharpness | None = None

    def __post_init__(self) -> None:
        if not callable(self.optimizer):
            raise ArgumentError(
                f"optimizer: expected a class such as torch.optim.Adam, got {short_repr(self.optimizer)}"
            )
        check_number("rate", self.rate, above=0)
        check_proximal(self.proximal)
        # A class also has the method of the protocol, so it would pass the second test.
        given = self.sharpness
        if given is not None and (isinstance(given, type) or not isinstance(given, Sharpness)):
            raise ArgumentError(f"sharpness: expected SAM, ASAM or None, got {short_repr(given)}")


@dataclass(frozen=True, eq=False)
class Fit:
    """The result of `fit`: the learned control points, the losses, and the state for resuming the fit.

    Attributes:
        phi: the learned control points (size, *space.shape).
        losses: the loss of each step, in chronological order and without regularisation terms.
        state: a nested dict of tensors and numbers. Pass it to `fit` as `resume` to continue the fit.
        converged: whether the losses reached a plateau in both phases of the fit. A phase without steps is ignored.
    """

    phi: Float[Tensor, "size ..."]
    losses: tuple[float, ...]
    state: Mapping[str, Any] = field(default_factory=dict, repr=False)
    converged: bool = False

    def save(self, path: str | Path) -> None:
        """Write `state` to a file, so that `fit(resume=path)` can continue the fit.

        An existing file is replaced atomically.

        Raises:
            ArgumentError: if the folder of `path` does not exist.
            CheckpointError: if the file cannot be written. An existing file is then unchanged.
        """
        save_file(path, FILE_KIND, self.state)

    def __repr__(self) -> str:
        return format_result(
            self,
            phi=self.phi,
            steps=len(self.losses),
            loss=self.losses[-1] if self.losses else None,
            converged=self.converged,
        )


def fit(
    curve: Embedding,
    loss: Loss,
    batches: Iterable[Any],
    *,
    start: Float[Tensor, "..."] | None = None,
    end: Float[Tensor, "..."] | None = None,
    phi: Float[Tensor, "size ..."] | None = None,
    phases: Phases = Phases(),
    training: Training = Training(),
    control: Control = Control(),
    sampling: Sampling = Sampling(),
    resume: Mapping[str, Any] | str | Path | None = None,
    generator: torch.Generator | None = None,
) -> Fit:
    r"""Learn an embedding of low loss, such as a curve, that starts at $\Theta^t$ = `start`.

    With the loss $\ell$ of a batch $X$ and random coordinates $S$, the fit minimises

    $$\min_\varphi\; \mathbb{E}_{S \sim P,\, X}\Big[\ell(X; \iota_\varphi(S))
        + \tfrac{\mu}{2}\,d(\iota_\varphi(S), \Theta^t)^2\Big] - \lambda \log \operatorname{vol} \varphi,
        \qquad \varphi_0 = \Theta^t .$$

    The second term is the proximal term of `training`, and the third term is the volume regulariser of `control`. The
    fit has two phases:

    1. The first phase trains only the last point, as in ordinary training ($P = \delta_1$).
    2. The second phase trains all free points. It draws $S$ for each batch, by default uniformly, on $[0, 1]$ for a
       curve. The gradient at $\iota_\varphi(S)$ is pulled back to the free points. For a Bézier curve on a flat space,
       this multiplies the gradient by the Bernstein weights $b_i(S)$.

    A step costs `sampling.samples` forward and backward passes of the model, independently of the size of $\varphi$.

    Common uses:

    - To connect two trained models, pass `start=a, end=b, phases=Phases(steps=(0, n))`.
    - To learn a new vertex of a simplex, pass `phi=vertices, control=Control(free=[-1], volume=1e-3)`.
    - For a tunnel, the fit learns the control points of its curve. The coordinates within the tunnel are drawn for each
      batch and count as constants.

    Args:
        curve: the embedding to fit: a curve, a tunnel or a simplex.
        loss: `loss(theta, batch)` to a scalar, as from
            [`ParameterSpace.loss`][manifoldagg.manifolds.ParameterSpace.loss].
        batches: a re-iterable object, such as a list or a `DataLoader`.
        start: $\Theta^t$ (*space.shape), such as `space.point(model)`. It is not modified. The default is the first
            point of `phi`.
        end: the initial last point, such as `space.point(model)`. The default is `start`.
        phi: the initial points (size, *space.shape), which replace `end` and `control.start`.
        phases: the lengths, the order and the early stopping of the two phases.
        training: the optimiser, its learning rate, and the regularisers.
        control: the settings of the inner points.
        sampling: the sampling of $S$.
        resume: the `state` of an earlier fit with the same arguments, or the path of a file that `Fit.save` has
            written. The new fit continues from this state. The limits of `phases` are totals and may be larger than
            before. The fit restores the state of the generator and skips the batches that were already used. A
            shuffling `DataLoader` repeats its order if it uses `generator`.
        generator: the generator of $S$. The default is torch's default generator, whose state is not restored.

    Returns:
        The learned points, the losses, the state, and whether the losses have reached a plateau.

    Raises:
        ArgumentError: if an argument is invalid.
        DivergenceError: if a loss or a control point is not finite. The message contains the step of the loss.

    Source: Manifold (6), Algorithm 2; Report, Algorithm 2, for phases that alternate; Garipov et al. 2018 for two
        given ends.

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
        ...     phases=Phases(steps=(100, 10)),
        ...     training=Training(rate=0.1),
        ... )
        >>> bool((result.phi[-1] - target).norm() < 0.1)
        True
    """
    for name, given, kind in (
        ("curve", curve, Embedding),
        ("phases", phases, Phases),
        ("training", training, Training),
        ("control", control, Control),
        ("sampling", sampling, Sampling),
    ):
        if not isinstance(given, kind):
            raise ArgumentError(f"{name}: expected {kind.__name__}, got {short_repr(given)}")
    curve._require_space()
    sampling.check(curve)
    if isinstance(training.proximal, ProximalTerm) and not curve.space.flat:
        raise ArgumentError(f"proximal: expected a number on the curved space {curve.space}, got {training.proximal}")
    # With `relative`, the parameters of the inner points are displacements from the chord.
    relative = control.check(curve, alternate=phases.alternate)
    free = control.indices(curve.size)
    base, points = initial_points(curve, start, end, phi)
    if phases.limits[1] and not free:
        name = "epochs" if phases.steps is None else "steps"
        raise ArgumentError(f"{name}[1]: expected 0, got {phases.limits[1]}; {curve} has no trainable points")
    if isinstance(resume, str | Path):
        resume = load_file(resume, FILE_KIND)
    if resume is not None:
        if not (isinstance(resume, Mapping) and resume.keys() == STATE_KEYS):
            raise ArgumentError(f"resume: expected the state of a Fit or the path of a file, got {short_repr(resume)}")
        points.copy_(check_shape("resume['phi']", resume["phi"], *points.shape))
    elif relative and phi is None:
        control.initialize(curve.space, points)

    # Most parameters of the learner are views of `points`, so a step of the optimiser changes `points` in place.
    learner = FreePoints(points, free, control.projection if relative else None)
    groups = learner.groups(training.rate, control.rate or training.rate)
    try:
        optimizer = optimizer_on(curve.space, training.optimizer)(groups, lr=training.rate)
    except ManifoldAggError:
        raise
    # The constructor of an optimiser raises one of these errors for an invalid option.
    except (TypeError, ValueError) as problem:
        raise ArgumentError(
            f"optimizer: expected a class that accepts parameter groups and lr, got an error: {problem}"
        ) from None
    schedule = Schedule(batches, phases, generator, None if resume is None else resume["schedule"])
    losses: list[float] = []
    if resume is not None:
        losses.extend(resume["losses"])
        _restore(resume, learner, optimizer, generator)
    objective = _Objective(curve, loss, base, training, control.volume)
    now = schedule.progress
    for phase, batch in schedule:
        # The first phase is ordinary training of the last point, so no derivative is pulled back.
        if phase == 0:
            value, learner.end.grad = objective.at(points[-1], batch, len(losses))
        else:
            # The chord is known only after the first phase, so the inner points are set at the first step of the
            # second phase.
            if now.steps[1] == 1 and phi is None:
                control.initialize(curve.space, points)
            # The end point has moved since the previous pass, so old momenta of the displacements have lost their
            # meaning.
            if phases.alternate and now.position == 1:
                for parameter in learner.inner.values():
                    optimizer.state.pop(parameter, None)
            learner.refresh()
            value, slope = objective.at_coordinates(
                points, batch, len(losses), sampling.coordinates(curve, points, generator)
            )
            learner.set_gradients(slope)
        losses.append(value)
        optimizer.step()
        # This sets the gradients to `None`, so the optimiser skips points that the next step does not train.
        optimizer.zero_grad()
        schedule.record(value)
        if phase == 0 and phases.watch is not None:
            phases.watch(points[-1])
        if phases.callback is not None:
            learner.refresh()
            if phases.callback(len(losses) - 1, value, points.clone()) is True:
                break
    # Without a second phase, the result is the chord.
    if now.steps[1] == 0 and phi is None:
        control.initialize(curve.space, points)
    learner.refresh()
    if not is_finite(points):
        raise DivergenceError("phi: expected finite control points, got NaN or infinity although all losses are finite")
    # The result and the state must not share memory, because a caller may modify the result.
    state = {
        "phi": points.clone(),
        "shift": None if learner.shift is None else learner.shift.detach().clone(),
        "optimizer": optimizer.state_dict(),
        "losses": tuple(losses),
        "schedule": schedule.state(),
        "generator": None if generator is None else generator.get_state(),
    }
    return Fit(points, tuple(losses), state, schedule.converged)


@dataclass(frozen=True, eq=False)
class _Objective:
    """The loss and the derivative of each step of a fit. Only the derivative is regularised."""

    curve: Embedding
    loss: Loss
    base: Tensor
    training: Training
    volume: float

    def at(self, theta: Tensor, batch: Any, step: int) -> tuple[float, Tensor]:
        """Compute the loss at `theta`, and the derivative of the objective for the training step.

        The objective is the sum of the loss and the proximal term. Sharpness-aware training evaluates the derivative of
        the loss at a nearby point with a larger loss.

        Raises:
            DivergenceError: if the loss is not finite. On a curved space, also if the derivative is not finite.
        """
        space = self.curve.space
        value, slope = sharpness_aware_gradient(space, self.loss, theta, batch, self.training.sharpness)
        if not torch.isfinite(value):
            raise DivergenceError(f"loss: expected a finite value at step {step}, got {value.item()}; reduce the rate")
        # On a flat space, NaN and infinity propagate to the points, which are checked at the end of the fit. On a
        # curved space, exp or project would raise an error about the points, although the gradient is the cause.
        if not (space.flat or is_finite(slope)):
            raise DivergenceError(
                f"loss: expected a finite gradient at step {step}, got NaN or infinity although the loss is finite"
            )
        return value.item(), add_proximal_gradient(space, slope, theta, self.base, self.training.proximal)

    def at_coordinates(
        self, phi: Tensor, batch: Any, step: int, coordinates: Iterable[tuple[float, Coordinates]]
    ) -> tuple[float, Tensor]:
        """Compute the weighted mean loss at several coordinates, and the derivative of the regularised objective.

        The objective is the sum of this mean loss, the proximal term and the volume regulariser of the fit. Its
        derivative is with respect to the control points `phi`.
        """
        mean = 0.0
        total = torch.zeros(())
        # One coordinate after another is evaluated, so only one model and its activations are in memory.
        for k, (weight, x) in enumerate(coordinates):
            value, slope = self.at(self.curve(phi, x), batch, step)
            # A weight of 1 needs no copy of the gradient.
            pulled = self.curve.pull_phi(phi, x, slope if weight == 1 else weight * slope)
            mean = mean + weight * value
            total = total + pulled if k else pulled
        return mean, total - self.volume * _log_volume_gradient(self.curve, phi) if self.volume else total


def _log_volume_gradient(embedding: Any, phi: Tensor) -> Tensor:
    """Compute the gradient of the log-volume of an embedding at the control points `phi`.

    Raises:
        ArgumentError: if the log-volume is not finite.
    """
    with torch.enable_grad():
        leaf = phi.detach().requires_grad_()
        value = embedding.log_volume(leaf)
        if not bool(torch.isfinite(value)):
            raise ArgumentError(
                f"volume: expected a finite log-volume, got {value.item()}; start from points in general position"
            )
        (slope,) = torch.autograd.grad(value, leaf)
    return slope


def _restore(
    state: Mapping[str, Any], learner: FreePoints, optimizer: torch.optim.Optimizer, generator: torch.Generator | None
) -> None:
    """Load the state of an earlier fit into the learner, the optimiser and the generator.

    Raises:
        ArgumentError: if the state belongs to a fit with other arguments.
    """
    # `load_state_dict` keeps references to the tensors, which the fit would modify in the caller's state.
    saved = copy.deepcopy(state["optimizer"])
    try:
        if (state["shift"] is None) != (learner.shift is None):
            raise ValueError("another parametrisation of the inner points")
        # `load_state_dict` accepts the options of another optimiser class, and the next step then fails.
        if [group.keys() for group in optimizer.param_groups] != [group.keys() for group in saved["param_groups"]]:
            raise ValueError("an optimizer with other options")
        optimizer.load_state_dict(saved)
    except ValueError as problem:
        raise ArgumentError(f"resume: expected the state of a fit with the same arguments, got {problem}") from None
    # The caller has already restored the control points. Only the displacements from the chord are still missing.
    if learner.shift is not None:
        with torch.no_grad():
            learner.shift.copy_(state["shift"])
    if generator is not None and state["generator"] is not None:
        generator.set_state(state["generator"])
