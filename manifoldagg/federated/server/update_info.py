"""The class `UpdateInfo`, which describes an update to `aggregate`."""

from collections.abc import Hashable
from dataclasses import dataclass

from manifoldagg._validation import KeywordHints, check_choice, check_count, check_number, short_repr, warn_caller
from manifoldagg.federated.weights import check_client
from manifoldagg.manifolds.lora.scaling import Scaling

__all__ = ["UpdateInfo"]


@dataclass(frozen=True)
class UpdateInfo(KeywordHints):
    r"""Information about a client's update for [`aggregate`][manifoldagg.aggregate], such as its weight.

    Args:
        client: the name of the client. Rules with client states need it.
        staleness: the staleness $\tau - t$ of the update, where $\tau$ is the version of the current model and t is the
            version of the client's base.
        weight: the client's share $w_i$ of the training data, in (0, 1].
        samples: the number of samples that the client trained on.
        difference: whether the update is the difference $\varphi_i - \Theta^t$ of the client's model $\varphi_i$ and
            the base $\Theta^t$, instead of the model. Differences require a flat space without adapters.

            - `aggregate` adds the base and rounds each sum once to the dtype of the entry. If the client's subtraction
              was exact, the sum is bit-identical to the client's model, up to the sign of zeros.
            - Buffers are also differences, except for boolean buffers, which contain the client's values.
        scaling: the scaling of the client's adapters, if it differs from the scaling of the space. It may be a number,
            a mapping from patterns to numbers, or an adapter config, as in
            [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
        share: the weight of the client before normalisation, as in [`Update`][manifoldagg.federated.Update].

    Raises:
        ArgumentError: if a field is invalid. The message starts with the name of the field.

    Warns:
        UserWarning: if `weight` is larger than 1.

    Example:
        >>> UpdateInfo(client="ward-7", staleness=2, weight=0.25, samples=30).staleness
        2
    """

    client: Hashable = None
    staleness: int = 0
    weight: float = 1.0
    samples: int = 1
    difference: bool = False
    scaling: Scaling | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        check_client(self.client)
        check_count("staleness", self.staleness, at_least=0)
        check_number("weight", self.weight, above=0)
        check_count("samples", self.samples)
        check_choice("difference", self.difference, (True, False))
        if self.share is not None:
            check_number("share", self.share, above=0)
        if self.weight > 1:
            how = "pass samples / total samples, and the sample count as samples="
            given = short_repr(self.weight)
            warn_caller(f"weight: expected the client's share of the data, at most 1, got {given}; {how}")
