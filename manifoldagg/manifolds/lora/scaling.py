"""LoRA scaling: the factor that a model applies to the product of an adapter's factors, from the adapter's config."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from manifoldagg._validation import check_number, short_repr
from manifoldagg.errors import ArgumentError

__all__ = ["ScaledModule", "Scaling", "resolve_scalings"]

Scaling = Any
"""A number, a mapping from patterns of modules to numbers, or the adapter's config: a `LoraConfig` or its dict."""
PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the names of modules, which its patterns do not speak of."""


class ScaledModule(NamedTuple):
    """A pair of factors: the name of its module, and the number of rows of A."""

    name: str
    rank: int


def resolve_scalings(scaling: Scaling, pairs: Iterable[ScaledModule], *, prefix: str = "") -> list[float]:
    r"""Return the scaling of each pair: $\alpha / r$, or $\alpha / \sqrt r$ if it is rank-stabilised.

    Args:
        scaling: a number for all; a mapping from patterns to numbers, where a pattern is, as in PEFT's `alpha_pattern`,
            a regular expression for the end of a module's name; or a config, with `lora_alpha`, `r`, `use_rslora`,
            `alpha_pattern` and `rank_pattern`.
        pairs: of the adapter.
        prefix: what messages begin with.

    Raises:
        ArgumentError: if a scaling is not above 0, a pair has no pattern or a pattern no pair, or the config is that
            of another adapter, naming the pair.

    Example:
        >>> pairs = [ScaledModule("base_model.model.0.q_proj", 4), ScaledModule("base_model.model.0.v_proj", 16)]
        >>> resolve_scalings({"lora_alpha": 8, "r": 4, "rank_pattern": {"v_proj": 16}, "use_rslora": True}, pairs)
        [4.0, 2.0]
        >>> resolve_scalings({"q_proj": 2.0, ".*": 0.5}, pairs)
        [2.0, 0.5]
    """
    config = _config(scaling)
    if config is not None:
        return [_scaling_from_config(config, pair, prefix) for pair in pairs]
    if not isinstance(scaling, Mapping):
        value = check_number(f"{prefix}scaling", scaling, above=0)
        return [value for _ in pairs]
    values = {key: check_number(f"{prefix}scaling: {key}", value, above=0) for key, value in scaling.items()}
    found = []
    met = set()
    for pair in pairs:
        key = _find_pattern(values, pair.name, f"{prefix}scaling")
        if key is None:
            raise ArgumentError(f"{prefix}scaling: expected a pattern for {pair.name or 'the adapter'}, got none")
        met.add(key)
        found.append(values[key])
    if odd := [key for key in values if key not in met]:
        raise ArgumentError(f"{prefix}scaling: no adapter is at {', '.join(map(repr, odd))}")
    return found


def _config(scaling: Scaling) -> Mapping[str, Any] | None:
    """The fields of a config; `None` where it is none."""
    if isinstance(scaling, Mapping):
        return scaling if "lora_alpha" in scaling else None
    return vars(scaling) if hasattr(scaling, "lora_alpha") else None


def _scaling_from_config(config: Mapping[str, Any], pair: ScaledModule, prefix: str) -> float:
    kind = config.get("peft_type") or "LORA"
    if str(getattr(kind, "value", kind)) != "LORA":
        raise ArgumentError(f"{prefix}scaling: expected the config of a LoRA adapter, got one of {kind}")
    if config.get("target_parameters"):
        # One pair of tensors holds the factors of as many matrices as there are experts.
        raise ArgumentError(f"{prefix}scaling: expected a config of modules, got one with target_parameters")
    alpha, rank = (_config_value(config, key, table, pair.name, prefix) for key, table in CONFIG_FIELDS)
    if rank != pair.rank:
        told = f"expected rank {rank:g} at {pair.name or 'the adapter'}, as this config says, got {pair.rank}"
        raise ArgumentError(f"{prefix}scaling: {told}; is it that of another adapter?")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


CONFIG_FIELDS = (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern"))
"""Each number of a config, and the table of modules where it is another."""


def _config_value(config: Mapping[str, Any], key: str, table: str, name: str, prefix: str) -> float:
    others = config.get(table) or {}
    if not isinstance(others, Mapping):
        raise ArgumentError(f"{prefix}scaling: {table}: expected a mapping, got {type(others).__name__}")
    pattern = _find_pattern(others, name, f"{prefix}scaling: {table}")
    value: Any = config.get(key) if pattern is None else others[pattern]
    return check_number(f"{prefix}scaling: {key}", value, above=0)


def _find_pattern(patterns: Iterable[Any], name: str, prefix: str) -> str | None:
    """The first that is that of a module, as PEFT reads them."""
    for pattern in patterns:
        try:
            if re.match(rf"(.*\.)?({pattern})$", name.removeprefix(PEFT_PREFIX)):
                return str(pattern)
        except (re.error, TypeError) as error:
            raise ArgumentError(f"{prefix}: expected regular expressions, got {short_repr(pattern)}: {error}") from None
    return None
