"""All-gather of numbers in a process group, without a deadlock if one rank fails.

Each rank contributes an array of numbers. If a rank raised an exception and sent nothing, the other ranks would wait
for it forever. Every rank therefore sends a first message of fixed length, even if it rejects its arguments. The
message contains three things:

- whether the rank accepts its arguments;
- the properties of the call that must be equal on all ranks, such as the operation;
- the first numbers of the array.

From these messages, all ranks detect failures and differing calls. If the array does not fit into the first message, a
second message contains the rest.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from manifoldagg.errors import ArgumentError

__all__ = ["Ranks"]

PACKET_SIZE = 1 << 10
"""The length of the first message, as a number of float64 values: 8 KiB."""

PACKET_HEADER = ("accepted", "position", "rank")
"""The first values of each packet: whether the rank accepts its arguments, its position, and its global rank."""


@dataclass(frozen=True)
class Ranks:
    """The ranks that exchange numbers, and the position of the current rank among them.

    Attributes:
        groups: the process groups in which an all-gather is executed, in this order. For a device mesh, there is one
            group for each dimension, from the last to the first. Each all-gather sends the result of the previous one,
            so every rank finally has the numbers of all ranks in the mesh.
        position: the index of the current rank, in row-major order on a mesh.
        device: the device to which the numbers are copied if a process group, such as NCCL, cannot send CPU tensors.
    """

    groups: tuple["dist.ProcessGroup | None", ...]
    position: int
    device: torch.device

    @staticmethod
    def of_group(group: "dist.ProcessGroup | None", device: torch.device) -> "Ranks":
        """Return the ranks of a process group. `None` selects the default group."""
        return Ranks((group,), dist.get_rank(group), device)

    @staticmethod
    def of_mesh(mesh: Any, device: torch.device) -> "Ranks":
        """Return the ranks of a `DeviceMesh`.

        Raises:
            ArgumentError: if this rank is not in the mesh.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ArgumentError(f"rows: expected a mesh with rank {dist.get_rank()} in it, got {mesh}")
        groups = tuple(mesh.get_group(d) for d in reversed(range(mesh.ndim)))
        return Ranks(groups, int(np.ravel_multi_index(coordinate, mesh.shape)), device)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Return a context manager that reports an exception on this rank to the other ranks.

        After the context, every rank must call `all_gather_checked`, which waits for all ranks. If an exception occurs
        in the context, this rank sends an error report in place of the call. The other ranks then raise an error
        instead of waiting forever.
        """
        try:
            yield
        except Exception:
            # The other ranks wait for the first packet. A packet that starts with 0 reports the failure.
            self._gather(_make_packet([0, self.position, dist.get_rank()]))
            raise

    def all_gather_checked(self, invariants: Mapping[str, int], numbers: np.ndarray) -> np.ndarray:
        """Gather the numbers of all ranks, in the order of the positions of the ranks.

        Args:
            invariants: values that must be equal on every rank: at most `PACKET_SIZE - 3` small integers by name.
            numbers: float64 numbers. The invariants must determine their shape.

        Returns:
            (W, *shape): the numbers of the W ranks, unchanged.

        Raises:
            ArgumentError: on every rank, if the invariants differ between ranks, or if a rank raised an exception
                within `propagate_errors`.
        """
        # Packets contain float64 values only. Float64 represents integers up to 2^53 exactly, so the invariants arrive
        # unchanged.
        head = [1, self.position, dist.get_rank(), *invariants.values()]
        flat = numbers.reshape(-1)
        packets = self._gather(_make_packet([*head, *flat[: PACKET_SIZE - len(head)]]))
        # On a mesh, the packets arrive in the order of the process groups. Sorting by position restores row-major
        # order.
        order = np.argsort(packets[:, 1])
        rest = flat[PACKET_SIZE - len(head) :]
        _check_agreement(packets[order], tuple(invariants))
        parts = [packets[order, len(head) : len(head) + flat.size]]
        if rest.size:
            # The second message starts with the position, so that it can be sorted in the same way.
            more = self._gather(np.array([self.position, *rest])[None])
            parts.append(more[np.argsort(more[:, 0]), 1:])
        return np.concatenate(parts, axis=1).reshape(len(packets), *numbers.shape)

    def _gather(self, parts: np.ndarray) -> np.ndarray:
        # On a mesh, each gather exchanges everything that the previous gathers returned, so the last result contains
        # the packets of all ranks.
        """Gather arrays of equal shapes from all ranks, and concatenate them along the first axis."""
        for group in self.groups:
            # A group without CPU support, such as NCCL, exchanges device tensors.
            on_host = "cpu:" in dist.distributed_c10d.get_backend_config(group)
            local = torch.from_numpy(parts).to("cpu" if on_host else self.device)
            gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, local, group=group)
            parts = torch.cat(gathered).cpu().numpy()
        return parts


def _make_packet(numbers: list[float]) -> np.ndarray:
    """Pad a list of numbers with zeros to a packet of shape (1, `PACKET_SIZE`).

    An all-gather requires packets of equal length on all ranks.
    """
    packet = np.zeros((1, PACKET_SIZE))
    packet[0, : len(numbers)] = numbers
    return packet


def _check_agreement(packets: np.ndarray, names: tuple[str, ...]) -> None:
    # The packet of a rank that failed has zeros in place of the invariants. Failures are therefore reported before any
    # comparison of the invariants.
    """Check that no rank reported a failure and that all ranks made the same call.

    Args:
        packets: (W, `PACKET_SIZE`), the first messages of the W ranks.
        names: the names of the values that follow the header of a message. They must be equal on all ranks.

    Raises:
        ArgumentError: if a rank reported a failure, or if one of these values differs between ranks.
    """
    accepted = packets[:, 0]
    ranks = packets[:, 2].astype(int).tolist()
    failed = [rank for rank, ok in zip(ranks, accepted, strict=True) if not ok]
    if failed:
        raise ArgumentError(
            f"ranks: expected valid arguments on every rank, got errors on {failed}; see the messages of these ranks"
        )
    for column, name in enumerate(names, len(PACKET_HEADER)):
        given = packets[:, column].astype(int).tolist()
        if len(set(given)) > 1:
            listed = dict(zip(ranks, given, strict=True))
            raise ArgumentError(f"ranks: expected the same {name} on every rank, got {listed}")
