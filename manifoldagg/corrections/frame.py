"""Frames, which contain the input of a correction: the displacements of an update and the drift.

A displacement is the change of a client's model during training. The drift is the change of the server's model since
the client started.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from manifoldagg._validation import check_finite, check_shape, is_finite, short_repr
from manifoldagg.corrections.combination import Combination, tensors_of
from manifoldagg.corrections.gram import Gram, Matrix
from manifoldagg.corrections.rows import GRANULARITIES, FrameRows, detach, overflow_headroom
from manifoldagg.corrections.transport import DEFAULT_RUNGS, Transporter
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row
from manifoldagg.manifolds import Manifold, check_tangent
from manifoldagg.manifolds.ambient import FLAT_AMBIENT, AmbientSpace
from manifoldagg.manifolds.manifold import check_is_manifold

__all__ = ["GRANULARITIES", "Frame", "detach", "overflow_headroom", "require_flat"]


@dataclass(frozen=True, eq=False, repr=False)
class Frame(FrameRows):
    r"""The displacements of an update and the drift of the server, as tangents at the current model $\Theta^\tau$.

    A frame is the input of a correction. It has k rows: the displacements $v_1, \dots, v_n$ of the update, the drift
    $g$ of the server, and any rows that the correction adds. The form of the rows depends on the space:

    - On a flat space, $v_i$ is a displacement from the base $\Theta^t$, and $g = \Theta^\tau - \Theta^t$. The rows are
      differences of stored tensors and are never materialised.
    - For a low-rank leaf, the rows are differences of the matrices that the factors represent. These rows are not
      materialised either.
    - On a curved space, each $v_i$ is transported to $\Theta^\tau$, and $g = -\log_{\Theta^\tau} \Theta^t$.

    Attributes:
        rows: the minuends, as vectors (P,) or as the tensors of models. Row i is `rows[i] - minus[i]`, or `rows[i]` if
            `minus[i]` is `None`.
        minus: the subtrahends, with one row or `None` for each entry of `rows`.
        segments: the names of the tensors in a row, with their lengths. `None` means one segment.
        extra: the names of the rows after the drift.
        rows_are_points: whether each $v_i$ is a point minus the base, like the drift.
        transporter: the transport from the base of a curved space; `None` on a flat space.
        base_displacements: the displacements (n, *shape) at the base, if they are known.
        ambient: the space in which inner products and sums of the rows are computed, except on a curved space.
        is_pseudo_gradient: whether every row has the opposite sign, as in a pseudo-gradient. The sign does not change
            inner products.
        unmeasured: the indices of the rows that `gram` does not read, with upper bounds on their norms.

    Example:
        >>> import torch
        >>> model, base, current = torch.tensor([[3.0, 1.0]]), torch.zeros(2), torch.tensor([0.0, 2.0])
        >>> Frame.of_points(model, base, current).gram().matrix.tolist()
        [[10.0, 2.0], [2.0, 4.0]]
    """

    @staticmethod
    def of_points(
        points: Float[Tensor, "n ..."] | Sequence[Row],
        base: Row,
        current: Row,
        *,
        segments: Mapping[str, int] | None = None,
        ambient: AmbientSpace = FLAT_AMBIENT,
    ) -> "Frame":
        r"""Build a frame, which is the input of a correction, from the models that a client returns.

        Each returned model is a control point, such as the end of the client's training path. The frame contains its
        change `points[i] - base` since the client started, and the change `current - base` of the server's model. The
        space of the models must not be curved.

        Args:
            points: the n control points.
            base: $\Theta^t$.
            current: $\Theta^\tau$.
            segments: the names of the tensors in a row, with their lengths.
            ambient: the ambient space, if the space has low-rank leaves.
        """
        # The last row is the drift, current - base. It has the same subtrahend as the displacements, so a kernel reads
        # the base only once.
        return Frame((*points, current), (base,) * (len(points) + 1), segments, rows_are_points=True, ambient=ambient)

    @staticmethod
    def of_displacements(
        displacements: Float[Tensor, "n P"],
        base: Float[Tensor, " P"],
        current: Float[Tensor, " P"],
        *,
        segments: Mapping[str, int] | None = None,
    ) -> "Frame":
        """Build the frame of given displacements in a flat space."""
        return Frame((*displacements, current), (*(None for _ in displacements), base), segments)

    @staticmethod
    def of_gradients(
        gradients: Sequence[Row], base: Row, current: Row, *, segments: Mapping[str, int] | None = None
    ) -> "Frame":
        r"""Build the input of a correction (a frame) from pseudo-gradients in a flat space.

        A pseudo-gradient is the model $\Theta^t$ at which a client started, minus a model $\varphi_i$ that it returns.
        It is the negative of the client's step $\varphi_i - \Theta^t$. For a consistent sign, the frame also contains
        the negative of the drift (the change of the server's model since the client started). In inner products, the
        two minus signs cancel, so a correction computes the same coefficients as for steps.

        Example:
            >>> import torch
            >>> frame = Frame.of_gradients((torch.ones(2),), torch.zeros(2), torch.tensor([3.0, 4.0]))
            >>> frame.move(frame.gram(), [0.5, 0.0]).compute()
            tensor([2.5000, 3.5000])
        """
        # The last row is base - current, the negative drift.
        return Frame((*gradients, base), (*(None for _ in gradients), current), segments, is_pseudo_gradient=True)

    @staticmethod
    def of(
        space: Manifold,
        base: Float[Tensor, "..."],
        current: Float[Tensor, "..."],
        displacements: Float[Tensor, "..."],
        *,
        transport: str | None = None,
        rungs: int = DEFAULT_RUNGS,
        flat: bool | None = None,
    ) -> "Frame":
        r"""Build the frame of displacements from `base`, on a flat or a curved space.

        Args:
            space: the space of the points. Its named tensors or factors are the segments.
            base: $\Theta^t$, of the space's shape.
            current: $\Theta^\tau$, of the space's shape.
            displacements: (n, *shape), tangents at `base`.
            transport: the method that transports the tangents to the current point of a curved space: `"parallel"`,
                `"ladder"` or `"projection"`. By default, a leaf with parallel transport in closed form uses it, and
                other leaves use a ladder. `transports` lists the choice for each leaf.
            rungs: the number of rungs of a ladder.
            flat: whether the rows are differences of points. The default is `True` on a flat space.

        Raises:
            ArgumentError: if an argument has the wrong shape, is not finite or is not on the space, or if the space
                lacks a required operation.

        Example:
            >>> import torch
            >>> from manifoldagg.manifolds import Flat
            >>> frame = Frame.of(Flat(2), torch.zeros(2), torch.tensor([0.0, 2.0]), torch.tensor([[3.0, 1.0]]))
            >>> frame.names, frame.gram().matrix.tolist()
            (('v1', 'g'), [[10.0, 2.0], [2.0, 4.0]])
        """
        check_is_manifold(space)
        if transport is not None and flat is None and space.flat:
            raise ArgumentError(f"transport: expected None on a flat space, got {short_repr(transport)}")
        check_shape("base", base, *space.axes)
        for name, tensor, lead in (("current", current, ()), ("displacements", displacements, (None,))):
            check_shape(name, tensor, *lead, *base.shape)
        # All shapes are checked before any values, because reading the values costs a pass over the tensors.
        for name, tensor in (("base", base), ("current", current), ("displacements", displacements)):
            check_finite(name, tensor)
        # On a flat space, displacements need no transport, and the rows stay unevaluated differences.
        if space.flat if flat is None else flat:
            require_flat(space)
            segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in space.leaves(base)}
            frame = Frame.of_displacements(
                displacements.flatten(1), base.flatten(), current.flatten(), segments=segments
            )
            return replace(frame, base_displacements=displacements)
        transporter = Transporter(space, base, current, transport, rungs).check()
        check_tangent(space, base, displacements, name="displacements")
        return Frame.of_tangents(transporter, displacements)

    @staticmethod
    def of_tangents(transporter: Transporter, displacements: Float[Tensor, "..."]) -> "Frame":
        """Build the frame of tangents at the base of a curved space, without validating them.

        Args:
            transporter: the transport from the base to the current point.
            displacements: (n, *shape), valid tangents at the base.

        Raises:
            ArgumentError: if the base is beyond the injectivity radius of the current point.
        """
        segments = {leaf.name: leaf.part.stop - leaf.part.start for leaf in transporter.leaves}
        # The drift is computed first, because its error message names the point beyond the injectivity radius.
        drift = transporter.drift.flatten()
        rows = (*transporter.to_current(displacements).flatten(1), drift)
        return Frame(rows, (None,) * len(rows), segments, transporter=transporter, base_displacements=displacements)

    def for_state(self, coefficients: Sequence[float] | Matrix) -> "Combination | Any":
        r"""Return the linear combination $\sum_j c_j\, r_j$ that an aggregation rule stores, such as its next momentum.

        The vectors $r_j$ are the rows of this frame, which describes a client's update. They are the changes of the
        client's model during training, the change of the server's model in that time, and any additional vectors, such
        as a moving average of earlier updates.

        Args:
            coefficients: one for each row, or (S, k) with one row for each segment.

        Returns:
            On a flat space, a `Combination` that the server computes at the end of the step. On other spaces, a new
            row.
        """
        line = np.asarray(coefficients, dtype=object)
        return Combination(self, line, from_current=False) if self.is_flat else self.materialize(line)

    def move(self, gram: Gram | None, coefficients: Sequence[float] | Matrix) -> "Combination | Any":
        r"""Return the new model $\Theta^\tau + \sum_j c_j\, r_j$, and check that all its entries are finite.

        Here, $\Theta^\tau$ is the current model, and $r_j$ are the rows of the frame, such as the change of a client's
        model during training. The check has two stages:

        1. The sum changes no entry by more than $\sum_j |c_j| \sqrt{G_{jj}}$, where $G$ is the Gram matrix of the rows.
           If this bound is at most a quarter of the distance between the two largest numbers of each dtype, no entry
           can overflow. The check is then complete, and reads no tensor.
        2. Otherwise, the method computes the new model tensor by tensor in temporary memory, and checks each entry.

        Args:
            gram: the Gram matrix of the rows; `None` if bounds on the norms of the rows are known.
            coefficients: $c$, one for each row, or (S, k) with one row for each segment.

        Returns:
            A `Combination` that the server computes at the end of the step. If the space has low-rank leaves, a new
            row.

        Raises:
            ArgumentError: if an entry would not be finite.
        """
        line = np.asarray(coefficients, dtype=object)
        new = Combination(self, line, from_current=True)
        # The truncation of a low-rank leaf is not linear, so the bound on the norm does not apply to its result.
        if self.ambient.leaves:
            formed = new.compute()
            if not is_finite(*tensors_of(formed)):
                raise ArgumentError("points: the new model would not be finite")
            return formed
        # The bound costs O(k), while the exact check computes the whole model.
        if not self.stays_finite(gram, line):
            new.check_finite()
        return new


def require_flat(space: Manifold) -> None:
    """Check that displacements of `space` are differences of points.

    Raises:
        ArgumentError: if `space` is curved or not a manifold.
    """
    if not (isinstance(space, Manifold) and space.flat):
        raise ArgumentError(f"space: expected a flat manifold, got {space}")
