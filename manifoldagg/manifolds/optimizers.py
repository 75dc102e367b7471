"""Riemannian optimisers: SGD and Adam with geodesic steps and transported momentum."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import check_decay, check_number, check_shape, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds import formulas
from manifoldagg.manifolds.manifold import Manifold, Point, Tangent, check_is_manifold
from manifoldagg.manifolds.power import factor_parts

__all__ = ["RiemannianAdam", "RiemannianSGD", "lower", "optimizer_on", "transport_momentum"]

MAX_RUNG_LENGTH = 0.1
"""The maximum length of a tangent that a pole ladder transports. Longer tangents are scaled down first."""

Optimizer = Callable[..., torch.optim.Optimizer]


class _RiemannianOptimizer(torch.optim.Optimizer):
    """Base class for Riemannian optimisers, whose subclasses compute the direction of a step from the gradient.

    A step moves a parameter against this direction by `exp` or `retract`. It then transports the momentum to the new
    point.
    """

    def __init__(self, params: Iterable[Any], space: Manifold, retract: bool, defaults: dict[str, Any]) -> None:
        check_is_manifold(space)
        defaults["lr"] = check_number("lr", defaults["lr"], at_least=0)
        self.space = space
        self.retract = retract
        super().__init__(params, defaults)
        for group in self.param_groups:
            for x in group["params"]:
                check_shape("params", x, *space.axes, batch=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient. If `closure` is given, it is called first.

        Returns:
            The value of `closure`, or `None`.
        """
        value = None
        if closure is not None:
            with torch.enable_grad():
                value = closure()
        for group in self.param_groups:
            for x in group["params"]:
                if x.grad is not None:
                    self._update_parameter(x, self.space._gradient(x, x.grad), group)
        return value

    def _update_parameter(self, x: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Execute one step of a parameter, and transport its momentum to the new point."""
        direction = self._direction(x, gradient, group)
        rate = group["lr"]
        momentum = self.state[x].get("momentum")
        if self.space.flat:
            # On a flat space, this is the arithmetic of torch.optim, so the results are bitwise equal.
            x.add_(direction, alpha=-rate)
            return
        step = self.space._retract if self.retract else self.space._exp
        y = step(x, -rate * direction)
        # Rounding errors of thousands of steps would otherwise move the point off the manifold.
        if "project" in self.space.capabilities:
            y = self.space._project(y)
        if momentum is not None:
            momentum.copy_(transport_momentum(self.space, x, y, momentum))
        # The parameter must remain the same tensor, because the model and the optimiser refer to it.
        x.copy_(y)

    def _direction(self, x: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Return the direction of a step, and update the state of the optimiser.

        The parameter moves against this direction.
        """
        raise NotImplementedError


class RiemannianSGD(_RiemannianOptimizer):
    r"""Stochastic gradient descent with momentum on a Riemannian manifold.

    $$m \leftarrow \beta\, \tau(m) + \operatorname{grad} \ell(x), \qquad x \leftarrow \exp_x(-\eta m).$$

    Here, $x$ is the parameter, $\ell$ is the loss, $m$ is the momentum with the decay factor $\beta$, and $\eta$ is the
    learning rate. The function `transport_momentum`, denoted by $\tau$, transports the momentum from the previous point
    to $x$. Each new point is projected, so that rounding errors do not accumulate. On a flat space, the result is
    bitwise equal to `torch.optim.SGD`.

    Args:
        params: parameters or parameter groups. The trailing axes have the shape of the space, and the leading axes are
            batch axes.
        lr: the learning rate $\eta$.
        space: a space with exp and project_tangent.
        momentum: $\beta$.
        nesterov: whether to step along $\operatorname{grad} \ell + \beta m$.
        retract: whether to step by `retract` instead of `exp`.

    Raises:
        ArgumentError: if an argument is invalid.

    Source: Bonnabel 2013.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> x = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
        >>> descent = RiemannianSGD([x], lr=0.5, space=Sphere(2))
        >>> for _ in range(30):
        ...     descent.zero_grad()
        ...     (-x[1]).backward()
        ...     descent.step()
        >>> x.detach().round(decimals=3).abs()
        tensor([0., 1.])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        space: Manifold,
        momentum: float = 0.0,
        nesterov: bool = False,
        retract: bool = False,
    ) -> None:
        momentum = check_number("momentum", momentum, at_least=0)
        if nesterov and momentum == 0:
            raise ArgumentError("nesterov: expected a momentum > 0 with it, got 0")
        super().__init__(params, space, retract, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    def _direction(self, x: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        beta = group["momentum"]
        state = self.state[x]
        if beta == 0:
            return gradient
        if "momentum" not in state:
            # Like torch.optim.SGD, the first momentum is the gradient itself.
            state["momentum"] = gradient.clone()
        else:
            state["momentum"].mul_(beta).add_(gradient)
        momentum: Tensor = state["momentum"]
        return gradient.add(momentum, alpha=beta) if group["nesterov"] else momentum


class RiemannianAdam(_RiemannianOptimizer):
    r"""Adam on a Riemannian manifold, with one second moment $v$ for each point.

    $$v \leftarrow \beta_2 v + (1 - \beta_2) \|g\|_x^2, \qquad m \leftarrow \beta_1 \tau(m) + (1 - \beta_1)\, g, \qquad
      x \leftarrow \exp_x\!\left(-\eta\, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}\right).$$

    Here, $x$ is the parameter and $g = \operatorname{grad} \ell(x)$ is the Riemannian gradient of the loss $\ell$. The
    function `transport_momentum`, denoted by $\tau$, transports the momentum $m$ from the previous point to $x$. The
    number of second moments depends on the space:

    - A product has one $v$ for each factor, and a power has one $v$ for each copy.
    - A flat space or factor has one $v$ for each coordinate. The result then equals `torch.optim.Adam` up to rounding.

    Args:
        params: parameters or parameter groups. The trailing axes have the shape of the space, and the leading axes are
            batch axes.
        lr: the learning rate $\eta$.
        space: a space with exp, inner and project_tangent.
        betas: $(\beta_1, \beta_2)$.
        eps: $\epsilon$.
        amsgrad: whether to divide by the largest $v$ so far.
        retract: whether to step by `retract` instead of `exp`.

    Raises:
        ArgumentError: if an argument is invalid.

    Source: Bécigneul, Ganea 2019, RAMSGrad, with the bias corrections of Adam.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> x = torch.nn.Parameter(torch.tensor([1.0, 0.0]))
        >>> descent = RiemannianAdam([x], lr=0.1, space=Sphere(2))
        >>> (-x[1]).backward()
        >>> descent.step()
        >>> x.detach()
        tensor([0.9950, 0.0998])
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        space: Manifold,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        amsgrad: bool = False,
        retract: bool = False,
    ) -> None:
        if not (isinstance(betas, tuple | list) and len(betas) == 2):
            raise ArgumentError(f"betas: expected a pair, got {short_repr(betas)}")
        for i, beta in enumerate(betas):
            check_decay(f"betas[{i}]", beta)
        defaults = {"lr": lr, "betas": tuple(betas), "eps": check_number("eps", eps, at_least=0), "amsgrad": amsgrad}
        super().__init__(params, space, retract, defaults)

    def _direction(self, x: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        first, second = group["betas"]
        state = self.state[x]
        # An empty state marks the first step of a parameter.
        if not state:
            state |= {"step": 0, "momentum": torch.zeros_like(x), "square": {}, "largest": {}}
        state["step"] += 1
        state["momentum"].lerp_(gradient, 1 - first)
        first_correction = 1 - first ** state["step"]
        # The root of the correction is applied to the root of the mean, in the same order as in torch.optim.Adam.
        second_correction = (1 - second ** state["step"]) ** 0.5
        direction: Tensor = (state["momentum"] / first_correction).contiguous()
        # The parts are views of `direction` and are scaled in place. The state has one second moment for each leaf.
        for leaf, (point, slope, part) in factor_parts(self.space, x, gradient, direction):
            flat = leaf.space.flat
            square = slope.square() if flat else leaf.space._inner(point, slope, slope)
            mean = state["square"].setdefault(leaf.name, torch.zeros_like(square))
            mean.mul_(second).add_(square, alpha=1 - second)
            if group["amsgrad"]:
                largest = state["largest"].setdefault(leaf.name, torch.zeros_like(square))
                # `out` updates the stored maximum in place, so `mean` is the maximum from here on.
                mean = torch.maximum(largest, mean, out=largest)
            scale = mean.sqrt() / second_correction + group["eps"]
            part.div_(scale if flat else scale[(..., *(None for _ in leaf.space.shape))])
        return direction


def transport_momentum(space: Manifold, x: Point, y: Point, u: Tangent) -> Tangent:
    """Transport a tangent `u` from `x` to `y` by the most accurate method that the manifold supports.

    The methods, in descending order of accuracy, are:

    1. Parallel transport.
    2. The pole ladder, an approximation of parallel transport by exp and log with an error of third order. It is
       accurate only for short tangents, so a long tangent is scaled down first, and the result is scaled back.
    3. The projection of `u` onto the tangent space at `y`, which can change the length of the tangent. This method is
       also used where the result of the pole ladder is not finite, for example because a log is undefined.

    Args:
        space: a space with transport, or with exp, log, inner and project_tangent, or with project_tangent.
        x: points (*batch, *shape).
        y: points (*batch, *shape).
        u: tangents at `x`, (*batch, *shape).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> x, y = torch.eye(2)
        >>> transport_momentum(Sphere(2), x, y, torch.tensor([0.0, 2.0]))
        tensor([-2.,  0.])
    """
    if "transport" in space.capabilities:
        return space._transport(x, y, u)
    projected = space._project_tangent(y, u)
    if not {"exp", "log", "inner"} <= space.capabilities:
        return projected
    length = formulas.norm(space, x, u)[(..., *(None for _ in space.shape))]
    # The ladder is accurate only for short tangents. Longer tangents are shortened, and the result is scaled back.
    scale = (length / MAX_RUNG_LENGTH).clamp(min=1)
    transported = scale * space._project_tangent(y, formulas.pole_ladder(space, x, y, u / scale))
    # Beyond the cut locus, the logs of the ladder are NaN.
    return torch.where(transported.isfinite(), transported, projected)


def lower(space: Manifold, x: Point, gradient: Tangent) -> Tensor:
    r"""Convert a Riemannian gradient to the derivative with respect to coordinates.

    This function is the inverse of `Manifold.gradient`. If $g$ is the gradient at the point $x$, the derivative $e$
    satisfies $e \cdot v = \langle g, v\rangle_x$ for every vector $v$.

    Args:
        space: a space with inner.
        x: points (*batch, *shape).
        gradient: $g$, tangents at `x`, (*batch, *shape).

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import PoincareBall
        >>> lower(PoincareBall(2), torch.zeros(2), torch.tensor([1.0, 0.0]))
        tensor([4., 0.])
    """
    # The inner product is linear in v, so its derivative at v = 0 is the coordinate form of the gradient.
    with torch.enable_grad():
        v = torch.zeros_like(gradient, requires_grad=True)
        (e,) = torch.autograd.grad(space._inner(x.detach(), gradient.detach(), v).sum(), v)
    return e


RIEMANNIAN_EQUIVALENTS: dict[Any, type[_RiemannianOptimizer]] = {
    torch.optim.SGD: RiemannianSGD,
    torch.optim.Adam: RiemannianAdam,
}


def optimizer_on(space: Manifold, optimizer: Optimizer) -> Optimizer:
    """Return the equivalent of a torch optimiser for parameters on the manifold `space`.

    On a curved space, `torch.optim.SGD` is replaced by `RiemannianSGD`, and `torch.optim.Adam` by `RiemannianAdam`. If
    `optimizer` is a `functools.partial`, its options are preserved. On a flat space, a torch optimiser is returned
    unchanged.

    Args:
        space: the space of the parameters.
        optimizer: a class of `torch.optim` or of this module, or a `functools.partial` of such a class.

    Raises:
        ArgumentError: if the optimiser or one of its options is not defined on a curved space.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> optimizer_on(Sphere(3), torch.optim.SGD).func.__name__
        'RiemannianSGD'
    """
    bound = isinstance(optimizer, functools.partial)
    kind = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    args, options = (optimizer.args, optimizer.keywords) if isinstance(optimizer, functools.partial) else ((), {})
    equivalent = (
        kind if isinstance(kind, type) and issubclass(kind, _RiemannianOptimizer) else RIEMANNIAN_EQUIVALENTS.get(kind)
    )
    if space.flat and equivalent is not kind:
        return optimizer
    name = getattr(kind, "__name__", short_repr(kind))
    if equivalent is None:
        expected = f"SGD or Adam of torch.optim, RiemannianSGD or RiemannianAdam on {short_repr(space)}"
        raise ArgumentError(f"optimizer: expected {expected}; got {name}")
    # Options such as weight decay have no counterpart on a curved space, and must not be ignored silently.
    unknown = sorted(options.keys() - inspect.signature(equivalent).parameters.keys())
    if unknown or (bound and args):
        given = ", ".join(unknown) or f"positional arguments {short_repr(args)}"
        raise ArgumentError(f"optimizer: expected options of {equivalent.__name__}, got {given} of {name}")
    return functools.partial(equivalent, **(options | {"space": space}))
