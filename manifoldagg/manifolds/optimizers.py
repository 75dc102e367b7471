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
"""The longest tangent that a ladder carries; longer ones are carried to scale."""

Optimizer = Callable[..., torch.optim.Optimizer]


class _RiemannianOptimizer(torch.optim.Optimizer):
    """Base class of optimisers that step along `_direction` by `exp` and then transport the momentum."""

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
        """Move every parameter that has a gradient; a given `closure` is evaluated first."""
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
        direction = self._direction(x, gradient, group)
        rate = group["lr"]
        momentum = self.state[x].get("momentum")
        if self.space.flat:
            x.add_(direction, alpha=-rate)
            return
        step = self.space._retract if self.retract else self.space._exp
        y = step(x, -rate * direction)
        if "project" in self.space.capabilities:
            y = self.space._project(y)
        if momentum is not None:
            momentum.copy_(transport_momentum(self.space, x, y, momentum))
        x.copy_(y)

    def _direction(self, x: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class RiemannianSGD(_RiemannianOptimizer):
    r"""$x \leftarrow \exp_x(-\eta m)$ with $m \leftarrow \beta\, \tau(m) + \operatorname{grad} \ell(x)$.

    The momentum is carried ($\tau$) along each step as `transport_momentum` says, and
    points are projected against the drift of rounding. On a flat space it is `torch.optim.SGD`, bit for bit.

    Args:
        params: parameters or groups of them; trailing axes have the shape of the space, leading ones are a batch.
        lr: $\eta$.
        space: with exp and project_tangent.
        momentum: $\beta$.
        nesterov: step along $\operatorname{grad} \ell + \beta m$.
        retract: step by `retract` in place of `exp`.

    Raises:
        ArgumentError: naming the argument that does not fit.

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
            state["momentum"] = gradient.clone()
        else:
            state["momentum"].mul_(beta).add_(gradient)
        momentum: Tensor = state["momentum"]
        return gradient.add(momentum, alpha=beta) if group["nesterov"] else momentum


class RiemannianAdam(_RiemannianOptimizer):
    r"""Adam with one second moment for each point: $v \leftarrow \beta_2 v + (1 - \beta_2) \|g\|_x^2$.

    $$m \leftarrow \beta_1 \tau(m) + (1 - \beta_1)\, g, \qquad
      x \leftarrow \exp_x\!\left(-\eta\, \frac{m / (1 - \beta_1^t)}{\sqrt{v / (1 - \beta_2^t)} + \epsilon}\right)$$

    with $g = \operatorname{grad} \ell(x)$. A product has one $v$ for each factor, a power one for each copy. A flat
    factor is a product of lines, each with its own: there, and on a flat space, it is `torch.optim.Adam` (up to
    rounding).

    Args:
        params: parameters or groups of them; trailing axes have the shape of the space, leading ones are a batch.
        lr: $\eta$.
        space: with exp, inner and project_tangent.
        betas: $(\beta_1, \beta_2)$.
        eps: $\epsilon$.
        amsgrad: divide by the largest $v$ so far.
        retract: step by `retract` in place of `exp`.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Source: Bécigneul, Ganea 2019, RAMSGrad; with the bias corrections of Adam.

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
        if not state:
            state |= {"step": 0, "momentum": torch.zeros_like(x), "square": {}, "largest": {}}
        state["step"] += 1
        state["momentum"].lerp_(gradient, 1 - first)
        early = 1 - first ** state["step"]
        late = (1 - second ** state["step"]) ** 0.5
        direction: Tensor = (state["momentum"] / early).contiguous()
        # The parts of `direction` are views of it, which are scaled in place.
        for leaf, (point, slope, part) in factor_parts(self.space, x, gradient, direction):
            flat = leaf.space.flat
            square = slope.square() if flat else leaf.space._inner(point, slope, slope)
            mean = state["square"].setdefault(leaf.name, torch.zeros_like(square))
            mean.mul_(second).add_(square, alpha=1 - second)
            if group["amsgrad"]:
                largest = state["largest"].setdefault(leaf.name, torch.zeros_like(square))
                mean = torch.maximum(largest, mean, out=largest)
            scale = mean.sqrt() / late + group["eps"]
            part.div_(scale if flat else scale[(..., *(None for _ in leaf.space.shape))])
        return direction


def transport_momentum(space: Manifold, x: Point, y: Point, u: Tangent) -> Tangent:
    r"""Transport a tangent `u` at `x` to `y` by the most exact method that the space declares.

    Parallel transport; or a pole ladder of one rung, linear in `u`, that is exact to third order, where there is none;
    or the projection on the tangents at `y`, which is no isometry, where there is no exp and log either or a log has
    no value.

    Args:
        space: with transport, or exp, log and project_tangent, or project_tangent.
        x: (*batch, *shape).
        y: (*batch, *shape).
        u: (*batch, *shape), tangents at `x`.

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
    longer = (length / MAX_RUNG_LENGTH).clamp(min=1)
    moved = longer * space._project_tangent(y, formulas.pole_ladder(space, x, y, u / longer))
    return torch.where(moved.isfinite(), moved, projected)


def lower(space: Manifold, x: Point, gradient: Tangent) -> Tensor:
    r"""Return the $e$ with $e \cdot v = \langle g, v\rangle_x$ by coordinates: the inverse of `space.gradient`.

    Args:
        space: with inner.
        x: (*batch, *shape).
        gradient: $g$ (*batch, *shape), tangents at `x`.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import PoincareBall
        >>> lower(PoincareBall(2), torch.zeros(2), torch.tensor([1.0, 0.0]))
        tensor([4., 0.])
    """
    with torch.enable_grad():
        v = torch.zeros_like(gradient, requires_grad=True)
        (e,) = torch.autograd.grad(space._inner(x.detach(), gradient.detach(), v).sum(), v)
    return e


RIEMANNIAN_EQUIVALENTS: dict[Any, type[_RiemannianOptimizer]] = {
    torch.optim.SGD: RiemannianSGD,
    torch.optim.Adam: RiemannianAdam,
}


def optimizer_on(space: Manifold, optimizer: Optimizer) -> Optimizer:
    """Return the Riemannian optimiser on `space` that corresponds to `optimizer`.

    On a flat space that is itself; on a curved one `torch.optim.SGD` and `Adam` have Riemannian twins. Options that
    `functools.partial` binds are kept.

    Args:
        space: where the parameters live.
        optimizer: a class of `torch.optim`, or one of this module, or a `functools.partial` of either.

    Raises:
        ArgumentError: naming an optimiser, or an option of it, that has no meaning on a curved space.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Sphere
        >>> optimizer_on(Sphere(3), torch.optim.SGD).func.__name__
        'RiemannianSGD'
    """
    bound = isinstance(optimizer, functools.partial)
    made = optimizer.func if isinstance(optimizer, functools.partial) else optimizer
    args, options = (optimizer.args, optimizer.keywords) if isinstance(optimizer, functools.partial) else ((), {})
    twin = (
        made if isinstance(made, type) and issubclass(made, _RiemannianOptimizer) else RIEMANNIAN_EQUIVALENTS.get(made)
    )
    if space.flat and twin is not made:
        return optimizer
    name = getattr(made, "__name__", short_repr(made))
    if twin is None:
        expected = f"SGD or Adam of torch.optim, RiemannianSGD or RiemannianAdam on {short_repr(space)}"
        raise ArgumentError(f"optimizer: expected {expected}; got {name}")
    unknown = sorted(options.keys() - inspect.signature(twin).parameters.keys())
    if unknown or (bound and args):
        given = ", ".join(unknown) or f"positional arguments {short_repr(args)}"
        raise ArgumentError(f"optimizer: {twin.__name__} takes no {given}, which {name} was bound to")
    return functools.partial(twin, **(options | {"space": space}))
