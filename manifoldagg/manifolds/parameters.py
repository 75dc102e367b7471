"""The parameter space: a model's trainable parameters as one point of a manifold."""

import glob
from collections.abc import Callable, Mapping
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
from manifoldagg.manifolds.product import Product
from manifoldagg.manifolds.spec import read_spec, spec_of
from manifoldagg.manifolds.validate import check_point

__all__ = ["ParameterSpace", "check_unscaled"]

FLAT_PREFIX_SUFFIX = "..before"
FLAT_TAIL = "..after"
"""Runs of flat leaves; no parameter is called so."""


@dataclass(frozen=True)
class ParameterSpace(Delegate):
    r"""$M_\Theta$: the trainable parameters of a model, in one contiguous point (P,).

    It is $\mathbb{R}^P$, unless some parameters live on manifolds of their own: then it is the product of those and
    of the flat rest, each curved leaf a view of the point in its own shape.

    Parameters that require no gradient, buffers and counters are not geometry: they are *carried*. Tied
    parameters are one leaf. bf16 and fp16 parameters have a float32 master; a model with a float64 parameter
    has a float64 point. Model to point to model is the identity, bit for bit.

    Args:
        layout: names, shapes, order and dtypes of the model's tensors.
        manifolds: (leaf, space) for each curved leaf, in the order of the layout.
        adapters: the pairs of factors that state dicts contain in place of a leaf, or `None`.
        buffer_policies: (name, policy) of each carried tensor that `buffer_policy` names, for servers. They are not
            geometry: equality, hashes and `spec` ignore them.

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
        dtype: torch.dtype | None = None,
    ) -> "ParameterSpace":
        """Return the space of a module's parameters that require a gradient.

        A `geoopt.ManifoldParameter` brings its manifold.

        Args:
            model: any module.
            manifolds: name or glob pattern to the space of those leaves, a name before a pattern and an earlier
                pattern before a later one; it overrides what parameters bring. The trailing axes of a leaf have the
                shape of the space, further ones are copies of it. A geoopt manifold takes its sizes from each leaf.
            buffer_policy: the policies of the carried tensors, as in `of_state_dict`. The policy of a frozen parameter
                is `"leave"` unless a pattern matches its name.
            dtype: of points: float32 or float64; the default is the narrower one that holds every leaf exactly.

        Raises:
            StateDictError: naming a parameter that is complex, uninitialised or too wide for `dtype`.
            ArgumentError: if a pattern matches no leaf, or a space does not fit the leaf, naming both.

        Example:
            >>> import torch
            >>> from manifoldagg.manifolds import Sphere
            >>> space = ParameterSpace.of(torch.nn.Linear(3, 2), {"weight": Sphere(3)})
            >>> space.manifolds
            (('weight', Power(space=Sphere(n=3), copies=(2,))),)
        """
        layout = Layout.of(model, dtype)
        curved = assign_manifolds(layout, manifolds, declared_manifolds(model))
        frozen = {name: "leave" for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad}
        named = frozen | dict(named_policies(layout.buffers, check_buffer_policy(buffer_policy)))
        policies = tuple((entry.name, named[entry.name]) for entry in layout.buffers if entry.name in named)
        return ParameterSpace(layout, curved, buffer_policies=policies)

    @staticmethod
    def of_state_dict(
        state: Model,
        manifolds: Assignment | None = None,
        *,
        buffer_policy: BufferPolicy = (),
        dtype: torch.dtype | None = None,
        adapters: bool = False,
        scaling: Scaling = 1.0,
    ) -> "ParameterSpace":
        r"""Return the space of a state dict, for servers without the module.

        With `adapters` the factors of low-rank adapters, which it finds by PEFT's names, are one leaf a pair: the
        matrix $X = s B A$ of their rank on [`LowRank`][manifoldagg.manifolds.LowRank], whatever its gauge. The leaf
        `q.lora.weight` stands for `q.lora_A.weight` and `q.lora_B.weight`. Biases of second factors are scaled as they
        are; magnitudes, heads and all else are what they are elsewhere. State dicts of other ranks are read too: a
        lower one is exact, of a higher one the nearest matrix of the space's rank is taken. `state_dict` gives the
        space's own ranks, shapes and dtypes, balanced: $B^\top B = A A^\top$. Where a matrix has a lower rank than
        its factors, the rest of B is 0 and that of A is not, as where PEFT begins: all of it goes on learning.

        Args:
            state: a state dict, or a list of tensors or NumPy arrays, whose names are "0", "1" and so on. Tensors that
                share storage, shape and strides are tied.
            manifolds: as in `of`.
            buffer_policy: glob patterns of floating tensors that are not parameters, such as `"*mask"`, or a mapping
                from patterns to `"average"`, `"latest"` or `"leave"`. Tensors named `running_mean`, `running_var` or
                `num_batches_tracked`, and integer and boolean tensors, are always buffers. A server moves a buffer with
                the policy `"average"`, the default, linearly by the rule's step towards the client's value. Integer and
                boolean tensors stay the server's, except with `"latest"`. A counter named `num_batches_tracked`
                becomes the client's if that is larger.
            dtype: of points, as in `of`.
            adapters: whether pairs of factors are one matrix each. Otherwise they are tensors like others, and means
                of factors are not the factors of means.
            scaling: what the model multiplies $B A$ with: a number; a mapping from patterns to numbers, as PEFT's
                `alpha_pattern` has them; or the adapter's config, a `LoraConfig` or its dict.

        Raises:
            StateDictError: naming an entry that is not a tensor or too wide for `dtype`; or with `adapters` a factor
                without the other, factors that do not multiply, or a tensor of another kind of adapter.
            ArgumentError: as `of`; or if a scaling is not above 0, or is not that of these adapters.

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
        found = None
        if adapters:
            found = Adapters.of(tensors_of(tensors), scaling)
            tensors = found.empty_stacked(tensors)
        layout = Layout.of_state_dict(tensors, tuple(policy), dtype)
        curved = assign_manifolds(layout, manifolds, None if found is None else found.spaces)
        policies = named_policies(layout.buffers, policy)
        is_flat = not curved and found is None
        return _flat_space(layout, policies) if is_flat else ParameterSpace(layout, curved, found, policies)

    @staticmethod
    def of_spec(spec: Mapping[str, Any]) -> "ParameterSpace":
        """Build the space of a spec: equal to that of the server, with or without the module.

        Args:
            spec: what [`spec`][manifoldagg.manifolds.ParameterSpace.spec] returned, perhaps on another machine.

        Raises:
            ArgumentError: if it is invalid, or from another version of this package.

        Example:
            >>> import json, torch
            >>> space = ParameterSpace.of(torch.nn.BatchNorm1d(4))
            >>> ParameterSpace.of_spec(json.loads(json.dumps(space.spec()))) == space
            True
        """
        return ParameterSpace(*read_spec(spec))

    def spec(self) -> dict[str, Any]:
        """Return the names, shapes, order and dtypes of all tensors, ties and spaces, as a JSON-compatible value.

        Raises:
            ArgumentError: naming a leaf whose space is none of this package's, as those of geoopt are not.
        """
        return spec_of(self.layout, self.manifolds, self.adapters)

    def __post_init__(self) -> None:
        shapes = {leaf.name: leaf.shape for leaf in self.layout.leaves}
        for name, space in self.manifolds:
            if name not in shapes:
                raise ArgumentError(f"manifolds: no leaf is called {short_repr(name)}")
            if not isinstance(space, Manifold) or space.shape != shapes[name]:
                raise ArgumentError(f"manifolds: {name} has shape {shapes[name]}, which is not that of {space}")
        if self.adapters is not None:
            self.adapters.check_space(self.layout, self.manifolds)

    @cached_property
    def policies(self) -> dict[str, str]:
        """The policy of each carried tensor by name, including the defaults of those without a policy."""
        return resolve_policies(self.layout.buffers, ()) | dict(self.buffer_policies)

    @cached_property
    def base_space(self) -> Manifold:
        """The geometry: flat, or the product of the curved leaves and of the flat segments between them."""
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
        """The entries of a state dict by name; those of adapters may have other ranks."""
        return self.layout.entries if self.adapters is None else self.adapters.entries(self.layout.entries)

    @cached_property
    def flat(self) -> bool:  # type: ignore[override]  # of the leaves, not of the class
        """Whether every leaf is flat."""
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
        """Whether a leaf has a narrower dtype than points."""
        return any(leaf.dtype.itemsize < self.dtype.itemsize for leaf in self.layout.leaves)

    def check_receivable(self, point: Float[Tensor, " P"]) -> None:
        """Check that a point remains finite, and on its manifolds, in the dtypes of the leaves.

        Raises:
            StateDictError: naming a leaf whose dtype overflows.
            ArgumentError: naming a leaf that leaves its manifold.
        """
        self._views(point)

    def point(
        self,
        source: nn.Module | Mapping[str, Tensor],
        *,
        device: torch.device | None = None,
        validate: bool = True,
        scaling: Scaling | None = None,
    ) -> Float[Tensor, " P"]:
        """Return a copy of the point of a module or a state dict, on the device of the first leaf or on `device`.

        Args:
            source: with this layout.
            device: of the point.
            validate: check that curved leaves lie on their manifolds, to the square root of the rounding of the
                dtype of the leaf.
            scaling: of the adapters of `source`, where it is not that of the space.

        Raises:
            StateDictError: naming a tensor that is missing, extra, misshaped, of another dtype or not finite.
            ArgumentError: naming a leaf that is off its manifold, and how far.
        """
        return self._read_points({"": self.stack_factors(tensors_of(source), scaling=scaling)}, device, validate)[0]

    def points(self, models: Mapping[str, Mapping[str, Tensor]]) -> list[Float[Tensor, " P"]]:
        """Return the points of several state dicts, by labels for error messages; those of adapters are stacked.

        Raises:
            StateDictError: as [`point`][manifoldagg.manifolds.ParameterSpace.point], naming the model too.
            ArgumentError: likewise.
        """
        if not isinstance(models, Mapping):
            raise ArgumentError(f"models: expected a mapping from names to state dicts, got {type(models).__name__}")
        return self._read_points(models)

    def buffers(self, source: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return copies of the tensors outside of the point: frozen parameters, buffers, counters, by name.

        Raises:
            StateDictError: as [`point`][manifoldagg.manifolds.ParameterSpace.point].
        """
        tensors = self.stack_factors(tensors_of(source))
        self.layout.check(tensors)
        return {entry.name: tensors[entry.name].detach().clone() for entry in self.layout.buffers}

    def stack_factors(
        self, state: Mapping[str, Tensor], prefix: str = "", scaling: Scaling | None = None
    ) -> Mapping[str, Tensor]:
        """Replace adapter factors in a state dict by the leaves of the layout; other state dicts are unchanged.

        Args:
            state: by the names that state dicts have.
            prefix: what messages begin with.
            scaling: of its adapters, where it is not that of the space.

        Raises:
            StateDictError: naming a factor that is missing or does not fit.
            ArgumentError: if `scaling` does not.
        """
        if self.adapters is not None:
            return self.adapters.stack_factors(state, prefix, scaling)
        if scaling is not None:
            raise ArgumentError("scaling: expected None, as the space has no adapters")
        return state

    def state_layout(self, state: Mapping[str, Tensor], prefix: str = "") -> Layout:
        """Return the layout of a state dict of this space, in which the factors of adapters are separate leaves.

        Args:
            state: name to tensor, with the ranks of the space.
            prefix: the start of messages.

        Raises:
            StateDictError: naming a tensor that does not match the space.
        """
        if self.adapters is None:
            return self.layout
        check_tensors(self.entries, state, prefix)
        return Layout.of_state_dict(state, [glob.escape(entry.name) for entry in self.layout.buffers])

    def gauge_free_norms(self, stacked: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Replace each adapter in a stacked state dict by its norm, which is independent of the gauge."""
        return stacked if self.adapters is None else self.adapters.gauge_free_norms(stacked)

    def state_dict(self, point: Float[Tensor, " P"], buffers: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the state dict at `point`: new tensors in the leaves' dtypes, tied names shared, adapters balanced.

        Args:
            point: (P,), finite.
            buffers: as from [`buffers`][manifoldagg.manifolds.ParameterSpace.buffers]; left out of the result where
                not given.

        Raises:
            ArgumentError: if `point` does not lie in the space.
            StateDictError: naming a tensor of `buffers` that is not the layout's, or a leaf whose dtype overflows.
        """
        check_finite("point", check_shape("point", point, *self.shape))
        if buffers is not None:
            self.layout.check_buffers(buffers)
        return self._state_dict(point, buffers or {})

    def views(self, point: Float[Tensor, " P"]) -> dict[str, Tensor]:
        """Return the finite parameters at `point`: views of it, except for narrower dtypes and adapters.

        Raises:
            StateDictError: naming a leaf whose dtype overflows.
        """
        return self._split_factors(self._views(point))

    def load(self, model: nn.Module, point: Float[Tensor, " P"]) -> nn.Module:
        """Copy `point` into the parameters of `model` and return it; carried tensors are unchanged.

        Raises:
            StateDictError: if the tensors of `model` are not the layout's, or a leaf's dtype overflows.
            ArgumentError: if `point` does not lie in the space. The model is untouched then.
        """
        check_finite("point", check_shape("point", point, *self.shape))
        tensors = tensors_of(model)
        self.layout.check(self.stack_factors(tensors))
        new = self.views(point)
        for name, x in new.items():
            if x.shape != tensors[name].shape:
                raise StateDictError(f"{name}: expected shape {tuple(x.shape)}, got {tuple(tensors[name].shape)}")
        with torch.no_grad():
            for name, x in new.items():
                tensors[name].copy_(x)
        return model

    def loss(self, model: nn.Module, criterion: Callable[[Any, Any], Tensor]) -> ModelLoss:
        r"""Return the loss of a point on a batch: $\ell(\theta, (x, y)) = \mathrm{criterion}(f_\theta(x), y)$.

        One forward through `torch.func.functional_call`; `model` lends its code and mode (train or eval) but
        is never written: its parameters are views of `theta`, its buffers are copies that live with the loss.

        Args:
            model: a module with this layout.
            criterion: (output, target) to a scalar.

        Returns:
            `loss(theta, batch)` for `theta` (P,) and `batch` a pair (inputs, targets): a scalar. What training does to
            the buffers is in its [`buffers`][manifoldagg.manifolds.ModelLoss].

        Raises:
            StateDictError: if `model` does not have this layout.

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
                "space: expected one of a module, `ParameterSpace.of`, got one of adapters' state dicts"
            )
        self.layout.check(tensors_of(model))
        leaves = {leaf.name for leaf in self.layout.leaves}
        buffers = {name: b.detach().clone() for name, b in model.named_buffers() if name not in leaves}
        return ModelLoss(self.layout, model, criterion, buffers)

    def _read_points(
        self, models: Mapping[str, Mapping[str, Tensor]], device: torch.device | None = None, validate: bool = True
    ) -> list[Tensor]:
        points = self.layout.read_points(models, device)
        for label, tensors in models.items():
            for name, space in self.manifolds if validate else ():
                leaf = tensors[name].detach()
                rounding = torch.finfo(leaf.dtype).eps ** 0.5
                check_point(space, leaf.to(self.dtype), name=f"{label}{name}", tolerance=rounding)
        return points

    def _state_dict(self, point: Tensor, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        views = self._views(point)
        leaves = [clone(views[leaf.name]) for leaf in self.layout.leaves]
        return self._split_factors(
            self.layout.to_state_dict(leaves, {name: x.detach().clone() for name, x in buffers.items()})
        )

    def _split_factors(self, stacked: dict[str, Tensor]) -> dict[str, Tensor]:
        return stacked if self.adapters is None else self.adapters.split(stacked)

    def _views(self, point: Tensor) -> dict[str, Tensor]:
        """The leaves of a finite point, finite in their own dtypes too."""
        views = self.layout.views(point.detach())
        for name, space in self.manifolds:
            leaf = views[name]
            check_point(space, leaf.to(point.dtype), name=name, tolerance=torch.finfo(leaf.dtype).eps ** 0.5)
        for name, view in views.items():
            if view.dtype.itemsize < point.dtype.itemsize and not is_finite(view):
                raise StateDictError(f"{name}: a value of the point overflows {view.dtype}")
        return views


def check_unscaled(scaling: Any) -> None:
    """Check that the scaling of a model without adapters has its default.

    Raises:
        ArgumentError: if it has another value.
    """
    if not (isinstance(scaling, int | float) and not isinstance(scaling, bool) and scaling == 1):
        raise ArgumentError(f"scaling: expected 1 without adapters=True, got {short_repr(scaling)}")


@lru_cache(maxsize=64)
def _flat_space(layout: Layout, buffer_policies: tuple[tuple[str, str], ...]) -> ParameterSpace:
    return ParameterSpace(layout, buffer_policies=buffer_policies)
