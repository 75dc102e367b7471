"""Compression of client updates: top-k and 8-bit codecs, and error feedback."""

import abc
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from manifoldagg._validation import KeywordHints, check_count, check_finite, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated.types import Payload

__all__ = ["Codec", "ErrorFeedback", "Int8", "TopK", "check_codec", "codec_from_spec", "decode_payload"]

PREFIX = "codec/"
"""The prefix of the names of encoded tensors in a payload."""
MAX_CODE = 127
"""The largest 8-bit code. The codes are symmetric, so -128 is not used."""


@dataclass(frozen=True)
class Codec(KeywordHints, abc.ABC):
    """Base class for lossy codecs, which compress a client update into a few small tensors.

    The client encodes the update, and the server decodes it. A codec has no state, so both sides can construct it from
    the same options. [`ErrorFeedback`][manifoldagg.federated.clients.ErrorFeedback] stores the compression error of a
    client between updates.
    """

    @abc.abstractmethod
    def encode(self, update: Tensor) -> dict[str, Tensor]:
        """Encode a vector (P,) as a dict of tensors.

        Args:
            update: a vector of floating-point numbers.

        Raises:
            ArgumentError: if `update` is not a finite vector of floating-point numbers.
        """

    @abc.abstractmethod
    def decode(self, tensors: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """Decode the result of `encode` into a vector (P,).

        Args:
            tensors: the result of `encode`. The method validates the tensors, so they may come from an untrusted
                client.
            size: the number P of entries of the vector.
            dtype: the dtype of the vector.

        Raises:
            ArgumentError: if the tensors are not an encoding of a vector of this size and dtype.
        """

    @abc.abstractmethod
    def num_bytes(self, size: int, dtype: torch.dtype = torch.float32) -> int:
        """Return the number of bytes of an encoded vector.

        Args:
            size: the number P of entries of the vector.
            dtype: the dtype of the vector.
        """

    def spec(self) -> dict[str, Any]:
        """Return the name and the options of the codec as a dict that can be serialized to JSON.

        The function `codec_from_spec` constructs an equal codec from this dict.
        """
        return {"name": type(self).__name__, **asdict(self)}


@dataclass(frozen=True)
class TopK(Codec):
    r"""Codec that transmits only the entries of an update with the largest absolute values, and their indices.

    For a vector with $P$ entries, the codec transmits $k = \lceil \text{fraction} \cdot P \rceil$ entries. The decoded
    vector contains these entries exactly. All its other entries are 0.

    The encoded vector has $k\,(b + 4)$ bytes, where $b$ is the number of bytes of one entry. For $P > 2^{31}$, the
    indices are 64-bit integers, and the encoded vector has $k\,(b + 8)$ bytes.

    Args:
        fraction: the fraction of the entries to transmit, in (0, 1].

    Raises:
        ArgumentError: if `fraction` is out of range.

    Source: Stich, Cordonnier, Jaggi 2018 (Sparsified SGD with Memory), Definition 2.1.

    Example:
        >>> codec = TopK(fraction=0.5)
        >>> sent = codec.encode(torch.tensor([0.1, -3.0, 2.0, 0.5]))
        >>> codec.decode(sent, 4, torch.float32), codec.num_bytes(4)
        (tensor([ 0., -3.,  2.,  0.]), 16)
    """

    fraction: float = 0.01

    def __post_init__(self) -> None:
        check_number("fraction", self.fraction, above=0, at_most=1)

    def encode(self, update: Tensor) -> dict[str, Tensor]:
        _check_vector(update)
        size = update.numel()
        chosen = update.abs().topk(self._count(size), sorted=False).indices.sort().values
        return {"indices": chosen.to(_index_dtype(size)), "values": update[chosen]}

    def decode(self, tensors: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
        count = self._count(size)
        _check_tensors(tensors, {"indices": (_index_dtype(size), count), "values": (dtype, count)})
        chosen = tensors["indices"].long()
        # Strictly increasing indices are distinct, so the result does not depend on the order of the writes.
        if bool((chosen[1:] <= chosen[:-1]).any()) or not 0 <= int(chosen[0]) <= int(chosen[-1]) < size:
            raise ArgumentError(f"points: expected increasing indices from 0 to {size - 1}")
        return torch.zeros(size, dtype=dtype, device=chosen.device).index_put_((chosen,), tensors["values"])

    def num_bytes(self, size: int, dtype: torch.dtype = torch.float32) -> int:
        return self._count(size) * (dtype.itemsize + _index_dtype(size).itemsize)

    def _count(self, size: int) -> int:
        return min(size, max(1, math.ceil(self.fraction * size)))


@dataclass(frozen=True)
class Int8(Codec):
    r"""Codec that rounds each entry of an update to an 8-bit integer, with one scale for each block of entries.

    The codec divides the vector $x$ into blocks of consecutive entries. For each block $B$, it transmits a scale $s_B$
    and, for each entry $x_i$ of the block, an integer $q_i$. The decoded entry is $\hat x_i$:

    $$s_B = \frac{\max_{i \in B} |x_i|}{127}, \qquad q_i = \operatorname{round}(x_i / s_B) \in [-127, 127],
      \qquad \hat x_i = s_B\, q_i.$$

    Ties round to the even integer. The error of an entry is at most $s_B / 2$, plus floating-point rounding errors.

    The encoded vector has $P + b \lceil P / \text{block} \rceil$ bytes if $x$ has $P$ entries. Here, $b$ is 8 for
    float64 vectors and 4 for other dtypes.

    Args:
        block: the number of entries of a block. Smaller blocks are more accurate, but need more scales.

    Raises:
        ArgumentError: if `block` is not a positive integer.

    Source: Dettmers et al. 2022 (8-bit Optimizers via Block-wise Quantization), Section 2.1, with linear codes.

    Example:
        >>> codec = Int8()
        >>> sent = codec.encode(torch.tensor([1.0, -127.0, 63.4]))
        >>> sent["codes"], codec.num_bytes(1000)
        (tensor([   1, -127,   63], dtype=torch.int8), 1016)
    """

    block: int = 256

    def __post_init__(self) -> None:
        check_count("block", self.block)

    def encode(self, update: Tensor) -> dict[str, Tensor]:
        _check_vector(update)
        blocks = self._blocks(update.to(_scale_dtype(update.dtype)))
        scales = blocks.abs().amax(1) / MAX_CODE
        # The scale of a block of zeros is 0, so it is replaced by 1. A subnormal scale has a large rounding error, so a
        # code may exceed the range before it is clamped.
        codes = (blocks / scales.masked_fill(scales == 0, 1.0)[:, None]).round_().clamp_(-MAX_CODE, MAX_CODE)
        return {"codes": codes.flatten()[: update.numel()].to(torch.int8), "scales": scales}

    def decode(self, tensors: Mapping[str, Tensor], size: int, dtype: torch.dtype) -> Tensor:
        wide = _scale_dtype(dtype)
        _check_tensors(tensors, {"codes": (torch.int8, size), "scales": (wide, -(-size // self.block))})
        largest = torch.finfo(dtype).max
        # For the largest finite number, the product of the scale and 127 may overflow. It is therefore computed in
        # float64 and clamped.
        product = self._blocks(tensors["codes"].double()) * tensors["scales"].double()[:, None]
        return product.flatten()[:size].clamp_(-largest, largest).to(dtype)

    def num_bytes(self, size: int, dtype: torch.dtype = torch.float32) -> int:
        return size + -(-size // self.block) * _scale_dtype(dtype).itemsize

    def _blocks(self, x: Tensor) -> Tensor:
        """Return a matrix with one block per row. The last row is padded with zeros."""
        return torch.nn.functional.pad(x, (0, -x.numel() % self.block)).view(-1, self.block)


class ErrorFeedback:
    r"""Error feedback, which adds the compression error of a client's update to its next update.

    Without error feedback, the errors of a lossy codec accumulate over the updates of a client. Error feedback stores
    the difference between the intended and the transmitted update, called the residual $e_t$. For the client's update
    $\Delta_t$ in task $t$, the client encodes $v_t$, and the server decodes $c_t$:

    $$v_t = \Delta_t + e_{t-1}, \qquad c_t = \operatorname{decode}(\operatorname{encode}(v_t)), \qquad
      e_t = v_t - c_t, \qquad e_0 = 0.$$

    The sum of all decoded updates $c_t$ therefore differs from the sum of all updates $\Delta_t$ only by the last
    residual. For `TopK` and `Int8`, $c_t + e_t = v_t$ holds exactly in floating point.

    Create one object for each client, and store its `state_dict` with the client's state.

    If an update is lost or rejected, its transmitted part $c_t$ is lost too. To recover it, load the state from before
    the call of `encode`, and encode the update again.

    Args:
        codec: the codec, such as `TopK(fraction=0.01)` or `Int8()`.

    Attributes:
        codec: the codec.
        residual: the residual $e_t$ in the shape of the update. It is `None` before the first update.

    Raises:
        ArgumentError: if `codec` is not a codec.

    Source: Karimireddy et al. 2019 (Error Feedback Fixes SignSGD and other Gradient Compression Schemes), Algorithm 2.

    Example:
        >>> feedback = ErrorFeedback(TopK(fraction=0.5))
        >>> feedback.encode(torch.tensor([3.0, 2.0]))["values"], feedback.residual
        (tensor([3.]), tensor([0., 2.]))
        >>> feedback.encode(torch.tensor([1.0, 2.0]))["values"], feedback.residual
        (tensor([4.]), tensor([1., 0.]))
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = check_codec(codec)
        self.residual: Tensor | None = None

    def encode(self, update: Tensor) -> dict[str, Tensor]:
        """Encode the sum of an update and the residual, and store the new residual.

        Args:
            update: the difference between the trained model and the start model, of any shape. All updates of a client
                must have the same shape and dtype.

        Raises:
            ArgumentError: if the update is not finite, or if its shape or dtype differs from that of the residual. The
                residual does not change in this case.
        """
        update = update.detach()
        if self.residual is not None:
            expected, got = ((tuple(x.shape), x.dtype) for x in (self.residual, update))
            if expected != got:
                raise ArgumentError(f"update: expected shape and dtype {expected}, as in the residual, got {got}")
            update = update + self.residual.to(update.device)
        flat = update.flatten()
        tensors = self.codec.encode(flat)
        self.residual = (flat - self.codec.decode(tensors, flat.numel(), flat.dtype)).view(update.shape)
        return tensors

    def encode_payload(self, payload: Payload, start: Tensor) -> Payload:
        """Return a copy of a payload that contains compressed updates instead of models.

        A trainer returns one or more models in `payload.points`. The method encodes the difference between each model
        and the start model. To decode the payload, pass the codec to the server:
        `Server.receive(ticket, payload, codec=codec)`.

        The function [`pack`][manifoldagg.wire.pack] serializes the encoded payload. Do not pass its argument `spec`,
        which names the parameters of a model, because the encoded payload contains no models.

        Args:
            payload: the payload of a trainer.
            start: the start model (P,) of the ticket, `ticket.message.start`.

        Raises:
            ArgumentError: if `encode` rejects the updates.

        Example:
            >>> feedback, start = ErrorFeedback(TopK(fraction=0.25)), torch.zeros(4)
            >>> payload = Payload(torch.tensor([[0.0, 0.5, 2.0, 0.0]]), samples=10)
            >>> encoded = feedback.encode_payload(payload, start)
            >>> payload.nbytes, encoded.nbytes
            (16, 8)
            >>> decode_payload(feedback.codec, encoded, start).points
            tensor([[0., 0., 2., 0.]])
        """
        points = payload.points.detach()
        tensors = self.encode(points - start.to(points.device))
        named = {PREFIX + name: tensor for name, tensor in tensors.items()}
        return replace(payload, points=points.new_empty(len(points), 0), tensors={**payload.tensors, **named})

    def state_dict(self) -> dict[str, Tensor]:
        """Return a dict with the entry `residual`. Before the first update, the dict is empty."""
        return {} if self.residual is None else {"residual": self.residual}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore the residual from the result of `state_dict`.

        Raises:
            ArgumentError: if `state` contains entries other than `residual`, or if the residual is not finite.
        """
        if state.keys() - {"residual"}:
            raise ArgumentError(f"state: expected the entry 'residual', got {short_repr(sorted(state))}")
        residual = state.get("residual")
        self.residual = None if residual is None else check_finite("state: residual", residual).clone()


def decode_payload(codec: Codec, payload: Payload, start: Tensor) -> Payload:
    """Decode the result of `ErrorFeedback.encode_payload` into a payload with points.

    Args:
        codec: the codec of the client.
        payload: the encoded payload. The function validates it, so it may come from an untrusted client.
        start: the start model (P,) of the client's task.

    Raises:
        ArgumentError: if the payload is not an encoding by this codec.
    """
    given = payload.points
    if given.ndim != 2 or given.shape[1] or not len(given):
        raise ArgumentError(f"points: expected an encoded payload, with points (n, 0), got {tuple(given.shape)}")
    encoded = {
        name.removeprefix(PREFIX): x.to(start.device) for name, x in payload.tensors.items() if name.startswith(PREFIX)
    }
    others = {name: x for name, x in payload.tensors.items() if not name.startswith(PREFIX)}
    change = codec.decode(encoded, len(given) * start.numel(), given.dtype)
    return replace(payload, points=start + change.view(len(given), -1), tensors=others)


def check_codec(codec: object) -> Codec:
    """Check that an object is a codec, and return it.

    Raises:
        ArgumentError: if `codec` is not an instance of `Codec`.
    """
    if isinstance(codec, Codec):
        return codec
    given = short_repr(codec) if isinstance(codec, str | type | None) else type(codec).__name__
    raise ArgumentError(f"codec: expected a Codec, got {given}; write TopK() or Int8()")


def codec_from_spec(spec: Mapping[str, Any]) -> Codec:
    """Build a codec from the result of `Codec.spec`.

    Args:
        spec: a mapping that contains the name of the codec as `name`, and the options of the codec.

    Raises:
        ArgumentError: if the name is unknown, or an option is unknown or invalid.

    Example:
        >>> codec_from_spec(TopK(fraction=0.1).spec())
        TopK(fraction=0.1)
    """
    options = dict(spec)
    name = options.pop("name", None)
    kinds: dict[str, type[Codec]] = {"TopK": TopK, "Int8": Int8}
    if name not in kinds:
        raise ArgumentError(f"codec: expected one of {', '.join(kinds)}, got {short_repr(name)}")
    codec: Codec = kinds[str(name)](**options)
    return codec


def _check_vector(update: Tensor) -> None:
    if update.ndim != 1 or not update.numel() or not update.is_floating_point():
        given = f"{tuple(update.shape)}, {update.dtype}"
        raise ArgumentError(f"update: expected a vector of floating-point numbers, got {given}")
    check_finite("update", update)


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[torch.dtype, int]]) -> None:
    """Check the names, dtypes, sizes and finiteness of the tensors that encode a vector."""
    got = {name: (x.dtype, x.numel() if x.ndim == 1 else tuple(x.shape)) for name, x in tensors.items()}
    if got != dict(expected):
        raise ArgumentError(f"points: expected encoded tensors {short_repr(dict(expected))}, got {short_repr(got)}")
    for name, x in tensors.items():
        if x.is_floating_point():
            check_finite(f"points: {name}", x)


def _index_dtype(size: int) -> torch.dtype:
    return torch.int32 if size <= 2**31 else torch.int64


def _scale_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
