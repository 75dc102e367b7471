"""The corrections `Tangent`, `Position` and `DelayCompensated`, which interpret a stale update in different ways.

- `Tangent` interprets an update as a step. The server adds this step to its current model.
- `Position` interprets an update as a model. The server moves from its current model towards this model.
- `DelayCompensated` interprets an update as a gradient at an old model. It uses an estimated Hessian of the loss to
  predict the gradient at the current model.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from manifoldagg._validation import check_choice, check_number, check_shape, is_finite
from manifoldagg.corrections.correction import Correction
from manifoldagg.corrections.frame import Frame
from manifoldagg.corrections.gram import Gram, Matrix
from manifoldagg.errors import ArgumentError
from manifoldagg.kernels import Row
from manifoldagg.kernels.chunking import chunks
from manifoldagg.kernels.operands import needs_autograd_path

__all__ = ["DelayCompensated", "Position", "Tangent"]

FORMS = ("diagonal", "outer")
EPSILON = 1e-7
"""The constant that Zheng et al. add to the mean square of the gradient under the root."""


@dataclass(frozen=True)
class Tangent(Correction):
    r"""The identity correction $\pi v = v$, which leaves a stale update $v$ unchanged.

    The update $v$ is a step (a tangent vector): the change of a client's model during training. The server adds this
    step to its current model, as asynchronous SGD (ASGD) does.

    Source: the method AsyncTan of the paper "Aggregation on Learnable Manifolds for Asynchronous Federated
    Optimisation".
    """

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        return gram.identity(), state


@dataclass(frozen=True)
class Position(Correction):
    r"""A correction that interprets an update as a position, that is, as the model that the client has reached.

    As in FedAsync, the corrected displacement is the vector from the server's current model to the client's model. The
    drift $g$ is the change of the server's model since the client started. On a flat space, the displacement $v$
    becomes

    $$\pi v = v - g.$$

    On a curved space, the corrected displacement is $\log_{\Theta^\tau}(\exp_{\Theta^t} v)$, where $\Theta^t$ is the
    model at which the client started and $\Theta^\tau$ is the current model. This vector differs from the transported
    $v$ minus $g$ by terms of third order, so it is an additional row of the frame. If another correction was applied
    before, $v$ is first transported back to $\Theta^t$.

    Source: the method AsyncPos of the Manifold paper.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current, model = torch.tensor([0.0]), torch.tensor([1.0]), torch.tensor([3.0])
        >>> Position()(Flat(1), base, current, (model - base)[None])
        tensor([[2.]])
    """

    def adds_rows(self, frame: Frame) -> bool:
        return frame.transporter is not None

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        passage = frame.transporter
        if passage is None:
            return frame
        original = frame.base_displacements
        # If another correction has changed the displacements, only their tangents at the current point are known.
        if original is None:
            rows = torch.stack([frame.rows[i] for i in range(frame.num_displacements)])  # type: ignore[misc]  # vectors there
            original = passage.to_base(rows.view(-1, *passage.base.shape))
        for i, row in enumerate(passage.position(original).flatten(1)):
            frame = frame.with_row(f"p{i + 1}", row)
        return frame

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        matrix = gram.identity()
        for i, line in enumerate(matrix):
            # On a curved space, the position is a row of its own and replaces v. On a flat space, it is v - g.
            if gram.extra:
                line[i] = 0
                line[gram.row_index(f"p{i + 1}")] = 1
            else:
                line[gram.num_displacements] = -1
        return matrix, state


@dataclass(frozen=True)
class DelayCompensated(Correction):
    r"""First-order correction of a stale gradient, with the outer product of the gradient in place of the Hessian.

    The displacement $v$ is minus a gradient $e$, which the client computed at an old model. If $H$ is the Hessian and
    $g$ the drift, the gradient at the current model is about $e + H g$. The Hessian is too large to compute. For the
    negative log-likelihood, however, the mean of the outer product $e e^\top$ equals the mean of $H$. The correction
    therefore replaces $H$ by $\lambda\, e e^\top$, with a factor $\lambda$. This is the form `"outer"`:

    $$\pi v = v - \lambda\, \langle v, g \rangle\, v.$$

    The form `"diagonal"` uses only the diagonal $e \odot e$ of the outer product:

    $$\pi v = v - \lambda\; v \odot v \odot g.$$

    The two forms differ in their requirements:

    - The outer form needs only inner products. It does not depend on coordinates, and works on every space. On a curved
      space, $v$ and $g$ are tangent vectors at $\Theta^\tau$. The outer form multiplies $v$ by a number, which is
      negative if $\lambda \langle v, g \rangle > 1$.
    - The diagonal form, which DC-ASGD uses, requires flat leaves, because elementwise products depend on coordinates.
      The products are additional rows of the frame in float64, one for each displacement.

    With `adaptive` (DC-ASGD-a), $\lambda$ is $\lambda_0 / \sqrt{m + 10^{-7}}$ elementwise. The state is the running
    mean square $m$ of the displacements. Each update changes it to $m \leftarrow \rho\, m + (1 - \rho)\, v \odot v$,
    where $v$ is the displacement of the end point.

    Args:
        strength: $\lambda \ge 0$. With `adaptive`, $\lambda_0 \ge 0$.
        adaptive: whether to divide by the root mean square of the gradient. It requires the diagonal form.
        decay: $\rho \in [0, 1]$, the decay of the mean square.
        form: `"diagonal"` or `"outer"`.

    Raises:
        ArgumentError: if an option is out of range (the message names it), or if a mean square overflows. In the
            diagonal form, also if the space is curved.

    Source: Zheng et al. 2017, DC-ASGD-c and -a; Report (12). Manifold §2.2 describes the outer form in words.

    Example:
        >>> import torch
        >>> from manifoldagg.manifolds import Flat
        >>> base, current = torch.zeros(2), torch.tensor([1.0, 0.0])
        >>> DelayCompensated(0.5)(Flat(2), base, current, torch.tensor([[2.0, 3.0]]))
        tensor([[0., 3.]])
        >>> DelayCompensated(0.25, form="outer")(Flat(2), base, current, torch.tensor([[2.0, 3.0]]))
        tensor([[1.0000, 1.5000]])
    """

    strength: float = 0.04
    adaptive: bool = field(default=False, kw_only=True)
    decay: float = field(default=0.95, kw_only=True)
    form: str = field(default="diagonal", kw_only=True)

    def __post_init__(self) -> None:
        check_choice("form", self.form, FORMS)
        if self.adaptive and self.form != "diagonal":
            raise ArgumentError(f"adaptive: expected False with form={self.form!r}, got True; its scale is elementwise")
        check_number("strength", self.strength, at_least=0)
        check_number("decay", self.decay, at_least=0, at_most=1)

    @property
    def keeps_state(self) -> bool:  # type: ignore[override]  # a property that depends on an option
        """Whether the correction tracks the mean square."""
        return self.adaptive

    def adds_rows(self, frame: Frame) -> bool:
        return self.form == "diagonal"

    def extend(self, frame: Frame, state: Any = None) -> Frame:
        if self.form == "outer":
            return frame
        frame.require_flat("DelayCompensated, an elementwise product,")
        n = frame.num_displacements
        if needs_autograd_path([tensor for row in (*frame.rows, *frame.minus) for tensor in _row_tensors(row)]):
            # Writing chunks into one vector is not differentiable, so tracked rows are formed as a whole.
            rows = self._products(frame, state)
        else:
            # The products are formed chunk by chunk, so that the float64 copies of v and g stay in the cache.
            rows = [frame.empty_vector(torch.float64) for _ in range(n)]
            for part, known, targets in _frame_chunks(frame, state if self.adaptive else None, rows):
                for target, product in zip(targets, self._products(part, known), strict=True):
                    target.copy_(product)
        for i, row in enumerate(rows):
            frame = frame.with_row(_product_name(i), row)
        return frame

    def coefficients(self, gram: Gram, state: Any = None) -> tuple[Matrix, Any]:
        matrix = gram.identity()
        if self.form == "outer":
            # The outer form multiplies a displacement by a number, so it only changes the diagonal.
            for i, product in enumerate(gram.drift_products):
                matrix[i, i] = 1 - self.strength * product
            return matrix, state
        for i, line in enumerate(matrix):
            line[gram.row_index(_product_name(i))] = -self.strength
        return matrix, state

    def update_state(self, frame: Frame, coefficients: Matrix, state: Any) -> Any:
        if not (self.adaptive and frame.num_displacements):
            return state
        # The squares of a half-precision gradient would underflow, so the state has at least float32.
        wide = torch.promote_types(frame.dtype, torch.float32)
        square = frame.empty_vector(wide)
        # A state must not retain the autograd graph of earlier updates, so the rows are detached.
        for part, known, (target,) in _frame_chunks(frame.detach(), state, [square]):
            target.copy_(self._mean_square(part, known))
        if not is_finite(square):
            raise ArgumentError(f"points: expected displacements whose mean square is finite in {wide}")
        return {"mean_square": square}

    def _products(self, frame: Frame, state: Any) -> list[torch.Tensor]:
        r"""Compute the product $v \odot v \odot g$ of each update $v$ with the drift $g$, for delay compensation.

        With `adaptive`, each product is divided elementwise by the root mean square of $v$ over the latest updates.
        """
        n = frame.num_displacements
        # DC-ASGD-a includes the current gradient in the mean square by which the same gradient is divided.
        # The mean square is a new tensor, so it can be modified in place.
        scale = self._mean_square(frame, state).add_(EPSILON).sqrt_() if self.adaptive and n else None
        drift = frame.row(n)
        found = []
        for i in range(n):
            v = frame.row(i)
            row = v * v * drift
            found.append(row if scale is None else row / scale)
        return found

    def _mean_square(self, frame: Frame, state: Any) -> torch.Tensor:
        """Return the mean square after this update, as a new float64 tensor."""
        fresh = frame.row(frame.num_displacements - 1).square() * (1 - self.decay)
        if state is None:
            return fresh
        return fresh + self.decay * check_shape("state['mean_square']", state["mean_square"], *fresh.shape).double()


def _product_name(i: int) -> str:
    """Return the name of the row that contains the elementwise product of v, v and g."""
    return f"v{i + 1}*v{i + 1}*g"


def _frame_chunks(
    frame: Frame, state: Any, others: list[torch.Tensor]
) -> Iterator[tuple[Frame, Any, tuple[torch.Tensor, ...]]]:
    """Iterate over a frame, a state and further vectors, one range of entries at a time."""
    known = []
    if state is not None:
        known.append(check_shape("state['mean_square']", state["mean_square"], frame.size))
    k = len(frame.rows)
    start = 0
    # The rows of a frame can be lists of tensors, so a chunk never spans two tensors of the model.
    for j, piece in enumerate(_row_tensors(frame.current)):
        here = slice(start, start + piece.numel())
        start = here.stop
        rows = [_row_part(row, j, here) for row in frame.rows]
        less = [_row_part(row, j, here) for row in frame.minus if row is not None]
        # Missing subtrahends are skipped here, and are inserted again as `None` below.
        for parts in chunks(*rows, *less, *(vector[here] for vector in (*known, *others))):
            # The order of the parts is: minuends, subtrahends, the mean square, and the other vectors.
            taken = iter(parts[k:])
            minus = tuple(None if row is None else next(taken) for row in frame.minus)
            before = {"mean_square": next(taken)} if known else None
            yield replace(frame, rows=parts[:k], minus=minus, segments=None), before, tuple(taken)


def _row_tensors(row: Row | None) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a row. A vector is a single tensor, and a missing row has none."""
    return () if row is None else row if isinstance(row, tuple) else (row,)


def _row_part(row: Row, j: int, entries: slice) -> torch.Tensor:
    """Return the entries of `row` for tensor j of the model, as a vector."""
    # In a row that is a single vector, tensor j occupies the range `entries`.
    return row[j].reshape(-1) if isinstance(row, tuple) else row[entries]
