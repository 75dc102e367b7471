"""Options of a server and of an update: the initial model, the limits, the memory policy and the update information."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from manifoldagg._validation import KeywordHints, check_choice, check_count, check_number, short_repr, warn_caller
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.limits import DEFAULT_LIMITS, UpdateLimits
from manifoldagg.federated.weights import check_client
from manifoldagg.manifolds.buffer_policies import BufferPolicy
from manifoldagg.manifolds.lora.scaling import Scaling

__all__ = ["InitialModel", "MemoryPolicy", "ServerLimits", "UpdateInfo", "check_option"]

T = TypeVar("T")


@dataclass(frozen=True)
class InitialModel(KeywordHints):
    r"""Initial model of a server with buffers, such as the running means of batch normalisation.

    Args:
        point: the parameters $\Theta^0$ as a vector (P,), where P is the number of parameters.
        buffers: the initial buffers by name, as `ParameterSpace.buffers` returns them. `None` means that the server has
            no buffers. Clients return all buffers except those with the policy `"leave"`.
        buffer_policy: a mapping from buffer names or glob patterns to policies. If you pass a sequence of names or
            patterns instead, these buffers have the policy `"average"`. The policies are:

            - `"average"`: the buffer moves towards the mean of the clients' buffers, by the same fraction as the model.
              This is the default for floating-point buffers.
            - `"latest"`: the client's buffer replaces the server's buffer. This is the default for counters of batches.
            - `"leave"`: the buffer does not change. This is the default for other integers and for booleans.

    Example:
        >>> InitialModel(torch.zeros(2), {"running_mean": torch.zeros(1)}, {"running_*": "latest"}).buffer_policy
        {'running_*': 'latest'}
    """

    point: Tensor
    buffers: Mapping[str, Tensor] | None = None
    buffer_policy: BufferPolicy = ()


@dataclass(frozen=True)
class ServerLimits(KeywordHints):
    """Limits of a server: for each update, for the number of tickets, and for the number of stored records.

    A ticket permits a client to return one update. A limit that is `None` is disabled.

    Args:
        update: the limits that each update must satisfy.
        max_in_flight: the largest number of tickets in flight. If this number is reached, `dispatch` raises
            `BusyError`.
        max_queued_updates: the largest number of updates that may wait for the running update. The server rejects
            further updates with the reason that it is busy. This limit does not count an update while its payload is
            unpacked, so the host must limit the number of concurrent calls itself.
        timeout: the time in seconds after which a ticket without an update expires.
        receipt_cache_size: the number of receipts of closed tickets that the server stores to answer repeated requests.
        history_size: the number of latest rows that `Server.history` contains.

    Raises:
        ArgumentError: if a limit is out of range. The message starts with the name of the limit.

    Example:
        >>> ServerLimits(UpdateLimits(max_staleness=8), timeout=600.0).update.max_staleness
        8
    """

    update: UpdateLimits = DEFAULT_LIMITS
    max_in_flight: int | None = None
    max_queued_updates: int | None = None
    timeout: float | None = None
    receipt_cache_size: int = 10_000
    history_size: int | None = 10_000

    def __post_init__(self) -> None:
        check_option("update", self.update, UpdateLimits)
        for name, at_least in (("max_in_flight", 1), ("max_queued_updates", 0), ("history_size", 0)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), at_least=at_least)
        if self.timeout is not None:
            check_number("timeout", self.timeout, above=0)
        check_count("receipt_cache_size", self.receipt_cache_size, at_least=0)

    @classmethod
    def of(cls, limits: "ServerLimits | UpdateLimits") -> "ServerLimits":
        """Convert an `UpdateLimits` to a `ServerLimits`, in which all other limits have their default values.

        A `ServerLimits` is returned unchanged. Values of other types raise `ArgumentError`.
        """
        if isinstance(limits, UpdateLimits):
            return cls(limits)
        given: object = limits
        if not isinstance(given, ServerLimits):
            hint = "to combine them, write ServerLimits(update=UpdateLimits(...))"
            raise ArgumentError(f"limits: expected ServerLimits or UpdateLimits, got {short_repr(given)}; {hint}")
        return given

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "ServerLimits":
        """Restore limits from the plain values that `dataclasses.asdict` returns."""
        return cls(**{**tree, "update": UpdateLimits(**tree["update"])})


@dataclass(frozen=True)
class MemoryPolicy(KeywordHints):
    """Policy for the memory of older versions and client states of a server.

    Args:
        limit: the largest memory usage of older versions and client states in bytes. If they need more memory, the
            server moves the oldest ones to unlinked temporary files and releases their memory to the system. The files
            disappear when the process ends. `None` disables the limit.
        spill: the folder of the temporary files. `None` means the system's temporary folder.
        base_dtype: a narrower dtype for the models from which clients start, such as `torch.bfloat16`. It requires a
            flat or a low-rank space. The server sends and stores the rounded model, and it computes the drift from the
            rounded model. Because of the rounding, the drift is rarely zero, even if the staleness is zero. The server
            does not round a model that would overflow.

    Raises:
        ArgumentError: if an argument is invalid. The message starts with the name of the argument.

    Example:
        >>> MemoryPolicy(limit=2**30, base_dtype=torch.bfloat16).limit
        1073741824
    """

    limit: int | None = None
    spill: str | Path | None = None
    base_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            check_count("limit", self.limit, at_least=0)
        if self.spill is not None and not (isinstance(self.spill, str | Path) and Path(self.spill).is_dir()):
            raise ArgumentError(f"spill: expected an existing folder, got {short_repr(self.spill)}")
        if self.base_dtype is not None and not isinstance(self.base_dtype, torch.dtype):
            raise ArgumentError(f"base_dtype: expected a torch.dtype, got {short_repr(self.base_dtype)}")

    def tree(self) -> dict[str, Any]:
        """Return the memory policy as a dictionary for a checkpoint. The method `of_tree` restores the policy from it.

        The folder of the temporary files is omitted, because it depends on the machine.
        """
        dtype = None if self.base_dtype is None else str(self.base_dtype).removeprefix("torch.")
        return {"limit": self.limit, "base_dtype": dtype}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "MemoryPolicy":
        """Restore a policy from the plain values that `tree` returns."""
        dtype = tree["base_dtype"]
        return cls(tree["limit"], None, None if dtype is None else getattr(torch, dtype))


@dataclass(frozen=True)
class UpdateInfo(KeywordHints):
    r"""Information about a client's update for [`aggregate`][manifoldagg.aggregate], such as its weight.

    Args:
        client: the name of the client. Rules with client states need it.
        staleness: the staleness $\tau - t$ of the update, where $\tau$ is the version of the current model and t is the
            version of the client's base.
        weight: the client's share $w_i$ of the training data, in (0, 1].
        samples: the number of samples that the client trained on.
        difference: whether the update is the difference $\varphi_i - \Theta^t$ of the client's model $\varphi_i$ and
            the base $\Theta^t$, instead of the model. Differences require a flat space without adapters.

            - `aggregate` adds the base and rounds each sum once to the dtype of the entry. If the client's subtraction
              was exact, the sum is bit-identical to the client's model, up to the sign of zeros.
            - Buffers are also differences, except for boolean buffers, which contain the client's values.
        scaling: the scaling of the client's adapters, if it differs from the scaling of the space. It may be a number,
            a mapping from patterns to numbers, or an adapter config, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
        share: the weight of the client before normalisation, as in [`Update`][manifoldagg.federated.Update].

    Raises:
        ArgumentError: if a field is invalid. The message starts with the name of the field.

    Warns:
        UserWarning: if `weight` is larger than 1.

    Example:
        >>> UpdateInfo(client="ward-7", staleness=2, weight=0.25, samples=30).staleness
        2
    """

    client: Hashable = None
    staleness: int = 0
    weight: float = 1.0
    samples: int = 1
    difference: bool = False
    scaling: Scaling | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        check_client(self.client)
        check_count("staleness", self.staleness, at_least=0)
        check_number("weight", self.weight, above=0)
        check_count("samples", self.samples)
        check_choice("difference", self.difference, (True, False))
        if self.share is not None:
            check_number("share", self.share, above=0)
        if self.weight > 1:
            how = "pass samples / total samples, and the sample count as samples="
            given = short_repr(self.weight)
            warn_caller(f"weight: expected the client's share of the data, at most 1, got {given}; {how}")


def check_option(name: str, value: Any, kind: type[T]) -> T:
    """Return `value` if it is an instance of `kind`. Otherwise, raise `ArgumentError`."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name}: expected {kind.__name__}, got {short_repr(value)}")
    return value
