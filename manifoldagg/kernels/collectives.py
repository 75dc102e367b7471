r"""Collective communication: exchange of numbers between ranks, without deadlock if a rank fails.

The first message has one length for every call: who sends it, what was called, and as many of the numbers as fit. So
ranks that disagree, and one that refuses its arguments, are noticed by all; what did not fit follows in a second
message when all are known to agree. Over a mesh of devices this is done once for each dimension of it.
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
"""The length of the first message, in float64 numbers."""

PACKET_HEADER = ("accepted", "position", "rank")


@dataclass(frozen=True)
class Ranks:
    """The communicating ranks, and the position of this rank among them.

    Attributes:
        groups: what is gathered over, one after another: the dimensions of a mesh, the last one first.
        position: the place of this rank, row by row in a mesh.
        device: where messages start if a group does not take those of the host.
    """

    groups: tuple["dist.ProcessGroup | None", ...]
    position: int
    device: torch.device

    @staticmethod
    def of_group(group: "dist.ProcessGroup | None", device: torch.device) -> "Ranks":
        """Return the ranks of a process group; `None` selects all of them."""
        return Ranks((group,), dist.get_rank(group), device)

    @staticmethod
    def of_mesh(mesh: Any, device: torch.device) -> "Ranks":
        """Return the ranks of a `DeviceMesh`.

        Raises:
            ArgumentError: if this rank is not in it.
        """
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            raise ArgumentError(f"rows: expected a mesh with rank {dist.get_rank()} in it, got {mesh}")
        groups = tuple(mesh.get_group(d) for d in reversed(range(mesh.ndim)))
        return Ranks(groups, int(np.ravel_multi_index(coordinate, mesh.shape)), device)

    @contextmanager
    def propagate_errors(self) -> Iterator[None]:
        """Propagate an exception in the block before an exchange to the other ranks."""
        try:
            yield
        except Exception:
            self._gather(_make_packet([0, self.position, dist.get_rank()]))
            raise

    def all_gather_checked(self, invariants: Mapping[str, int], numbers: np.ndarray) -> np.ndarray:
        """Gather the numbers of all ranks, in the order of their positions.

        Args:
            invariants: what must be the same on every rank, at most `PACKET_SIZE - 3` small integers by name.
            numbers: float64; their shape must follow from the invariants.

        Returns:
            (W, *shape): the numbers of the W ranks, bit for bit.

        Raises:
            ArgumentError: on every rank, if the invariants of the ranks differ, or if a rank failed within
                `propagate_errors`.
        """
        head = [1, self.position, dist.get_rank(), *invariants.values()]
        flat = numbers.reshape(-1)
        packets = self._gather(_make_packet([*head, *flat[: PACKET_SIZE - len(head)]]))
        order = np.argsort(packets[:, 1])
        rest = flat[PACKET_SIZE - len(head) :]
        _check_agreement(packets[order], tuple(invariants))
        parts = [packets[order, len(head) : len(head) + flat.size]]
        if rest.size:
            more = self._gather(np.array([self.position, *rest])[None])
            parts.append(more[np.argsort(more[:, 0]), 1:])
        return np.concatenate(parts, axis=1).reshape(len(packets), *numbers.shape)

    def _gather(self, parts: np.ndarray) -> np.ndarray:
        for group in self.groups:
            on_host = "cpu:" in dist.distributed_c10d.get_backend_config(group)
            own = torch.from_numpy(parts).to("cpu" if on_host else self.device)
            every = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, own, group=group)
            parts = torch.cat(every).cpu().numpy()
        return parts


def _make_packet(numbers: list[float]) -> np.ndarray:
    packet = np.zeros((1, PACKET_SIZE))
    packet[0, : len(numbers)] = numbers
    return packet


def _check_agreement(packets: np.ndarray, names: tuple[str, ...]) -> None:
    accepted = packets[:, 0]
    ranks = packets[:, 2].astype(int).tolist()
    refused = [rank for rank, well in zip(ranks, accepted, strict=True) if not well]
    if refused:
        raise ArgumentError(f"ranks: expected arguments that every rank can use; refused on {refused}, which say why")
    for column, name in enumerate(names, len(PACKET_HEADER)):
        given = packets[:, column].astype(int).tolist()
        if len(set(given)) > 1:
            listed = dict(zip(ranks, given, strict=True))
            raise ArgumentError(f"ranks: expected the same {name} on every rank, got {listed}")
