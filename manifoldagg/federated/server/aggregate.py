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

    A model is a state dict, or a list of tensors or NumPy arrays. The new model is of the same kind, in the same
    order, dtypes and devices. No argument but `out` is written. For models in float32 or float64 the result equals
    that of a [`Server`][manifoldagg.Server] bit for bit; the caller stores the versions. Narrower models are rounded
    at every call, whereas a server stores a float32 master. Tensors that share storage are tied and count once;
    copies are not.

    Args:
        rule: such as `FedAsync(0.6)` or `AsyncBezier(threshold=1.0, rate=0.5)`.
        state: the state that the last call returned, which includes the client states; `None` in the first call.
        current: $\Theta^\tau$, the server's model now.
        base: $\Theta^t$, the model that the client started from.
        update: the client's model; for a curve a sequence of models, the control points
            $\varphi_1, \dots, \varphi_n$ with the client's model last.
        staleness: $\tau - t$ in versions.
        weight: $w_i$, the client's share of the data.
        samples: the number of samples that the client trained on.
        client: the client's name, for rules with client states.
        buffer_policy: glob patterns of floating entries that are no parameters, such as `"*mask"`, or a mapping from
            patterns to `"average"`, `"latest"` or `"leave"`. Entries called `running_mean`, `running_var` or
            `num_batches_tracked` are buffers without being named. Averaged ones, the default, move linearly by the
            rule's step towards the client's; integer and boolean entries become the client's unless they are left.
        manifolds: name or pattern to the space of those entries, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
        difference: whether `update` is new minus old, $\varphi_i - \Theta^t$, entry by entry, and not the model. Their
            sum is taken, rounded once to the dtype of the entry: the bits are those of an update that was formed so.
            They are those of $\varphi_i$ itself, but for the sign of a zero, where the client's subtraction was exact,
            as it is between numbers within a factor of 2 of each other. Buffers are differences too, but booleans are
            the client's own. Flat spaces only: differences of adapter factors are not differences of adapters.
        adapters: whether pairs of factors, found by PEFT's names, are one matrix each, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict]. Models may differ in
            their ranks: the new one has those of `current`. `False`: factors are tensors like others. `None`: the same,
            with a warning where there are some.
        scaling: of the adapters: a number, patterns or a config, as there; or two of them, the first of `current`,
            `base` and the new model, the second of `update`.
        out: a model like `current`, `current` itself or another one that is passed in, into which the new one is
            written, each entry in memory of its own. It is written after all checks: a rejected update leaves it
            unchanged.

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
        ArgumentError: naming the argument, and the tensor in it, that does not fit; or if no entry is a parameter.
        RuleError: if the rule, or a schedule in it, returns an invalid result.

    Warns:
        UserWarning: naming an update that looks like a difference of models; an entry of integers, no single one,
            which becomes the client's though `buffer_policy` does not name it; and factors of adapters of which
            `adapters` does not say what they are. The call has changed nothing if the warning is raised as an error.

    Cost: with a rule that works on rows (its docstring says how often it reads and writes a model) the tensors are read
    and written in place, and only the result needs memory. These are copied, one by one: arrays of foreign byte order,
    tensors that are not contiguous or are on another device than the first, and 8-bit tensors. With other rules and on
    curved spaces every model is gathered into a vector. With `difference` the models are computed first.

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
