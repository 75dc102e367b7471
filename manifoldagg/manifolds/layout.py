"""Layouts, which describe how the parameters of a model are stored in one contiguous vector, called a point.

A layout contains the name, the shape and the dtype of each tensor in the state dict of the model. It states which
tensors are parameters, which are tied to another parameter, and which are buffers. Buffers are not part of a point.
"""

import fnmatch
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from manifoldagg._result_repr import format_result
from manifoldagg._validation import check_choice, is_finite, short_repr
from manifoldagg.errors import ArgumentError, StateDictError
from manifoldagg.kernels import TensorList
from manifoldagg.kernels.alloc import in_huge_pages
from manifoldagg.kernels.tensor_list import CPU
from manifoldagg.manifolds.wrapper_prefixes import wrapper_hint

__all__ = [
    "BATCH_STATISTICS",
    "MASTER_DTYPES",
    "Entry",
    "Layout",
    "ModelSignature",
    "check_memory",
    "check_names",
    "check_tensors",
    "layout_of",
    "matches_any",
    "signature_of",
    "tensors_of",
]

MASTER_DTYPES = (torch.float32, torch.float64)
EXTRA_STATE = "_extra_state"
BATCH_STATISTICS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
"""The names of batch statistics. They are not parameters, because extrapolation could make a variance negative."""
DENSE_STORAGE = (torch.strided, False)
STRIDED = {torch.strided}
_storage = attrgetter("layout", "is_meta")
_layout = attrgetter("layout")
_is_cpu = attrgetter("is_cpu")
_shape = attrgetter("shape")
_dtype = attrgetter("dtype")
_device = attrgetter("device")
CPU_ONLY = frozenset({CPU})


@dataclass(frozen=True)
class Entry:
    """The name, shape and dtype of one tensor of a state dict."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """The number of entries of the tensor. A tensor without axes has one entry."""
        return torch.Size(self.shape).numel()

    @property
    def is_statistic(self) -> bool:
        """Whether the name is one of `BATCH_STATISTICS`."""
        return self.name.rpartition(".")[2] in BATCH_STATISTICS

    @property
    def is_counter(self) -> bool:
        """Whether an integer entry is a counter: a single number, or a statistic."""
        return self.shape == () or self.is_statistic


class ModelSignature(NamedTuple):
    """The names, shapes and dtypes of the tensors of a state dict, and the names of tied parameters.

    If two state dicts have equal signatures, their parameters have the same order in a vector of all parameters (the
    same layout).

    Attributes:
        names: the names of the tensors, in the order of the state dict.
        shapes: the shapes of the tensors.
        dtypes: the dtypes of the tensors.
        tied: a pair of names for each floating-point tensor that shares its memory with an earlier tensor: the name of
            the tensor, and the name of the earlier tensor.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    tied: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Layout:
    """The layout of a model: its parameters in the order in which a point contains them, and its buffers.

    A point is one vector that contains all parameters. The layout converts models to points and back without loss. Two
    layouts are equal if they have the same names, shapes and dtypes in the same order.

    Args:
        leaves: the parameters that form the point, in the order of the point.
        buffers: frozen parameters, buffers and counters, which belong to a model but are not part of the point.
        aliases: a pair (name, leaf) for each additional name of a tied parameter.
        dtype: the dtype of the point: float32, or float64 if a leaf requires it.
    """

    leaves: tuple[Entry, ...]
    buffers: tuple[Entry, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, MASTER_DTYPES)
        for leaf in self.leaves:
            if not leaf.dtype.is_floating_point:
                raise StateDictError(f"{leaf.name}: expected a floating parameter, got {leaf.dtype}")
            if leaf.dtype.itemsize > self.dtype.itemsize:
                raise StateDictError(
                    f"{leaf.name}: expected at most float32, got {leaf.dtype}; use dtype=torch.float64 for the point"
                )

    def __repr__(self) -> str:
        return format_result(
            self, size=self.size, leaves=len(self.leaves), buffers=len(self.buffers), aliases=len(self.aliases)
        )

    @staticmethod
    def of(model: nn.Module, dtype: torch.dtype | None = None) -> "Layout":
        """Return the layout of a module. Its leaves are the parameters that require a gradient."""
        if not isinstance(model, nn.Module):
            raise ArgumentError(f"model: expected a torch.nn.Module, got {type(model).__name__}; use of_state_dict")
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        owner = {id(p): name for name, p in trainable.items()}
        tensors = tensors_of(model)
        entries = [Entry(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
        layout = _classify_entries(entries, {name: owner.get(id(tensor)) for name, tensor in tensors.items()}, dtype)
        # A state dict hook can replace a parameter by another tensor. Updates of the parameter would then be lost.
        mismatched = trainable.keys() ^ {leaf.name for leaf in layout.leaves}
        if mismatched:
            raise StateDictError(
                f"{_join_names(mismatched)}: expected the parameter itself in the state dict, got another tensor"
            )
        return layout

    @staticmethod
    def of_state_dict(
        state: Mapping[str, Tensor], buffer_patterns: Sequence[str] = (), dtype: torch.dtype | None = None
    ) -> "Layout":
        """Return the layout of a state dict, which lists its parameters in order, and its buffers.

        All floating-point tensors are parameters, except batch statistics and tensors whose names match one of
        `buffer_patterns`. All other tensors are buffers.

        Args:
            state: the state dict.
            buffer_patterns: glob patterns of floating tensors that are buffers.
            dtype: the dtype of the point; `None` selects the narrower dtype that represents every leaf exactly.
        """
        if dtype is not None:
            check_choice("dtype", dtype, MASTER_DTYPES)
        return layout_of(signature_of(state), tuple(buffer_patterns), dtype)

    @cached_property
    def size(self) -> int:
        """The number P of entries of a point."""
        return sum(self.sizes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The lengths of the leaves in a point."""
        return tuple(leaf.size for leaf in self.leaves)

    @cached_property
    def _list_attributes(self) -> dict[str, Any]:
        """The attributes that the `TensorList`s of all models with this layout have in common."""
        return {"lengths": self.sizes, "size": self.size, "dtypes": frozenset([leaf.dtype for leaf in self.leaves])}

    @cached_property
    def entries(self) -> Mapping[str, Entry]:
        """The entries of a state dict by name, including tied names."""
        named = {entry.name: entry for entry in self.leaves + self.buffers}
        return named | {alias: named[name] for alias, name in self.aliases}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Layouts are keys of caches. Hashing hundreds of entries at each lookup would be slow.
        return hash((self.leaves, self.buffers, self.aliases, self.dtype))

    @cached_property
    def _expected(self) -> tuple[list[str], list[torch.Size], list[torch.dtype]]:
        """The names, shapes and dtypes of all entries, as lists that are compared with a state dict."""
        named = self.entries
        shapes = [torch.Size(entry.shape) for entry in named.values()]
        return [*named], shapes, [entry.dtype for entry in named.values()]

    def check_parameters(self, name: str, module: object = None) -> None:
        """Check that the layout has parameters.

        Args:
            name: the name of the argument in error messages.
            module: the model, for error messages. Any value other than a module is ignored.

        Raises:
            ArgumentError: if there are no parameters. The message contains the dtype of the first buffer, or says that
                all parameters of the module are frozen.
        """
        if self.size == 0:
            own = [*module.parameters()] if isinstance(module, nn.Module) else []
            if own and not any(parameter.requires_grad for parameter in own):
                raise ArgumentError(
                    f"{name}: expected trainable parameters, got a module whose parameters are all frozen "
                    "(requires_grad=False)"
                )
            first = next((f"; {entry.name} is {entry.dtype}" for entry in self.buffers), "")
            raise ArgumentError(f"{name}: expected floating parameters, got none{first}")

    def check(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Check that a state dict has the names, shapes and dtypes of the layout, and that its tied tensors are equal.

        Raises:
            StateDictError: if a tensor is missing, superfluous or untied, or has another shape or dtype. The message
                starts with `prefix` and contains the first names.
        """
        self.check_entries(tensors, prefix)
        self._check_tied(tensors, prefix)

    def _check_tied(self, tensors: Mapping[str, Tensor], prefix: str) -> None:
        """Check that the tensors under all names of a tied parameter are equal."""
        for alias, name in self.aliases:
            other = tensors[alias]
            own = tensors[name]
            if not _are_equal(other, own):
                if not is_finite(other):
                    raise StateDictError(f"{prefix}{alias}: expected finite values, got NaN or infinity")
                raise StateDictError(
                    f"{prefix}{alias}: expected the values of {name}, to which it is tied, got different values"
                )

    def check_entries(self, tensors: Mapping[str, Tensor], prefix: str = "") -> None:
        """Check that a state dict has the names, shapes and dtypes of the layout, without reading its values.

        The check also detects parameters whose memory was freed by sharded training, such as FSDP.

        Raises:
            StateDictError: as in `check`.
        """
        self._in_order(tensors, prefix)
        check_memory(tensors, prefix)

    def _in_order(self, tensors: Mapping[str, Tensor], prefix: str) -> tuple[list[Tensor], bool]:
        """Check that a state dict matches the layout, and return its tensors in the order of the layout.

        Returns:
            The tensors, and whether all of them are on the CPU.
        """
        names, shapes, dtypes = self._expected
        given = [*tensors.values()] if [*tensors] == names else [tensors[name] for name in names if name in tensors]
        # These comparisons of whole lists are much faster than `check_tensors`, which only runs to find the first
        # error.
        is_on_cpu = all(map(_is_cpu, given))
        if (
            len(given) < max(len(names), len(tensors))
            or [*map(_shape, given)] != shapes
            or [*map(_dtype, given)] != dtypes
            or {*map(_layout, given)} != STRIDED
            or not (is_on_cpu or {*map(_storage, given)} == {DENSE_STORAGE})
        ):
            check_tensors(self.entries, tensors, prefix)
        return given, is_on_cpu

    def check_buffers(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that the names, shapes and dtypes of `tensors` match the buffers.

        Raises:
            StateDictError: as in `check`.
        """
        check_tensors({entry.name: entry for entry in self.buffers}, tensors)
        check_memory(tensors, "")

    def with_tied_names(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state dict in which each tied parameter has all its names, if it has one of them.

        Example:
            >>> layout = Layout((Entry("a", (), torch.float32),), aliases=(("b", "a"),))
            >>> [*layout.with_tied_names({"b": torch.ones(())})]
            ['b', 'a']
        """
        named = {**tensors}
        for alias, name in self.aliases:
            if alias in named:
                named.setdefault(name, named[alias])
        return named | {alias: named[name] for alias, name in self.aliases if name in named and alias not in named}

    def read_points(
        self, models: Mapping[str, Mapping[str, Tensor]], device: torch.device | None = None
    ) -> list[Tensor]:
        """Return the points (P,) of several models.

        Args:
            models: a mapping from labels to models. Error messages start with the label.
            device: the device of the points; `None` selects the device of the first leaf.

        Raises:
            StateDictError: as in `check`, or if a leaf is not finite.
        """
        points = []
        for label, tensors in models.items():
            self.check(tensors, label)
            first = tensors[self.leaves[0].name].device if self.leaves else torch.device("cpu")
            point = in_huge_pages(torch.empty(self.size, dtype=self.dtype, device=device or first))
            with torch.no_grad():
                # The copy converts bf16 and fp16 to float32, which represents their values exactly.
                for leaf, place in zip(self.leaves, point.split(self.sizes), strict=True):
                    place.copy_(tensors[leaf.name].detach().reshape(-1))
            points.append(point)
        # One check of the points is fast. The slower check of all leaves only runs to name the invalid leaf.
        if not is_finite(*points):
            self.check_values(models)
        return points

    def tensor_lists(
        self, models: Mapping[str, Mapping[str, Tensor]], *, reference: str | None = None
    ) -> list[TensorList]:
        """Return the leaves of several models on the device of the first model.

        Args:
            models: a mapping from labels to models. Error messages start with the label.
            reference: the label of the model from which this layout was created. Its names, shapes and dtypes are
                not checked again.

        Raises:
            StateDictError: as in `check`.
        """
        rows: list[TensorList] = []
        for label, tensors in models.items():
            device = rows[0].device if rows else None
            rows.append(self._tensor_list(tensors, label, device, is_reference=label == reference))
        return rows

    def _tensor_list(
        self, tensors: Mapping[str, Tensor], prefix: str, device: torch.device | None, *, is_reference: bool
    ) -> TensorList:
        """Check a state dict, and return its parameters as an operand of the kernels.

        Args:
            tensors: the state dict.
            prefix: the start of error messages.
            device: the device of the result, or `None` for the device of the first parameter.
            is_reference: whether this layout was created from `tensors`, so that its names, shapes and dtypes are not
                checked.
        """
        entries = [tensors[name] for name in self._expected[0] if name in tensors]
        every = TensorList(entries)
        form = every.form
        if form and device in (None, CPU) and not self.aliases and len(entries) == len(tensors):
            # Equal forms mean equal shapes and dtypes, so one comparison of bytes replaces the checks of all tensors.
            if form != self.__dict__.get("_form"):
                if not is_reference:
                    self._in_order(tensors, prefix)
                self.__dict__["_form"] = form  # every model that passes the checks has this form
            return TensorList(entries[: len(self.leaves)]) if self.buffers else every
        if is_reference:
            is_on_cpu = all(map(_is_cpu, entries))
        else:
            entries, is_on_cpu = self._in_order(tensors, prefix)
        try:
            addresses = tuple(map(Tensor.data_ptr, entries))
        except RuntimeError:  # Tensors inside functorch transforms have no addresses.
            addresses = ()
        if 0 in addresses:
            check_memory(tensors, prefix)
        if self.aliases:
            self._check_tied(tensors, prefix)
        row = TensorList(entries[: len(self.leaves)])
        devices = CPU_ONLY if is_on_cpu else frozenset(map(_device, row))
        device = device or row[0].device
        if devices != {device}:
            row = TensorList([tensor.to(device) for tensor in row])
            row.__dict__.update(self._list_attributes, device=device, devices=frozenset({device}))
            return row
        contiguous = all(map(Tensor.is_contiguous, row))
        row.__dict__.update(self._list_attributes, device=device, devices=devices, is_contiguous=contiguous)
        # The check for freed memory has already read the addresses, so the kernels need not read them again.
        if addresses:
            row.__dict__["addresses"] = addresses[: len(row)]
        return row

    def check_values(
        self,
        models: Mapping[str, Mapping[str, Tensor]],
        mask_hint: str = "pass buffer_policy={{{name!r}: 'leave'}} to Server.of or ParameterSpace.of_state_dict",
    ) -> None:
        """Check that all parameters of several models are finite.

        Args:
            models: a mapping from labels to models. Error messages start with the label.
            mask_hint: how to treat a mask with the name `name`, which contains negative infinity and is not trained.

        Raises:
            StateDictError: if a leaf is not finite. The message contains its name.
        """
        for label, tensors in models.items():
            for leaf in self.leaves:
                if not is_finite(tensor := tensors[leaf.name]):
                    values = tensor.double()  # float8 dtypes lack these tests
                    is_mask = bool(values.isneginf().any()) and not values.isnan().any()
                    hint = f"; for a mask, {mask_hint.format(name=leaf.name)}" if is_mask else ""
                    raise StateDictError(f"{label}{leaf.name}: expected finite values, got NaN or infinity{hint}")

    def to_state_dict(self, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the state dict of given leaves and buffers. Tied names share one tensor."""
        leaves = {leaf.name: tensor for leaf, tensor in zip(self.leaves, tensors, strict=True)}
        leaves |= {alias: leaves[name] for alias, name in self.aliases}
        return leaves | {**buffers}

    def views(self, point: Tensor) -> dict[str, Tensor]:
        """Split the vector `point` into the parameters of the model, with their names, shapes and dtypes.

        A tied parameter is returned under all of its names. Parameters with the dtype of `point` are views of `point`.
        Parameters with other dtypes are copies.
        """
        # `to` returns the view itself if the dtype is the same.
        pieces = point.split(self.sizes)
        views = {
            leaf.name: piece.view(leaf.shape).to(leaf.dtype) for leaf, piece in zip(self.leaves, pieces, strict=True)
        }
        return views | {alias: views[name] for alias, name in self.aliases}


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a name matches one of several case-sensitive glob patterns.

    Example:
        >>> matches_any("1.running_mean", ["*running*"])
        True
    """
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def tensors_of(source: nn.Module | Mapping[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a module or of a state dict by name, without copies.

    Raises:
        StateDictError: if the name of an entry is not a string, or an entry is not a dense tensor with storage. The
            message starts with `prefix`.
        ArgumentError: if `source` is neither a module nor a mapping.
    """
    if isinstance(source, nn.Module):
        # `keep_vars` returns the parameters themselves, which `Layout.of` compares by identity.
        entries = source.state_dict(keep_vars=True)
    elif isinstance(source, Mapping):
        entries = dict(source)
    else:
        raise ArgumentError(f"source: expected a torch.nn.Module or a state dict, got {type(source).__name__}")
    # Tests of sets of types and one search in the joined names are fast enough to run in every round.
    usual = set(map(type, entries.values())) <= {Tensor, nn.Parameter} and set(map(type, entries)) <= {str}
    if usual and EXTRA_STATE not in "".join(entries) and _are_dense(entries.values()):
        return entries  # for hundreds of tensors, the loop below would take longer than a step of a server
    tensors = {}
    for name, tensor in entries.items():
        if not isinstance(name, str):
            raise StateDictError(f"source: expected strings as names, got {short_repr(name)}")
        if name.rpartition(".")[2] == EXTRA_STATE:
            continue
        if not isinstance(tensor, Tensor):
            raise StateDictError(f"{prefix}{name}: expected a torch.Tensor, got {type(tensor).__name__}")
        if nn.parameter.is_lazy(tensor):
            raise StateDictError(
                f"{prefix}{name}: expected an initialised parameter, got a lazy one; run the model once"
            )
        if tensor.is_meta or tensor.layout is not torch.strided:
            given = "on the meta device" if tensor.is_meta else f"with the layout {tensor.layout}"
            raise StateDictError(f"{prefix}{name}: expected a dense tensor with values, got a tensor {given}")
        tensors[name] = tensor
    return tensors


def check_names(expected: Set[str], given: Set[str], prefix: str = "") -> None:
    """Check that the given names are exactly the expected names.

    Raises:
        StateDictError: if a name is missing or superfluous. The message starts with `prefix` and contains the first
            names.
    """
    for problem, names in (("missing", expected - given), ("extra", given - expected)):
        if names:
            raise StateDictError(f"{prefix}{problem}: {_join_names(names)}{wrapper_hint(given, expected)}")


def check_tensors(entries: Mapping[str, Entry], tensors: Mapping[str, Tensor], prefix: str = "") -> None:
    """Check that tensors have the expected names, shapes and dtypes, and that they are dense.

    Args:
        entries: the expected name, shape and dtype of each tensor, by name.
        tensors: the tensors by name.
        prefix: the start of error messages.

    Raises:
        StateDictError: as in `Layout.check`.
    """
    check_names(entries.keys(), tensors.keys(), prefix)
    for name, entry in entries.items():
        given = tensors[name]
        if tuple(given.shape) != entry.shape:
            raise StateDictError(f"{prefix}{name}: expected shape {entry.shape}, got {tuple(given.shape)}")
        if given.dtype != entry.dtype:
            raise StateDictError(f"{prefix}{name}: expected {entry.dtype}, got {given.dtype}")
        if _storage(given) != DENSE_STORAGE:
            what = "on the meta device" if given.is_meta else f"with the layout {given.layout}"
            raise StateDictError(f"{prefix}{name}: expected a dense tensor with values, got a tensor {what}")


def _are_dense(tensors: Collection[Tensor]) -> bool:
    # A tensor on the CPU is not on the meta device, so the second property is read only for other devices.
    """Return whether all tensors are strided and have storage."""
    dense = set(map(_layout, tensors)) <= {torch.strided}
    return dense and (all(map(_is_cpu, tensors)) or set(map(_storage, tensors)) <= {DENSE_STORAGE})


def _are_equal(x: Tensor, y: Tensor) -> bool:
    # Tied tensors usually share their memory, so their values need not be compared.
    """Return whether two tensors of equal dtype and shape have equal values."""
    if x is y or (x.data_ptr() == y.data_ptr() and x.stride() == y.stride() and x.device == y.device):
        return True
    if x.dtype.itemsize == 1:  # `torch.equal` does not support the float8 dtypes
        return torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    return torch.equal(x, y)


def check_memory(tensors: Mapping[str, Tensor], prefix: str) -> None:
    """Check that the memory of each tensor is allocated.

    Sharded training can free the memory of a parameter while the parameter still exists. Reading this parameter would
    crash the process.

    Raises:
        StateDictError: if the memory of a tensor was freed. The message contains its name.
    """
    try:
        if 0 not in [*map(Tensor.data_ptr, tensors.values())]:
            return
    except RuntimeError:  # tensors inside functorch transforms have no addresses
        return
    for name, tensor in tensors.items():
        # Empty tensors and lazily allocated zero tensors (ZeroTensor) also have a null data pointer.
        if tensor.numel() and not tensor.data_ptr() and not torch._is_zerotensor(tensor):
            raise StateDictError(f"{prefix}{name}: expected a tensor with memory, got one whose memory was freed")


def signature_of(state: Mapping[str, Tensor], prefix: str = "") -> ModelSignature:
    """Return the signature of a state dict.

    Raises:
        StateDictError: as in `tensors_of`.
    """
    tensors = tensors_of(state, prefix)
    values = tensors.values()
    addresses = [*map(Tensor.data_ptr, values)]
    # Distinct addresses prove that no tensors are tied.
    tied = () if len(set(addresses)) == len(addresses) else _find_tied(tensors)
    return ModelSignature(tuple(tensors), tuple(map(_shape, values)), tuple(map(_dtype, values)), tied)


def _find_tied(tensors: Mapping[str, Tensor]) -> tuple[tuple[str, str], ...]:
    """Find the floating-point tensors that share the memory of an earlier tensor of a model.

    Returns:
        The pairs (name, first name), where the first name is the name of the earlier tensor.
    """
    # Tensors are tied if they agree in address, dtype, shape and strides. Other views of the same storage are not.
    first: dict[tuple[object, ...], str] = {}
    tied = []
    for name, tensor in tensors.items():
        # Empty and unallocated tensors all have the address 0, which does not make them tied.
        if tensor.dtype.is_floating_point and tensor.numel() and tensor.data_ptr():
            memory = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device))
            if (owner := first.setdefault(memory, name)) != name:
                tied.append((name, owner))
    return tuple(tied)


# The result is cached, because a caller that aggregates state dicts passes the same signature in every round.
@lru_cache(maxsize=64)
def layout_of(
    signature: ModelSignature, buffer_patterns: tuple[str, ...] = (), dtype: torch.dtype | None = None
) -> Layout:
    """Return the layout of all state dicts with the given signature: the order of the parameters, and the buffers.

    The signature contains the names, shapes and dtypes of the tensors, and the names of tied parameters. The arguments
    `buffer_patterns` and `dtype` have the same meaning as in `Layout.of_state_dict`.
    """
    names, shapes, dtypes, tied = signature
    entries = [Entry(name, tuple(shape), kind) for name, shape, kind in zip(names, shapes, dtypes, strict=True)]
    owners: dict[str, str | None] = {}
    first: dict[str, str] = {}
    for entry in entries:
        is_buffer = not entry.dtype.is_floating_point or entry.is_statistic
        is_buffer = is_buffer or matches_any(entry.name, buffer_patterns)
        tied_to = dict(tied).get(entry.name, entry.name)
        # The leaf is the first of several tied tensors that is not a buffer. Earlier tensors may match a pattern.
        owners[entry.name] = None if is_buffer else first.setdefault(tied_to, entry.name)
    return _classify_entries(entries, owners, dtype)


def _classify_entries(entries: Sequence[Entry], owners: Mapping[str, str | None], dtype: torch.dtype | None) -> Layout:
    """Build the layout of a model from its tensors and their roles (parameter, tied parameter or buffer).

    Args:
        entries: the name, shape and dtype of each tensor.
        owners: the name under which a point contains each tensor. For a tied parameter, this is the first of its names.
            For a buffer, it is `None`.
        dtype: the dtype of points, or `None` for the narrower dtype that represents every parameter exactly.
    """
    leaves = []
    buffers = []
    aliases = []
    for entry in entries:
        owner = owners[entry.name]
        if owner is None:
            buffers.append(entry)
        elif owner == entry.name:
            leaves.append(entry)
        else:
            aliases.append((entry.name, owner))
    if dtype is None:
        # float32 represents every value of bf16 and fp16 exactly.
        dtype = torch.float64 if any(leaf.dtype is torch.float64 for leaf in leaves) else torch.float32
    return Layout(tuple(leaves), tuple(buffers), tuple(aliases), dtype)


def _join_names(names: Iterable[str], max_names: int = 3) -> str:
    """Join the first names in alphabetical order, and state how many other names there are."""
    ordered = sorted(map(str, names))
    rest = f" and {len(ordered) - max_names} more" if len(ordered) > max_names else ""
    return ", ".join(ordered[:max_names]) + rest
