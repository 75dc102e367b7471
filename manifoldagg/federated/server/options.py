"""Options of a server: the initial model, the limits and the memory policy."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from manifoldagg._validation import KeywordHints, check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.limits import DEFAULT_LIMITS, UpdateLimits
from manifoldagg.manifolds.buffer_policies import BufferPolicy

__all__ = ["InitialModel", "MemoryPolicy", "ServerLimits", "check_option"]

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
        if self.max_in_flight is not None:
            check_count("max_in_flight", self.max_in_flight)
        if self.max_queued_updates is not None:
            check_count("max_queued_updates", self.max_queued_updates, at_least=0)
        if self.timeout is not None:
            check_number("timeout", self.timeout, above=0)
        check_count("receipt_cache_size", self.receipt_cache_size, at_least=0)
        if self.history_size is not None:
            check_count("history_size", self.history_size, at_least=0)

    @classmethod
    def of(cls, limits: "ServerLimits | UpdateLimits") -> "ServerLimits":
        """Convert an `UpdateLimits` to a `ServerLimits`, in which all other limits have their default values.

        A `ServerLimits` is returned unchanged. Values of other types raise `ArgumentError`.
        """
        if isinstance(limits, UpdateLimits):
            return cls(limits)
        return check_option("limits", limits, ServerLimits)

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


def check_option(name: str, value: Any, kind: type[T]) -> T:
    """Return `value` if it is an instance of `kind`. Otherwise, raise `ArgumentError`."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name}: expected {kind.__name__}, got {short_repr(value)}")
    return value
