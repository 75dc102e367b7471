"""Proximal term of FedMRUR, which pulls a local model towards the server's model.

The term is an exponential function of the squared Lorentz distance between the two models on a hyperboloid.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from manifoldagg._validation import check_number
from manifoldagg.errors import DivergenceError
from manifoldagg.kernels import combine, gram

__all__ = ["LorentzProximal"]


@dataclass(frozen=True)
class LorentzProximal:
    r"""Proximal term $\tfrac{\mu}{2} \exp(d^2 / \sigma)$ of FedMRUR, which pulls a local model to the server's model.

    $\theta$ is the local model, $\Theta$ is the server's model, and $d$ is their Lorentz distance on a hyperboloid. A
    model is lifted to the hyperboloid by $\pi(\theta) = (\sqrt{\beta + \|\theta\|^2},\, \theta)$. The Lorentz product
    of every lifted model with itself is $\langle x, x\rangle_L = -x_0^2 + \sum_i x_i^2 = -\beta$. Let
    $\delta = \theta - \Theta$, and let $r$ and $q$ be the first coordinates of $\pi(\theta)$ and $\pi(\Theta)$. Then

    $$d^2 = \|\pi(\theta) - \pi(\Theta)\|_L^2 = \|\delta\|^2 - w^2, \qquad
      w = r - q = \frac{\langle\delta, \theta + \Theta\rangle}{r + q}.$$

    The gradient is $\tfrac{\mu}{\sigma} \exp(d^2 / \sigma)\,(\delta - \tfrac{w}{r}\,\theta)$. At $\theta = \Theta$, the
    value is $\mu / 2$ and the gradient is 0.

    Near $\theta = \Theta$, the term is to second order the constant $\mu / 2$ plus an ordinary proximal term. This
    ordinary term has the weight $\mu / \sigma$ in the metric of the hyperboloid. In this metric, lengths along
    $\theta$ are shorter by the factor $\sqrt\beta / r$.

    The class evaluates the last formula for $w$, which is numerically stable. The rounding error of $d^2$ is of order
    $\varepsilon \|\delta\|^2$, where $\varepsilon$ is the machine precision. This also holds if the two models are
    close to one another and far from 0. In this case, the equivalent formula
    $d^2 = -2\beta - 2\langle\pi(\theta), \pi(\Theta)\rangle_L$ would lose accuracy to cancellation.

    `LorentzProximal` is a [`ProximalTerm`][manifoldagg.curves.ProximalTerm]. Pass an instance as the option `proximal`
    of a trainer or of [`Training`][manifoldagg.curves.Training]. For example, the local training of FedMRUR is
    `Local(proximal=LorentzProximal(0.01))`.

    Args:
        weight: the weight $\mu \ge 0$ of the term.
        variance: the scale $\sigma > 0$ of the squared distance in the exponent. A smaller scale makes the term grow
            faster with the distance.
        offset: the offset $\beta > 0$ of the hyperboloid. $\sqrt\beta$ is the first coordinate of the lifted model 0.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

    Source: Report (24)-(27), after An et al. 2023 (FedMRUR) and Law et al. 2019.

    Example:
        >>> import torch
        >>> term, base = LorentzProximal(weight=0.5), torch.tensor([3.0, 4.0])
        >>> term(base, base), term.gradient(base, base)
        (tensor(0.2500, dtype=torch.float64), tensor([0., 0.]))
    """

    weight: float
    variance: float = 1.0
    offset: float = 1.0

    def __post_init__(self) -> None:
        check_number("weight", self.weight, at_least=0)
        check_number("variance", self.variance, above=0)
        check_number("offset", self.offset, above=0)

    def __call__(self, theta: Float[Tensor, " P"], base: Float[Tensor, " P"]) -> Float64[Tensor, ""]:
        r"""Return the value of the proximal term as a differentiable scalar.

        If the value overflows, the result is infinity.

        Args:
            theta: the local model $\theta$.
            base: the server's model $\Theta$.
        """
        square, _, _ = self._parts(theta, base)
        if self.weight == 0:
            return 0.0 * square
        return 0.5 * self.weight * (square / self.variance).exp()

    def gradient(self, theta: Float[Tensor, " P"], base: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        r"""Return the gradient of the term with respect to $\theta$, in the dtype of `theta`.

        Args:
            theta: the local model $\theta$.
            base: the server's model $\Theta$.

        Raises:
            DivergenceError: if the gradient overflows, because the models are too far apart for this $\sigma$.

        Cost: one read and one write of the model.
        """
        theta = theta.detach()
        base = base.detach()
        if self.weight == 0:
            return torch.zeros_like(theta)
        square, w, r = (float(x) for x in self._parts(theta, base))
        try:
            size = self.weight / self.variance * math.exp(square / self.variance)
        except OverflowError:
            size = math.inf
        if not math.isfinite(size):
            raise DivergenceError(f"the exponent of {self} is {square / self.variance:g}; try a larger variance")
        return combine(None, [theta, theta], [size, -size * w / r], minus=[base, None])

    def _parts(self, theta: Tensor, base: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        r"""Return $d^2$, $w$ and $r$, which are defined in the class docstring."""
        inner = gram([theta, theta, base], minus=[base, None, None])[0]
        r = (self.offset + inner[1, 1]).sqrt()
        q = (self.offset + inner[2, 2]).sqrt()
        # The direct difference r - q would lose the common digits of two models that are close to one another and far
        # from 0.
        w = (inner[0, 1] + inner[0, 2]) / (r + q)
        return (inner[0, 0] - w.square()).clamp(min=0), w, r
