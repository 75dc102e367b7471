"""The function `aggregate`: one server step on plain state dicts or lists of arrays."""

from collections.abc import Hashable, Sequence
from typing import Any

from manifoldagg.federated.buffers import BufferPolicy
from manifoldagg.federated.server._aggregate import UpdateInfo, aggregate_step
from manifoldagg.federated.types import Rule, State
from manifoldagg.manifolds.assign import Assignment
from manifoldagg.manifolds.lora.scaling import Scaling
from manifoldagg.manifolds.model_io import Model

__all__ = ["aggregate"]


def aggregate(
    rule: Rule,
    state: State,
    current: Model,
    base: Model,
    update: Model | Sequence[Model],
    *,
    staleness: int = 0,
    weight: float = 1.0,
    samples: int = 1,
    client: Hashable = None,
    buffer_policy: BufferPolicy = (),
    manifolds: Assignment | None = None,
    difference: bool = False,
    adapters: bool | None = None,
    scaling: Scaling = 1.0,
    out: Model | None = None,
) -> tuple[Any, State, dict[str, float]]:
    r"""Apply one step of `rule`: aggregate a client's (stale) model into the server's model.

    A model is a state dict, or a list of tensors or NumPy arrays. The new model has the same type, order, dtypes and
    devices. The function modifies only `out`. For models in float32 or float64 the result equals that of a
    [`Server`][manifoldagg.Server] bit for bit; the caller stores the versions. Narrower models are rounded at every
    call, whereas a server stores a float32 master. Tensors that share storage are tied and count once.

    Args:
        rule: such as `FedAsync(0.6)` or `AsyncBezier(threshold=1.0, rate=0.5)`.
        state: the state that the previous call returned, which includes the client states; `None` in the first call.
        current: $\Theta^\tau$, the server's model now.
        base: $\Theta^t$, the model that the client started from.
        update: the client's model; for a curve a sequence of models, the control points
            $\varphi_1, \dots, \varphi_n$ with the client's model last.
        staleness: $\tau - t$ in versions.
        weight: $w_i$, the client's share of the data, in (0, 1].
        samples: the number of samples that the client trained on.
        client: the client's name, for rules with client states.
        buffer_policy: glob patterns of floating entries that are not parameters, such as `"*mask"`, or a mapping from
            patterns to `"average"`, `"latest"` or `"leave"`. Entries named `running_mean`, `running_var` or
            `num_batches_tracked` are always buffers. `"average"`, the default, moves a buffer linearly by the rule's
            step towards the client's value. Integer and boolean entries become the client's, except with `"leave"`.
        manifolds: name or glob pattern to the space of those entries, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
        difference: whether `update` is the difference $\varphi_i - \Theta^t$, entry by entry, instead of the model. The
            function adds `base` and rounds the sum once to the dtype of the entry. The sum equals $\varphi_i$ bit for
            bit, up to the sign of a zero, if the client's subtraction was exact, as it is for numbers within a factor
            of 2 of each other. Buffers are differences too, but a boolean is the client's own value. Only for flat
            spaces, because differences of adapter factors are not differences of adapters.
        adapters: whether pairs of factors, found by PEFT's names, are one matrix each, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict]. Models may have
            different ranks; the new model has the ranks of `current`. With `False` and `None`, factors are ordinary
            tensors. `None` warns if the model has factors.
        scaling: the scaling of the adapters: a number, patterns or a config, as in `of_state_dict`. A tuple of two
            scalings applies to `current`, `base` and the new model, and to `update`.
        out: a model like `current`, into which the function writes the new model. It may be `current` itself or another
            argument. Each entry has its own memory. The function writes after all checks: a rejected update leaves
            `out` unchanged.

    Returns:
        The new model (`out` if it is given), the next state, and the metrics of the step as a dictionary of floats. A
        buffered rule returns a copy of `current` until its buffer is full. The common metrics are:

        - `cosine`: the cosine between the update and the drift; NaN if one of them is zero.
        - `step`: the position on the curve of the update that the model moved to.
        - `norm`: the distance that the model moved.
        - `rate`: the step size of the rule, after staleness weights and penalties.
        - `weight`: the weight of the update in the mean of a buffer or cohort.
        - `buffered`: the number of updates in the buffer after this one.

        A rule reports only the metrics that it computes; the table in docs/guide/training_loop.md (section Metrics)
        lists all metrics and their rules.

    Raises:
        ArgumentError: if an argument is invalid, naming it and the tensor in it. Why a server returns a receipt
            instead: [Receipts and exceptions](../guide/errors.md#receipts-and-exceptions).
        RuleError: if the rule, or a schedule in it, returns an invalid result.

    Warns:
        UserWarning: if `weight` is above 1; if the update looks like a difference of models; if an integer tensor with
            several entries changes and `buffer_policy` does not name it; or if the model has factors of adapters and
            `adapters` is `None`. If the warning is raised as an error, the call has changed nothing.

    Cost: a rule that works on rows reads and writes the tensors in place, as often as its docstring says, and only the
    result needs memory. Three kinds of tensors are copied: arrays in foreign byte order, 8-bit tensors, and tensors
    that are not contiguous or are on another device than the first tensor. Other rules, and curved spaces, copy every
    model into a vector. With `difference` the function computes the models first.

    Example:
        >>> import numpy as np
        >>> from manifoldagg.federated.rules import FedAsync
        >>> current, base, update = [np.array([1.0])], [np.array([0.0])], [np.array([3.0])]
        >>> new, state, metrics = aggregate(FedAsync(0.5), None, current, base, update)
        >>> new, metrics["norm"]
        ([array([2.])], 1.0)
        >>> _ = aggregate(FedAsync(0.5), state, current, base, update, out=current)
        >>> current
        [array([2.])]
    """
    known = UpdateInfo(client, staleness, weight, samples)
    model, state, metrics, _ = aggregate_step(
        rule,
        state,
        current,
        base,
        update,
        known,
        buffer_policy=buffer_policy,
        manifolds=manifolds,
        difference=difference,
        adapters=adapters,
        scaling=scaling,
        out=out,
    )
    return model, state, metrics
