"""Parameter spaces, which represent all trainable parameters of a model as one point of a manifold."""

import glob
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_finite, check_shape, is_finite, short_repr
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.kernels.alloc import clone
from manifoldagg.manifolds.assign import Assignment, assign_manifolds, declared_manifolds
from manifoldagg.manifolds.buffer_policies import (
    BufferPolicy,
    check_buffer_policy,
    named_policies,
    resolve_policies,
)
from manifoldagg.manifolds.delegate import Delegate
from manifoldagg.manifolds.flat import Flat
from manifoldagg.manifolds.layout import Entry, Layout, check_tensors, tensors_of
from manifoldagg.manifolds.lora.leaves import Adapters
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.loss import ModelLoss
from manifoldagg.manifolds.manifold import Leaf, Manifold
from manifoldagg.manifolds.model_io import Model, as_tensors
from manifoldagg.manifolds.personal import personal_names, without_entries, without_names
from manifoldagg.manifolds.product import Product
from manifoldagg.manifolds.spec import read_spec, spec_of
from manifoldagg.manifolds.validate import check_point

__all__ = ["ParameterSpace", "check_unscaled"]

SOURCE = "source: "
"""The start of error messages about the argument `source`."""
FLAT_PREFIX_SUFFIX = "..before"
FLAT_TAIL = "..after"
"""A part of the names of flat segments in the product space. No parameter has such a name."""


@dataclass(frozen=True)
class ParameterSpace(Delegate):
    r"""The space of the trainable parameters of a model. A point is one contiguous vector (P,) of all P parameters.

    By default, the space is $\mathbb{R}^P$. If some parameters have manifolds of their own, the space is the product of
    these manifolds and of a Euclidean space for the other parameters.

    - A point contains a tied parameter only once.
    - A point does not contain frozen parameters, buffers and counters. The method `buffers` returns these tensors.
    - By default, the dtype of a point is float32, or float64 if a parameter has the dtype float64. Parameters in bf16
      and fp16 are converted to float32.
    - Converting a model to a point and back returns the same bits. The only exceptions are LoRA adapters whose factors
      the space combines into one matrix. Only the matrix is preserved, up to rounding, and not its factors.

    Args:
        layout: the names, shapes, order and dtypes of the tensors of the model.
        manifolds: the pair (leaf, space) of each curved leaf, in the order of the layout.
        adapters: the adapters whose pairs of factors are leaves, or `None`.
        buffer_policies: the pair (name, policy) of each buffer that has a policy, for servers. Equality, hashes and
            `spec` ignore these policies.
        personal: the names of the personal entries, which are neither in the layout nor in a point. State dicts and
            modules may contain personal entries. Equality, hashes and `spec` ignore these names.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> space = ParameterSpace.of(model)
        >>> space.shape, [leaf.name for leaf in space.layout.leaves]
        ((8,), ['weight', 'bias'])
        >>> point = space.point(model)
        >>> _ = space.load(model, point + 1)
        >>> torch.equal(space.point(model), point + 1)
        True
    """

    layout: Layout
    manifolds: tuple[tuple[str, Manifold], ...] = ()
    adapters: Adapters | None = None
    buffer_policies: tuple[tuple[str, str], ...] = field(default=(), compare=False)
    personal: tuple[str, ...] = field(default=(), compare=False)

    def __repr__(self) -> str:
        return format_result(
            self, size=self.layout.size, leaves=len(self.layout.leaves), manifolds=dict(self.manifolds)
        )

    @staticmethod
    def of(
        model: nn.Module,
        manifolds: Assignment | None = None,
        *,
        buffer_policy: BufferPolicy = (),
        personal: Sequence[str] = (),
        dtype: torch.dtype | None = None,
    ) -> "ParameterSpace":
        """Return the space of the parameters of a module that require a gradient.

        Args:
            model: any module. A `geoopt.ManifoldParameter` declares its own manifold.
            manifolds: a mapping from names or glob patterns of leaves to spaces. Names have precedence over patterns,
                earlier patterns over later patterns, and this mapping over manifolds that parameters declare. The
                trailing axes of a leaf must have the shape of the space, and the leading axes are axes of copies. A
                geoopt manifold adapts its sizes to the leaf.
            buffer_policy: the policies of the buffers, as in `of_state_dict`. The policy of a frozen parameter is
                `"leave"` unless a pattern matches its name. A trainable parameter is never a buffer of a module, so
                each pattern must match a buffer or a frozen parameter.
            personal: names or glob patterns of parameters and buffers that remain on each client, such as
                `["head.*", "*bn*"]`. They are not part of the space: `point`, `buffers`, `loss` and `load` ignore them
                in a module or a state dict, and `state_dict` does not return them.
            dtype: the dtype of points, float32 or float64. The default is the narrower dtype that represents every leaf
                exactly.

        Raises:
            StateDictError: if a parameter is complex, uninitialised or too wide for `dtype`.
            ArgumentError: if a pattern matches no leaf or no buffer, the shape of a space does not fit a leaf, or all
                parameters are personal.

        Example:
            >>> import torch
            >>> from manifoldagg.manifolds import Sphere
            >>> space = ParameterSpace.of(torch.nn.Linear(3, 2), {"weight": Sphere(3)})
            >>> space.manifolds
            (('weight', Power(space=Sphere(n=3), copies=(2,))),)
        """
        layout = Layout.of(model, dtype)
        own = personal_names(layout, personal)
        layout = without_entries(layout, own)
        curved = assign_manifolds(layout, manifolds, without_names(declared_manifolds(model), own))
        # A frozen parameter must not move towards the values of clients. All names of a tied parameter are listed,
        # because each of them can be the name of an entry.
        frozen = {name: "leave" for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        patterns = check_buffer_policy(buffer_policy)
        named = frozen | dict(named_policies(layout.buffers, patterns, layout.entries))
        policies = tuple((entry.name, named[entry.name]) for entry in layout.buffers if entry.name in named)
        return ParameterSpace(layout, curved, buffer_policies=policies, personal=own)

    @staticmethod
    def of_state_dict(
        state: Model,
        manifolds: Assignment | None = None,
        *,
        buffer_policy: BufferPolicy = (),
        personal: Sequence[str] = (),
        dtype: torch.dtype | None = None,
        adapters: bool = False,
        scaling: Scaling = 1.0,
    ) -> "ParameterSpace":
        r"""Return the space of a state dict, for servers without the module.

        With `adapters=True`, each pair of LoRA factors is one leaf: the matrix $X = s B A$ on
        [`LowRank`][manifoldagg.manifolds.LowRank].

        - PEFT's names identify the pairs. The leaf `q.lora.weight` represents `q.lora_A.weight` and `q.lora_B.weight`.
        - The leaf represents only the matrix $X$. Different factors of the same matrix are equivalent.
        - Biases of `lora_B` are scaled like the product. Other tensors are ordinary leaves.
        - State dicts with other ranks are accepted. A lower rank is exact, and a higher rank is truncated to the
          nearest matrix of the rank of the space.
        - `state_dict` returns balanced factors, $B^\top B = A A^\top$, in the ranks, shapes and dtypes of the space. If
          the matrix has a lower rank, the remaining columns of B are 0, and the remaining rows of A are initialised as
          in PEFT. All factors can therefore be trained.

        Args:
            state: a state dict, or a list of tensors or NumPy arrays, whose names are "0", "1" and so on. Tensors that
                share storage, shape and strides are tied.
            manifolds: as in `of`.
            buffer_policy: glob patterns of floating tensors that are not parameters, such as `"*mask"`, or a mapping
                from patterns to `"average"`, `"latest"` or `"leave"`. Tensors named `running_mean`, `running_var` or
                `num_batches_tracked`, and integer and boolean tensors, are always buffers. With the default policy
                `"average"`, a server moves a buffer towards the client's value by the step of the rule. The server does
                not change integer and boolean tensors, unless their policy is `"latest"`. A counter named
                `num_batches_tracked` is replaced if the client's value is larger.
            personal: as in `of`. It cannot be combined with `adapters=True`.
            dtype: the dtype of points, as in `of`.
            adapters: whether each pair of factors is combined to one leaf. Otherwise, the factors are ordinary leaves
                and are averaged separately, which does not average their product.
            scaling: the factor by which the model multiplies $B A$. It is a number, a mapping from patterns to numbers
                like PEFT's `alpha_pattern`, or the config of the adapter (a `LoraConfig` or its dict).

        Raises:
            StateDictError: if an entry is not a tensor or is too wide for `dtype`. With `adapters=True`, also if a
                factor is missing, two factors cannot be multiplied, or a tensor belongs to another kind of adapter.
            ArgumentError: as in `of`, or if a scaling is not positive or does not match the adapters.

        Example:
            >>> import torch
            >>> state = torch.nn.BatchNorm1d(4).state_dict()
            >>> space = ParameterSpace.of_state_dict(state)
            >>> [entry.name for entry in space.layout.buffers]
            ['running_mean', 'running_var', 'num_batches_tracked']
            >>> state = {"q.lora_A.weight": torch.ones(1, 3), "q.lora_B.weight": torch.ones(2, 1)}
            >>> space = ParameterSpace.of_state_dict(state, adapters=True, scaling={"lora_alpha": 2, "r": 1})
            >>> space.manifolds, space.point(state)
            ((('q.lora.weight', LowRank(m=2, n=3, rank=1, state_rank=None)),), tensor([2., 2., 1., 1., 1.]))
        """
        if not isinstance(adapters, bool):
            raise ArgumentError(f"adapters: expected True or False, got {short_repr(adapters)}")
        if not adapters:
            check_unscaled(scaling)
        policy = check_buffer_policy(buffer_policy)
        tensors: Mapping[str, Tensor] = as_tensors("state", state)
        pairs = None
        if adapters:
            if [*personal]:
                raise ArgumentError(f"personal: expected () with adapters=True, got {short_repr(personal)}")
            pairs = Adapters.of(tensors_of(tensors), scaling)
            # The layout depends only on shapes and dtypes, so the stacks need no values.
            tensors = pairs.empty_stacked(tensors)
        layout = Layout.of_state_dict(tensors, tuple(policy), dtype)
        own = personal_names(layout, personal)
        layout = without_entries(layout, own)
        curved = assign_manifolds(layout, manifolds, None if pairs is None else pairs.spaces)
        policies = named_policies(layout.buffers, policy)
        is_flat = not curved and pairs is None and not own
        return _flat_space(layout, policies) if is_flat else ParameterSpace(layout, curved, pairs, policies, own)

    @staticmethod
    def of_spec(spec: Mapping[str, Any]) -> "ParameterSpace":
        """Construct a parameter space from its JSON-compatible description, which the method `spec` returns.

        The result is equal to the described space. The model itself is not needed.

        Args:
            spec: a result of [`spec`][manifoldagg.manifolds.ParameterSpace.spec], possibly from another machine.

        Raises:
            ArgumentError: if the spec is invalid or has another format version.

        Example:
            >>> import json, torch
            >>> space = ParameterSpace.of(torch.nn.BatchNorm1d(4))
            >>> ParameterSpace.of_spec(json.loads(json.dumps(space.spec()))) == space
            True
        """
        return ParameterSpace(*read_spec(spec))

    def spec(self) -> dict[str, Any]:
        """Return a JSON-compatible description of the space, from which `of_spec` can construct the same space.

        The description contains the names, shapes, order, dtypes and ties of all tensors, and the manifolds of the
        parameters.

        Raises:
            ArgumentError: if the space of a leaf is not a class of this package, for example a space of geoopt.
        """
        return spec_of(self.layout, self.manifolds, self.adapters)

    def __post_init__(self) -> None:
        shapes = {leaf.name: leaf.shape for leaf in self.layout.leaves}
        for name, space in self.manifolds:
            if name not in shapes:
                raise ArgumentError(f"manifolds: expected names of leaves, got {short_repr(name)}")
            if not isinstance(space, Manifold) or space.shape != shapes[name]:
                raise ArgumentError(f"manifolds: {name}: expected a space of shape {shapes[name]}, got {space}")
        if self.adapters is not None:
            self.adapters.check_space(self.layout, self.manifolds)

    @cached_property
    def policies(self) -> dict[str, str]:
        """The policy of each buffer by name. Buffers without a given policy have the default policy."""
        return resolve_policies(self.layout.buffers, ()) | dict(self.buffer_policies)

    @cached_property
    def base_space(self) -> Manifold:
        """The geometry of the space: flat, or a product of curved leaves and flat segments."""
        # Consecutive flat leaves are merged to one factor, because each factor costs separate operations.
        curved = dict(self.manifolds)
        factors = dict[str, Manifold]()
        run = 0
        for leaf in self.layout.leaves:
            if leaf.name not in curved:
                run += leaf.size
                continue
            if run:
                factors[f"{leaf.name} {FLAT_PREFIX_SUFFIX}"] = Flat(run)
            factors[leaf.name] = curved[leaf.name]
            run = 0
        return Product(factors | ({FLAT_TAIL: Flat(run)} if run else {})) if curved else Flat(self.layout.size)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        return (self.layout.size,)

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """A mapping from the name of each tensor in the state dicts of this space to its shape and dtype.

        A client can use other ranks for its LoRA adapters. The shapes of the factors in its state dict then differ from
        the shapes in this mapping.
        """
        return self.layout.entries if self.adapters is None else self.adapters.entries(self.layout.entries)

    @cached_property
    def flat(self) -> bool:  # type: ignore[override]  # of the leaves, not of the class
        return not self.manifolds or self.base_space.flat

    def leaves(self, x: Tensor) -> tuple[Leaf, ...]:
        return self._leaves

    @cached_property
    def _leaves(self) -> tuple[Leaf, ...]:
        curved = dict(self.manifolds)
        found = []
        start = 0
        for entry in self.layout.leaves:
            place = slice(start, start + entry.size)
            stored = None if entry.dtype == self.dtype else entry.dtype
            found.append(Leaf(entry.name, curved.get(entry.name) or Flat(entry.size), place, stored))
            start += entry.size
        return tuple(found)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of points: float32 or float64."""
        return self.layout.dtype

    @cached_property
    def is_narrow(self) -> bool:
        """Whether a leaf has a narrower dtype than the points."""
        return any(leaf.dtype.itemsize < self.dtype.itemsize for leaf in self.layout.leaves)

    def check_receivable(self, point: Float[Tensor, " P"]) -> None:
        """Check that a point is still valid after rounding to the dtypes in which clients receive it.

        The rounded parameters must be finite and on their manifolds.

        Raises:
            StateDictError: if the dtype of a leaf overflows. The message contains its name.
            ArgumentError: if a leaf is not on its manifold. The message contains its name.
        """
        # The conversion to the dtypes of the leaves includes all checks.
        self._views(point)

    def point(
        self,
        source: nn.Module | Mapping[str, Tensor],
        *,
        device: torch.device | None = None,
        validate: bool = True,
        scaling: Scaling | None = None,
    ) -> Float[Tensor, " P"]:
        """Return the point of a module or a state dict, as a copy.

        Args:
            source: a module or a state dict with this layout.
            device: the device of the point. The default is the device of the first leaf.
            validate: whether to check that curved leaves are on their manifolds. The tolerance is the square root of
                the machine epsilon of the dtype of the leaf.
            scaling: the scaling of the adapters of `source`, if it differs from the scaling of the space.

        Raises:
            StateDictError: if a tensor is missing, superfluous or not finite, or has another shape or dtype.
            ArgumentError: if a leaf is not on its manifold. The message contains the distance.
        """
        own = self.stack_factors(tensors_of(source), SOURCE, scaling)
        return self._read_points({SOURCE: own}, device, validate)[0]

    def points(self, models: Mapping[str, Mapping[str, Tensor]]) -> list[Float[Tensor, " P"]]:
        """Return the points of several state dicts whose adapters are already stacked.

        Args:
            models: a mapping from labels to state dicts. Error messages start with the label.

        Raises:
            StateDictError: as in [`point`][manifoldagg.manifolds.ParameterSpace.point].
            ArgumentError: as in [`point`][manifoldagg.manifolds.ParameterSpace.point].
        """
        if not isinstance(models, Mapping):
            raise ArgumentError(f"models: expected a mapping from names to state dicts, got {type(models).__name__}")
        return self._read_points(models)

    def buffers(self, source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors that are not trainable: frozen parameters, buffers and counters.

        Raises:
            StateDictError: as in [`point`][manifoldagg.manifolds.ParameterSpace.point].
        """
        tensors = self.stack_factors(tensors_of(source), SOURCE)
        self.layout.check(tensors, SOURCE)
        return {entry.name: tensors[entry.name].detach().clone() for entry in self.layout.buffers}

    def shared(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a state dict without its personal entries.

        Example:
            >>> import torch
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
            >>> [*ParameterSpace.of(model, personal=["1.*"]).shared(model.state_dict())]
            ['0.weight', '0.bias']
        """
        return without_names(state, self.personal)

    def stack_factors(
        self, state: Mapping[str, Tensor], prefix: str = "", scaling: Scaling | None = None
    ) -> Mapping[str, Tensor]:
        """Replace the two factors of each LoRA adapter in a state dict by one tensor, and remove personal entries.

        Personal entries are tensors that remain on each client. If the space has neither adapters nor personal entries,
        the state dict is returned unchanged.

        Args:
            state: a state dict with factors.
            prefix: the start of error messages.
            scaling: the scaling of its adapters, if it differs from the scaling of the space.

        Raises:
            StateDictError: if a factor is missing or has an invalid shape or dtype.
            ArgumentError: if `scaling` is invalid.
        """
        if self.adapters is not None:
            return self.adapters.stack_factors(state, prefix, scaling)
        state = self.shared(state)
        if scaling is not None:
            raise ArgumentError(f"scaling: expected None for a space without adapters, got {short_repr(scaling)}")
        return state

    def state_layout(self, state: Mapping[str, Tensor], prefix: str = "") -> Layout:
        """Return the layout of a state dict in which the factors of adapters are separate leaves.

        Args:
            state: a state dict with the ranks of the space.
            prefix: the start of error messages.

        Raises:
            StateDictError: if a tensor does not match the space.
        """
        if self.adapters is None:
            return self.layout
        check_tensors(self.entries, state, prefix)
        # Names are escaped, because characters such as "[" have a meaning in patterns.
        return Layout.of_state_dict(state, [glob.escape(entry.name) for entry in self.layout.buffers])

    def gauge_free_norms(self, stacked: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Replace the factors of each LoRA adapter by the approximate Frobenius norm of their product.

        Different factors can have the same product, so the norms of the factors of two models are not comparable. The
        norms of the products are comparable.

        Args:
            stacked: a state dict in which one tensor contains both factors of an adapter.
        """
        return stacked if self.adapters is None else self.adapters.gauge_free_norms(stacked)

    def state_dict(self, point: Float[Tensor, " P"], buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        r"""Convert the vector `point`, which contains all parameters of the model, to a state dict.

        The tensors are copies in the dtypes of the model. If a parameter has several names (is tied), each name refers
        to the same tensor. In general, the factors of LoRA adapters are balanced: $B^\top B = A A^\top$.

        Args:
            point: a finite point (P,).
            buffers: buffers as from [`buffers`][manifoldagg.manifolds.ParameterSpace.buffers]. The default is a state
                dict without buffers.

        Raises:
            ArgumentError: if `point` is not a point of the space.
            StateDictError: if `buffers` does not match the layout, or the dtype of a leaf overflows.
        """
        check_finite("point", check_shape("point", point, *self.shape))
        if buffers is not None:
            self.layout.check_buffers(buffers)
        return self._state_dict(point, buffers or {})

    def views(self, point: Float[Tensor, " P"]) -> dict[str, Tensor]:
        """Split a point, which is the vector of all parameters, into the parameters of the model, by name.

        Parameters with the dtype of the point are views of the point. Parameters with other dtypes are copies. The
        factors of LoRA adapters are always copies, because they are computed from their product.

        Args:
            point: a finite point (P,).

        Raises:
            StateDictError: if the dtype of a leaf overflows.
        """
        return self._split_factors(self._views(point))

    def load(self, model: nn.Module, point: Float[Tensor, " P"]) -> nn.Module:
        """Copy `point` into the parameters of `model`, and return the model.

        The buffers of the model do not change. If the method raises an error, the whole model is unchanged.

        Raises:
            StateDictError: if `model` does not match the layout, or the dtype of a leaf overflows.
            ArgumentError: if `point` is not a point of the space.
        """
        check_finite("point", check_shape("point", point, *self.shape))
        tensors = tensors_of(model)
        self.layout.check(self.stack_factors(tensors))
        # All checks precede the first copy, so that an error leaves the model unchanged.
        new = self.views(point)
        for name, x in new.items():
            if x.shape != tensors[name].shape:
                raise StateDictError(f"{name}: expected shape {tuple(x.shape)}, got {tuple(tensors[name].shape)}")
        with torch.no_grad():
            for name, x in new.items():
                tensors[name].copy_(x)
        return model

    def loss(self, model: nn.Module, criterion: Callable[[Any, Any], Tensor]) -> ModelLoss:
        r"""Return the loss of `model` as a function of its parameters and a batch.

        The loss is $\ell(\theta, (x, y)) = \mathrm{criterion}(f_\theta(x), y)$. Here, $\theta$ is the vector of all
        parameters, $(x, y)$ is a batch, and $f_\theta$ is `model` with the parameters $\theta$. Calling the loss runs
        one forward pass with `torch.func.functional_call`, in the current mode (train or eval) of `model`. It never
        modifies `model`, because the loss has its own copies of the buffers.

        Args:
            model: a module with this layout.
            criterion: a function from (output, target) to a scalar.

        Returns:
            A function `loss(theta, batch)` of a point (P,) and a pair (inputs, targets). Its attribute
            [`buffers`][manifoldagg.manifolds.ModelLoss] contains the buffers after the forward passes.

        Raises:
            StateDictError: if `model` does not have this layout.
            ArgumentError: if the space has adapters, or if `model` is a `DataParallel`, which `functional_call` does
                not support.

        Example:
            >>> import torch
            >>> model = torch.nn.Linear(3, 2)
            >>> space = ParameterSpace.of(model)
            >>> loss = space.loss(model, torch.nn.functional.mse_loss)
            >>> loss(torch.zeros(8), (torch.ones(5, 3), torch.ones(5, 2)))
            tensor(1.)
        """
        if self.adapters is not None:
            raise ArgumentError(
                "space: expected a space of a module, got a space of state dicts with adapters; use ParameterSpace.of"
            )
        if isinstance(model, nn.DataParallel):
            raise ArgumentError("model: expected a module that is not replicated, got DataParallel; pass model.module")
        self.layout.check(self.shared(tensors_of(model)))
        leaves = {leaf.name for leaf in self.layout.leaves}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers() if name not in leaves}
        return ModelLoss(self.layout, model, criterion, buffers)

    def _read_points(
        self, models: Mapping[str, Mapping[str, Tensor]], device: torch.device | None = None, validate: bool = True
    ) -> list[Tensor]:
        """Return the parameter vector (point) of each of several models.

        Args:
            models: a mapping from labels to state dicts, in which one tensor contains both factors of a LoRA adapter.
                Error messages start with the label.
            device: the device of the points. The default is the device of the first parameter.
            validate: whether to check that the parameters are on their manifolds.
        """
        points = self.layout.read_points(models, device)
        for label, tensors in models.items():
            for name, space in self.manifolds if validate else ():
                leaf = tensors[name].detach()
                # A bf16 leaf is on its manifold only up to the rounding of bf16.
                rounding = torch.finfo(leaf.dtype).eps ** 0.5
                check_point(space, leaf.to(self.dtype), name=f"{label}{name}", tolerance=rounding)
        return points

    def _state_dict(self, point: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict at a point that is already checked."""
        views = self._views(point)
        # Leaves in the dtype of the point are views of it, so they are copied.
        leaves = [clone(views[leaf.name]) for leaf in self.layout.leaves]
        return self._split_factors(
            self.layout.to_state_dict(leaves, {name: x.detach().clone() for name, x in buffers.items()})
        )

    def _split_factors(self, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert stacked adapters back to pairs of factors, if the space has adapters."""
        return stacked if self.adapters is None else self.adapters.split(stacked)

    def _views(self, point: Tensor) -> dict[str, Tensor]:
        """Return the leaves at a point, in their dtypes.

        Raises:
            ArgumentError: if a rounded leaf is not on its manifold.
            StateDictError: if the dtype of a leaf overflows.
        """
        views = self.layout.views(point.detach())
        for name, space in self.manifolds:
            leaf = views[name]
            # Rounding a leaf to its dtype moves it off its manifold by about the machine epsilon of this dtype.
            check_point(space, leaf.to(point.dtype), name=name, tolerance=torch.finfo(leaf.dtype).eps ** 0.5)
        for name, view in views.items():
            # A finite float32 value can overflow in fp16.
            if view.dtype.itemsize < point.dtype.itemsize and not is_finite(view):
                raise StateDictError(f"{name}: expected values in the range of {view.dtype}, got an overflow")
        return views


def check_unscaled(scaling: Any) -> None:
    """Check that the scaling of a model without adapters is 1.

    Raises:
        ArgumentError: if `scaling` is not 1.
    """
    if not (isinstance(scaling, int | float) and not isinstance(scaling, bool) and scaling == 1):
        raise ArgumentError(f"scaling: expected 1 without adapters=True, got {short_repr(scaling)}")


# The result is cached, because a server requests the same space in every round.
@lru_cache(maxsize=64)
def _flat_space(layout: Layout, buffer_policies: tuple[tuple[str, str], ...]) -> ParameterSpace:
    """Return the Euclidean space of all parameters of a model."""
    return ParameterSpace(layout, buffer_policies=buffer_policies)
