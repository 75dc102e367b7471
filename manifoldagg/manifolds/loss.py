"""The loss of a model as a function of a point of its parameter space."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from manifoldagg._validation import check_shape
from manifoldagg.manifolds.layout import Layout, tensors_of

__all__ = ["Loss", "ModelLoss"]

Loss = Callable[[Tensor, Any], Tensor]
"""A function `loss(theta, batch)` that maps a point and a batch to a scalar."""


@dataclass(frozen=True, eq=False, repr=False)
class ModelLoss:
    r"""The loss $\ell(\theta, (x, y)) = \mathrm{criterion}(f_\theta(x), y)$ of a module on a batch of data.

    $f_\theta(x)$ is the output of the module with the parameters $\theta$. It is computed by the code of the module in
    its current mode (train or eval). The module itself is never modified. New batch statistics are written to
    `replacements` instead.

    Args:
        layout: the layout of the module.
        model: the module.
        criterion: a function from (output, target) to a scalar.
        replacements: the tensors that replace the buffers and frozen parameters of the module, by name.

    Example:
        >>> from manifoldagg.manifolds import ParameterSpace
        >>> model = nn.BatchNorm1d(1)
        >>> space = ParameterSpace.of(model)
        >>> loss = space.loss(model, nn.functional.mse_loss)
        >>> _ = loss(space.point(model), (torch.tensor([[4.0], [6.0]]), torch.zeros(2, 1)))
        >>> loss.buffers["running_mean"], model.running_mean
        (tensor([0.5000]), tensor([0.]))
    """

    layout: Layout
    model: nn.Module
    criterion: Callable[[Any, Any], Tensor]
    replacements: dict[str, Tensor]

    def __call__(self, theta: Tensor, batch: Any) -> Tensor:
        check_shape("theta", theta, self.layout.size)
        inputs, targets = batch
        return self.criterion(self.output(theta, inputs), targets)

    def output(self, theta: Tensor, *args: Any, **options: Any) -> Any:
        r"""Compute $f_\theta$ for the given inputs of the module."""
        # `functional_call` exchanges the tensors during the call, so the derivatives reach `theta` through its views.
        return torch.func.functional_call(self.model, self.layout.views(theta) | self.replacements, args, options)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Copies of the current buffers and frozen parameters, by their names in a state dict."""
        tensors = tensors_of(self.model)
        return {entry.name: self.replacement_of(tensors[entry.name]).detach().clone() for entry in self.layout.buffers}

    def replacement_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor that this loss function uses instead of a buffer or a frozen parameter of the module.

        A forward pass can modify buffers, such as batch statistics. The loss function therefore uses copies, so that
        the module does not change. If a tensor has no replacement, the method returns the tensor itself.
        """
        name = self._names().get(id(tensor))
        return tensor if name is None else self.replacements.get(name, tensor)

    def with_buffers(self, buffers: Mapping[str, Tensor] | None = None) -> "ModelLoss":
        """Return a new loss with the same model and criterion, but with separate buffers, such as batch statistics.

        Forward passes of one loss do not change the buffers of the other loss.

        Args:
            buffers: the initial buffers, as from `ParameterSpace.buffers`. They are not modified. The default is the
                current buffers of this loss.

        Raises:
            StateDictError: if a buffer is missing or superfluous, or has another shape or dtype.
        """
        copies = {name: buffer.detach().clone() for name, buffer in self.replacements.items()}
        if buffers is None:
            return replace(self, replacements=copies)
        self.layout.check_buffers(buffers)
        tensors = tensors_of(self.model)
        names = self._names()
        for entry in self.layout.buffers:
            tensor = tensors[entry.name]
            name = names.get(id(tensor))
            if name is None:
                continue
            given = buffers[entry.name].detach().to(tensor.device)
            # Frozen parameters are never modified and can be most of the model, so they are not copied.
            copies[name] = given if isinstance(tensor, nn.Parameter) else given.clone()
        return replace(self, replacements=copies)

    def _names(self) -> dict[int, str]:
        """Return the name by which `functional_call` replaces each tensor, by the id of the tensor."""
        named = (*self.model.named_buffers(), *self.model.named_parameters())
        return {id(tensor): name for name, tensor in named}
