"""The information about an update that a server adds to the client's model."""

from collections.abc import Hashable
from dataclasses import dataclass

from manifoldagg._validation import KeywordHints, check_choice, check_count, check_number
from manifoldagg.federated.server.input_warnings import warn_if_not_share
from manifoldagg.federated.weights import check_client
from manifoldagg.manifolds.lora.scaling import Scaling

__all__ = ["UpdateInfo"]


@dataclass(frozen=True)
class UpdateInfo(KeywordHints):
    r"""The information about an update that [`aggregate`][manifoldagg.aggregate] needs besides the models.

    The constructor checks each value once.

    Args:
        client: the client's name, for rules with client states.
        staleness: $\tau - t$, the number of versions between the client's base and the current model.
        weight: $w_i$, the client's share of the data, in (0, 1].
        samples: the number of samples that the client trained on.
        difference: whether the update is the difference $\varphi_i - \Theta^t$, entry by entry, instead of the model.
            The function adds `base` and rounds the sum once to the dtype of the entry. The sum equals $\varphi_i$ bit
            for bit, up to the sign of a zero, if the client's subtraction was exact, as it is for numbers within a
            factor of 2 of each other. Buffers are differences too, but a boolean is the client's own value. Differences
            require flat spaces, because differences of adapter factors are not differences of adapters.
        scaling: the scaling of the client's adapters, if it differs from that of the space: a number, patterns or a
            config, as in [`ParameterSpace.of_state_dict`][manifoldagg.manifolds.ParameterSpace.of_state_dict].
        share: the unnormalised weight of the client, as in [`Update`][manifoldagg.federated.Update].

    Raises:
        ArgumentError: naming the field that is invalid.

    Warns:
        UserWarning: if `weight` is above 1.

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
        warn_if_not_share("weight", self.weight)
