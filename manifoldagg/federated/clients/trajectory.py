"""The trainer that returns its training path as a curve, without additional gradients."""

from dataclasses import dataclass, replace

from torch import Tensor

from manifoldagg._validation import check_count
from manifoldagg.curves import Bezier
from manifoldagg.curves.trajectory import PathFit, PathPoints, check_path
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.clients.base import TrainingTask
from manifoldagg.federated.clients.local import Local
from manifoldagg.federated.types import Payload

__all__ = ["Trajectory"]


@dataclass(frozen=True)
class Trajectory(Local):
    r"""Trainer that trains like [`Local`][manifoldagg.federated.clients.Local] and returns its path as a curve.

    The training path consists of the iterates $\theta_0, \dots, \theta_K$ of $K$ steps, where $\theta_0 = \Theta^t$ is
    the server's model. The trainer does not store the iterates. It returns the control points
    $\varphi_1, \dots, \varphi_n$ of a Bézier curve $\iota_\varphi(u)$ for $u \in [0, 1]$, from $\theta_0$ to
    $\theta_K$. The curve is a least-squares fit, which assigns the position $u_k$ to the iterate $\theta_k$:

    $$\min_\varphi \sum_k \|\iota_\varphi(u_k) - \theta_k\|^2, \qquad \varphi_0 = \theta_0,\quad \varphi_n = \theta_K.$$

    On a curved space, the fit is computed with tangents at $\Theta^t$.

    With the option `pieces`, the trainer returns m points of the path instead. They are the control points of the
    embedding `Piecewise(space, degree=1, pieces=m)`, and the rule must have this embedding.

    The last control point $\varphi_n$ is bitwise equal to the model that `Local` returns. With `degree=1`, the payload
    contains no other point. If the message contains a number `progress`, the payload contains the number `progress`
    $= \eta K$, where $\eta$ is the learning rate.

    Args:
        epochs: the number of passes over the client's batches.
        steps: the number of optimizer steps. If `steps` is given, the trainer ignores `epochs`.
        optimizer: the optimizer class, as in [`Training`][manifoldagg.curves.Training].
        rate: the learning rate.
        proximal: the weight $\mu$ of the squared distance, or a [`ProximalTerm`][manifoldagg.curves.ProximalTerm] in
            place of the squared distance.
        sharpness: `SAM` or `ASAM` of `manifoldagg.curves`, for sharpness-aware gradients.
        degree: the degree n of the curve, at most 10. If `pieces` is given, the trainer ignores `degree`.
        time: the quantity to which $u_k \in [0, 1]$ is proportional: the number of `"steps"` or the `"length"` of the
            path.
        pieces: the number m of returned points. This option requires `time="steps"`. If `batches` has no length, the
            trainer counts the batches in an additional pass.

    Raises:
        ArgumentError: if an option is out of range. The error message contains the name of the option.

    Cost: no additional gradients. The trainer needs more memory than `Local`:

    - n - 1 float64 vectors of the size of the model if the number of steps is known in advance, otherwise n
      vectors;
    - one more vector with `time="length"`;
    - m + 1 vectors with `pieces`.

    For each float64 vector, a step reads the model, $\Theta^t$ and the vector, and writes the vector.

    Example:
        >>> import torch
        >>> from manifoldagg.federated import Message
        >>> from manifoldagg.manifolds import Flat
        >>> trainer = Trajectory(degree=2, steps=4, optimizer=torch.optim.SGD, rate=0.5)
        >>> loss = lambda theta, batch: 0.5 * theta.square().sum()
        >>> message, batches = Message(torch.ones(1)), [torch.zeros(3, 1)]
        >>> trainer.train(Flat(1), message, loss, batches, None, generator=torch.Generator()).points
        tensor([[-0.0423],
                [ 0.0625]])
    """

    degree: int = 2
    time: str = "steps"
    pieces: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.degree, self.time)
        if self.pieces is not None:
            check_count("pieces", self.pieces)
            if self.time != "steps":
                raise ArgumentError(f"time: expected steps with pieces, got {self.time}")

    def _train(self, task: TrainingTask) -> Payload:
        samples = task.samples
        path = self._path_recorder(task)
        end, taken = self._fit_model(task, path)
        points = path.points(end)
        numbers = {"progress": self.rate * taken} if "progress" in task.message.numbers else {}
        return Payload(points, samples, numbers=numbers, buffers=self._buffers(task, end))

    def _fit_model(self, task: TrainingTask, path: PathFit | PathPoints) -> tuple[Tensor, int]:
        """Train the local model, and return it together with the number of steps."""
        options = self._options()
        options["phases"] = replace(options["phases"], watch=path.observe)
        # The optimizer state is released when this method returns, so it uses no memory while the caller computes the
        # curve.
        learned = task.fit(Bezier(task.space, 1), **options)
        return learned.phi[-1], len(learned.losses)

    def _path_recorder(self, task: TrainingTask) -> PathFit | PathPoints:
        start = task.message.start
        total = self._total_steps(task)
        if self.pieces is not None:
            if total is None:
                total = self.epochs * sum(1 for _ in task.batches)
            return PathPoints(task.space, start, self.pieces, total)
        return PathFit(task.space, start, self.degree, self.time, None if self.time == "length" else total)

    def _total_steps(self, task: TrainingTask) -> int | None:
        """Return the total number of steps, or `None` if the number of batches is unknown."""
        if self.steps is not None:
            return self.steps
        return None if task.num_batches is None else self.epochs * task.num_batches
