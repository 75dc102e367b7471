"""The options of a server: its initial model, its limits and its use of memory."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
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
    r"""Initial model of a server with buffers.

    Args:
        point: the parameters $\Theta^0$ (P,).
        buffers: the initial buffers, as from `space.buffers`. Clients then return their buffers, except those with the
            policy `"leave"`. `None` if the server has no buffers.
        buffer_policy: the policies of the buffers, by name or glob pattern: `"average"` (with the rule's step; the
            default), `"latest"` or `"leave"`. Integers and booleans stay the server's by default, but for counters.

    Example:
        >>> InitialModel(torch.zeros(2), {"running_mean": torch.zeros(1)}, "latest").buffer_policy
        'latest'
    """

    point: Tensor
    buffers: Mapping[str, Tensor] | None = None
    buffer_policy: BufferPolicy = ()

    @classmethod
    def of(cls, start: "Tensor | InitialModel") -> "InitialModel":
        """Return the initial model of a `start` argument; a tensor has no buffers."""
        return start if isinstance(start, InitialModel) else cls(start)


@dataclass(frozen=True)
class ServerLimits(KeywordHints):
    """Limits on the updates, tickets, queue and stored records of a server; `None` for no limit.

    Args:
        update: the limits that each update must satisfy.
        max_in_flight: the number of tickets in flight beyond which `dispatch` raises `BusyError`.
        max_queued_updates: the number of queued updates beyond which updates are rejected as busy. An update whose
            payload is still being unpacked is not counted; the host must bound the number of those.
        timeout: seconds after which a ticket without an update expires; see `Server.expire`.
        receipt_cache_size: the number of latest receipts that are stored for repeated requests.
        history_size: the number of latest rows that `Server.history` stores.

    Raises:
        ArgumentError: naming the limit that is out of range.

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
        """Return the limits of a `limits` argument; limits on updates have the other limits at their defaults.

        Raises:
            ArgumentError: if it is of another class.
        """
        if isinstance(limits, UpdateLimits):
            return cls(limits)
        return check_option("limits", limits, ServerLimits)

    def tree(self) -> dict[str, Any]:
        """Return the limits as plain values, for `of_tree`."""
        return asdict(self)

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "ServerLimits":
        """Return the limits of plain values."""
        return cls(**{**tree, "update": UpdateLimits(**tree["update"])})


@dataclass(frozen=True)
class MemoryPolicy(KeywordHints):
    """Memory for older versions and client states of a server.

    Args:
        limit: bytes of memory for older versions and client states. The oldest are evicted to unlinked
            temporary files, mapped, and freed with their last reference. The freed memory is released to the system.
        spill: the folder of the temporary files; `None` for the system's temporary folder.
        base_dtype: a narrower dtype for the stored start models. Clients start from the rounded model, and the drift is
            measured from it, so that it is never exactly zero. Flat and low-rank spaces only. A model that overflows is
            not rounded.

    Raises:
        ArgumentError: naming the argument that is invalid.

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
        """Return the policy as plain values, for `of_tree`. The folder belongs to the machine and is not stored."""
        dtype = None if self.base_dtype is None else str(self.base_dtype).removeprefix("torch.")
        return {"limit": self.limit, "base_dtype": dtype}

    @classmethod
    def of_tree(cls, tree: Mapping[str, Any]) -> "MemoryPolicy":
        """Return the policy of plain values."""
        dtype = tree["base_dtype"]
        return cls(tree["limit"], None, None if dtype is None else getattr(torch, dtype))


def check_option(name: str, value: Any, kind: type[T]) -> T:
    """Return a value of this class.

    Raises:
        ArgumentError: if it is of another class.
    """
    if not isinstance(value, kind):
        raise ArgumentError(f"{name}: expected {kind.__name__}, got {short_repr(value)}")
    return value
