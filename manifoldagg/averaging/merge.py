"""Merging of checkpoints that do not fit in memory, in at most two passes over their files."""

import math
import os
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np
import torch

from manifoldagg._validation import check_choice, warn_caller
from manifoldagg.averaging.certificate import Certificate, MergeInfo, certify, distance_warnings, total_certificate
from manifoldagg.averaging.coefficients import InnerProducts, Mean
from manifoldagg.averaging.karcher import Weights
from manifoldagg.averaging.merge_journal import MergeDraft
from manifoldagg.averaging.merge_parts import Buffers, gram_of, write_part
from manifoldagg.averaging.merge_plan import MergePlan, Step, plan_merge
from manifoldagg.errors import ArgumentError
from manifoldagg.manifolds.assign import Assignment

__all__ = ["merge", "run_merge"]

PREFETCH_BYTES = 1 << 27
"""The number of bytes of all models together that are read ahead of the current step."""
Progress = Callable[[int, int], None]


def merge(
    models: Sequence[Any],
    weights: Weights = None,
    *,
    out: str | os.PathLike[str],
    method: str = "arithmetic",
    scope: str = "tensor",
    t: float | None = None,
    manifolds: Assignment | None = None,
    shard_size: int | None = None,
    resume: bool = True,
    progress: Progress | None = None,
) -> MergeInfo:
    r"""Average checkpoints with constant memory, and write the result to files.

    The mean of each flat tensor is $m = \sum_i c_i x_i$. It is summed in float64 and rounded once. The coefficients
    $c_i$ depend on the method:

    - `"arithmetic"`: $c_i = w_i$, the weights. The mean is a point of the simplex whose vertices are the models.
    - `"karcher"`: the Karcher mean of the directions $x_i / \|x_i\|$ on the unit sphere, multiplied by the mean norm
      $\sum_i w_i \|x_i\|$.
    - `"slerp"`: the spherical interpolation of two models, $c_1 = \sin((1 - t)\theta) / \sin\theta$ and
      $c_2 = \sin(t\theta) / \sin\theta$.
    - `"bezier"`: the point at t of the Bézier curve whose control points are the models. With weights, the curve is
      rational.
    - `"radial"`: the normalised mean of the directions, multiplied by the mean norm.

    Other tensors have their own rules:

    - A pair of LoRA factors is averaged as the matrix B A, and truncated to the largest rank of the models.
    - A tensor on a manifold gets its Karcher mean with the weights.
    - Statistics of batch normalisation get their arithmetic mean. With `scope="tensor"`, tensors with one entry also
      get their arithmetic mean.
    - Integers and booleans follow the rules of [`average`][manifoldagg.averaging.average].

    If a merge is killed, repeat the same call to continue. The files are then bitwise equal to the files of an
    uninterrupted merge. `out` is created or replaced only when the result is complete.

    Args:
        models: 2 to 32 checkpoints with the same names, shapes and dtypes. A checkpoint is the path of a safetensors
            file, of an index of shards (`*.safetensors.index.json`) or of a folder, or a state dict.
        weights: one number >= 0 for each model, not all zero. The weights are normalised. The default is equal weights.
        out: the path of the result. A path that ends in `.safetensors` is a single file. Another path is a folder with
            the same shards as the first checkpoint, and with its configuration files.
        method: `"arithmetic"`, `"karcher"`, `"slerp"`, `"bezier"` or `"radial"`.
        scope: whether `"karcher"`, `"slerp"` and `"radial"` treat each tensor as one vector (`"tensor"`), or all flat
            tensors and LoRA pairs together as one vector (`"model"`).
        t: the parameter in [0, 1] of `"slerp"` and `"bezier"`. For `"slerp"`, $1 - t$ and $t$ are the weights of the
            two models.
        manifolds: a mapping from tensor names or patterns to manifolds, as in `average`.
        shard_size: the maximum number of bytes of the tensors in a file of the folder.
        resume: whether to continue an interrupted merge. Otherwise the merge starts again.
        progress: a function that is called after each step with the number of processed bytes and the total number.

    Returns:
        Measurements of the quality of the mean: the distances to the models, the residual of the Karcher condition, the
        distance to the arithmetic mean, and the rounding error. They are also written as JSON, next to the file
        (`mean.certificate.json`) or into the folder (`certificate.json`).

    Raises:
        ArgumentError: in any of these cases:

            - An argument is invalid. The message starts with the name of the argument.
            - The models have different names, shapes or dtypes. The message lists all differences.
            - The disk has too little free space.
            - The directions are too far apart for a Karcher mean.
        StateDictError: if a tensor is not finite. The message contains the file and the name of the tensor.
        CheckpointError: if a file is invalid or was changed during the merge, or after a system error. If an input
            becomes shorter during the merge, the operating system may end the process with the signal SIGBUS instead.
        BusyError: if another process is writing the same result.

    Warns:
        UserWarning: if the models are so far apart that a mean may not be meaningful. The thresholds are an angle of 45
            degrees between two models, and an arithmetic mean that is shorter than 90 % of the mean norm. LoRA adapters
            are not compared, because they are differences from a common base model.

    Cost: `"arithmetic"` and `"bezier"` read the models once. The other methods read each tensor twice in succession.
    The second read usually comes from the page cache. With `scope="model"`, the other methods read all files twice.
    Tensors on manifolds and LoRA pairs are processed as a whole. For all other tensors, `merge` allocates less than 256
    MiB of memory.

    Source: the formulas, and the methods of mergekit with the same meaning, are in `averaging/coefficients.py`.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file, save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     paths = [f"{folder}/{i}.safetensors" for i in range(2)]
        ...     for path, x in zip(paths, ([3.0, 0.0], [4.0, 3.0])):
        ...         save_file({"w": torch.tensor(x)}, path)
        ...     info = merge(paths, out=f"{folder}/mean.safetensors", method="karcher")
        ...     load_file(f"{folder}/mean.safetensors")["w"], round(info.model.arithmetic_distance, 3)
        (tensor([3.7947, 1.2649]), 0.377)
    """
    plan = plan_merge(
        models,
        weights,
        out=out,
        method=method,
        scope=scope,
        t=t,
        manifolds=manifolds,
        shard_size=shard_size,
    )
    try:
        info = run_merge(plan, resume=resume, progress=progress)
    finally:
        plan.pool.close()
    for reason in info.warnings:
        warn_caller(reason)
    return info


@torch.no_grad()
def run_merge(plan: MergePlan, *, resume: bool = True, progress: Progress | None = None) -> MergeInfo:
    """Merge checkpoints according to the result of `plan_merge`.

    The function returns the same result and raises the same errors as [`merge`][manifoldagg.averaging.merge], but it
    issues no warnings. Instead, the field `warnings` of the result contains the reasons why the mean may not be
    meaningful.

    Args:
        plan: the result of `plan_merge`.
        resume: whether to continue an interrupted merge. Otherwise the merge starts again.
        progress: a function that is called after each step with the number of processed bytes and the total number.
    """
    check_choice("resume", resume, (True, False))
    total = plan.bytes_read + plan.bytes_written
    done = 0
    with MergeDraft(plan, resume=resume) as draft, _ReadAhead(plan, draft) as ahead:
        run = _Run(plan, draft)
        for i, step in enumerate(plan.steps):
            part = plan.parts[step.part]
            # A recorded step is not repeated. Its numbers are added in the order of the plan, as without an
            # interruption.
            if i not in draft.records:
                ahead.reach(i)
                draft.record(i, run.compute(step))
                part.release(step.start, step.stop)
            run.add(step, draft.records.pop(i))
            done += part.num_bytes(step.start, step.stop) + (part.result_bytes(step.start, step.stop) * step.is_write)
            if progress is not None:
                progress(done, total)
        for model in plan.models:
            model.check_unchanged()
        extra = plan.extra_files()
        info = run.info([*(shard.name for shard in plan.shards), *extra])
        draft.publish(info.to_json(), extra)
    if progress is not None:
        progress(total, total)
    return info


class _Run:
    """The state of a running merge, which computes the steps and adds their results."""

    def __init__(self, plan: MergePlan, draft: MergeDraft) -> None:
        self.plan = plan
        self.draft = draft
        self._buffers = Buffers()
        self._numbers: defaultdict[tuple[int, bool], list[np.ndarray]] = defaultdict(list)
        self._means: dict[int, Mean] = {}

    def compute(self, step: Step) -> list[float]:
        """Carry out one step, and return the numbers to record."""
        part = self.plan.parts[step.part]
        if not step.is_write:
            numbers: list[float] = gram_of(part, step.start, step.stop).flatten().tolist()
            return numbers
        return write_part(part, self._mean(step.part), self.draft.write, self._buffers, step.start, step.stop)

    def add(self, step: Step, numbers: np.ndarray) -> None:
        """Add the recorded numbers of a step."""
        self._numbers[step.part, step.is_write].append(numbers)

    def info(self, files: Sequence[str]) -> MergeInfo:
        """Return the result of the merge after its last step.

        Args:
            files: the names of the files of the result.
        """
        plan = self.plan
        certificates = [self._certificate(i) for i, part in enumerate(plan.parts) if part.kind != "copied"]
        shared = self._mean_of_model if plan.scope == "model" else None
        model = total_certificate(certificates, plan.method, self._products_of_model(), shared)
        return MergeInfo(
            method=plan.method.name,
            scope=plan.scope,
            inputs=tuple(model.label for model in plan.models),
            files=tuple(files),
            weights=tuple(plan.method.weights.tolist()),
            tensors=tuple(certificates),
            model=model,
            # Adapters are differences from one base model, so their directions do not measure the distance of the
            # models.
            warnings=() if any(part.kind == "factors" for part in plan.parts) else tuple(distance_warnings(model)),
        )

    def _mean(self, index: int) -> Mean:
        """Return the coefficients for averaging one tensor or one pair of LoRA factors."""
        part = self.plan.parts[index]
        if not part.has_gram_step:
            return part.method.solve(None)
        if self.plan.scope == "model":
            return self._mean_of_model
        # The first step of a part computes the coefficients, and its later steps use them again.
        if index not in self._means:
            try:
                self._means[index] = part.method.solve(self._products(index))
            except ArgumentError as error:
                raise ArgumentError(f"{part.label}: {error}") from None
        return self._means[index]

    @cached_property
    def _mean_of_model(self) -> Mean:
        """The mean whose coefficients all flat tensors and LoRA factors share."""
        return self.plan.method.solve(self._products_of_model())

    def _sums(self, index: int, is_write: bool) -> list[float]:
        """Return the sums of the recorded numbers over all steps of a part, each rounded once."""
        # The result of `fsum` does not depend on the order of the steps, so a resumed merge computes the same bits.
        parts = self._numbers[index, is_write]
        return [math.fsum(column) for column in np.stack(parts).T.tolist()] if parts else []

    def _products(self, index: int) -> InnerProducts:
        """Return the inner products of the models over one part."""
        part = self.plan.parts[index]
        k = len(part.used)
        # Without a separate step, the inner products follow the rounding error in the numbers of the write steps.
        numbers = self._sums(index, False) if part.has_gram_step else self._sums(index, True)[1:]
        matrix = torch.tensor(numbers or [0.0] * k * k, dtype=torch.float64).view(k, k)
        return InnerProducts(matrix, part.origin)

    def _products_of_model(self) -> InnerProducts | None:
        """Return the inner products of the whole models, or `None` if no part contributes to them."""
        # Flat tensors and LoRA pairs contribute. They are orthogonal blocks of a model, so their products add up.
        found = [self._products(i) for i, part in enumerate(self.plan.parts) if part.has_products]
        if not found:
            return None
        columns = torch.stack([products.matrix.flatten() for products in found]).T.tolist()
        matrix = torch.tensor([math.fsum(column) for column in columns], dtype=torch.float64)
        return InnerProducts(matrix.view_as(found[0].matrix), found[0].origin)

    def _certificate(self, index: int) -> Certificate:
        """Return the certificate of a part."""
        part = self.plan.parts[index]
        numbers = self._sums(index, True)
        if part.kind != "manifold":
            error = numbers[0] if numbers else 0.0
            mean = self._mean(index)
            products = self._products(index)
            return certify(part.label, part.kind, part.size, part.method, mean, products, error)
        residual, rounding, arithmetic, *distances = map(math.sqrt, numbers or [0.0] * (3 + len(part.used)))
        by_model = dict(zip(part.used, distances, strict=True))
        return Certificate(
            name=part.label,
            kind=part.kind,
            size=part.size,
            coefficients=None,
            norm=None,
            distances=tuple(by_model.get(i) for i in range(len(part.labels))),
            residual=residual,
            arithmetic_distance=arithmetic,
            rounding_error=rounding,
        )


class _ReadAhead:
    """Context manager that prefetches the data of later merge steps during the current step.

    A separate thread sends the read requests to the operating system, because such a request can block.
    """

    def __init__(self, plan: MergePlan, draft: MergeDraft) -> None:
        self._plan = plan
        # The first read of a range comes from the disk. The second read usually comes from the page cache.
        firsts: dict[Any, int] = {}
        for i, step in enumerate(plan.steps):
            if i not in draft.records:
                firsts.setdefault(i if plan.scope == "model" else (step.part, step.start), i)
        self._pending = deque(firsts.values())
        self._ahead: deque[tuple[int, int]] = deque()
        self._size = 0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="merge-read")

    def __enter__(self) -> "_ReadAhead":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.shutdown(cancel_futures=True)

    def reach(self, index: int) -> None:
        """Request the data of the steps after the step `index`, up to `PREFETCH_BYTES` in total."""
        while self._ahead and self._ahead[0][0] <= index:
            self._size -= self._ahead.popleft()[1]
        # Pages that are read much too early could be evicted from the page cache before their step.
        while self._pending and self._size < PREFETCH_BYTES:
            i = self._pending.popleft()
            if i <= index:
                continue
            step = self._plan.steps[i]
            part = self._plan.parts[step.part]
            self._ahead.append((i, part.num_bytes(step.start, step.stop)))
            self._size += self._ahead[-1][1]
            self._worker.submit(part.prefetch, step.start, step.stop)
