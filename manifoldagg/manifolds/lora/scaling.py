r"""The scaling of a LoRA adapter: the number by which a model multiplies the product $B A$ of the factors.

For most adapters, the scaling is $\alpha / r$, where $r$ is the rank and $\alpha$ is `lora_alpha` in the config. This
module computes the scaling from the config of the adapter, or from numbers that the user specifies.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from manifoldagg._validation import check_number, short_repr
from manifoldagg.errors import ArgumentError

__all__ = ["ScaledModule", "Scaling", "resolve_scalings"]

Scaling = Any
"""A number, a mapping from patterns of modules to numbers, or the config of an adapter as a `LoraConfig` or a dict."""
PEFT_PREFIX = "base_model.model."
"""The prefix that PEFT adds to the names of modules. Patterns do not contain it."""


class ScaledModule(NamedTuple):
    """The name of an adapted module, and the rank of its pair of factors."""

    name: str
    rank: int


def resolve_scalings(scaling: Scaling, pairs: Iterable[ScaledModule], *, prefix: str = "") -> list[float]:
    r"""Return the scaling of each LoRA adapter, by which a model multiplies the product of the two factors.

    The argument `scaling` contains either the scalings, or a config from which they are computed. In a config, let
    $\alpha$ be `lora_alpha`, and let $r$ be the rank. The scaling is then $\alpha / r$, or $\alpha / \sqrt r$ with rank
    stabilisation (`use_rslora`).

    Args:
        scaling: one of the following:

            - a number for all pairs;
            - a mapping from patterns to numbers. As in PEFT's `alpha_pattern`, a pattern is a regular expression for
              the end of the name of a module;
            - a config with `lora_alpha`, `r`, `use_rslora`, `alpha_pattern` and `rank_pattern`.
        pairs: the pairs of the adapter.
        prefix: the start of error messages.

    Raises:
        ArgumentError: if a scaling is not positive, a pair matches no pattern, or a pattern matches no pair. Also if
            the config has other ranks than the pairs.

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
    scalings = []
    matched = set()
    for pair in pairs:
        key = _find_pattern(values, pair.name, f"{prefix}scaling")
        if key is None:
            given = ", ".join(map(repr, values)) or "an empty mapping"
            raise ArgumentError(f"{prefix}scaling: expected a pattern for {pair.name or 'the adapter'}, got {given}")
        matched.add(key)
        scalings.append(values[key])
    if unmatched := [key for key in values if key not in matched]:
        raise ArgumentError(f"{prefix}scaling: expected patterns of adapters, got {', '.join(map(repr, unmatched))}")
    return scalings


def _config(scaling: Scaling) -> Mapping[str, Any] | None:
    """Return the fields of the config of an adapter, or `None` if `scaling` is not a config."""
    if isinstance(scaling, Mapping):
        return scaling if "lora_alpha" in scaling else None
    return vars(scaling) if hasattr(scaling, "lora_alpha") else None


def _scaling_from_config(config: Mapping[str, Any], pair: ScaledModule, prefix: str) -> float:
    """Compute the scaling of one pair of factors from the config of its adapter.

    Raises:
        ArgumentError: if the config belongs to another kind of adapter, or has another rank than the pair.
    """
    kind = config.get("peft_type") or "LORA"
    if str(getattr(kind, "value", kind)) != "LORA":
        raise ArgumentError(f"{prefix}scaling: expected the config of a LoRA adapter, got one of {kind}")
    if config.get("target_parameters"):
        # With target_parameters, one pair of tensors contains the factors of the matrices of all experts.
        raise ArgumentError(f"{prefix}scaling: expected a config of modules, got one with target_parameters")
    alpha, rank = (_config_value(config, key, table, pair.name, prefix) for key, table in CONFIG_FIELDS)
    if rank != pair.rank:
        where = pair.name or "the adapter"
        raise ArgumentError(
            f"{prefix}scaling: expected the config of this adapter, got rank {rank:g} for {where}, whose rank is "
            f"{pair.rank}"
        )
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


CONFIG_FIELDS = (("lora_alpha", "alpha_pattern"), ("r", "rank_pattern"))
"""Pairs of fields of a config: the field with the default value, and the field with other values for single modules."""


def _config_value(config: Mapping[str, Any], key: str, table: str, name: str, prefix: str) -> float:
    """Return a positive number, such as `lora_alpha` or `r`, from the config of an adapter.

    Args:
        config: the config.
        key: the field that contains the default value for all modules.
        table: the field that contains other values for the modules that match a pattern.
        name: the name of the module.
        prefix: the start of error messages.

    Raises:
        ArgumentError: if the value is not a positive number.
    """
    others = config.get(table) or {}
    if not isinstance(others, Mapping):
        raise ArgumentError(f"{prefix}scaling: {table}: expected a mapping, got {type(others).__name__}")
    pattern = _find_pattern(others, name, f"{prefix}scaling: {table}")
    value: Any = config.get(key) if pattern is None else others[pattern]
    return check_number(f"{prefix}scaling: {key}", value, above=0)


def _find_pattern(patterns: Iterable[Any], name: str, prefix: str) -> str | None:
    """Return the first pattern that matches the name of a module in the same way as in PEFT."""
    for pattern in patterns:
        try:
            # PEFT matches a pattern against the end of a module's name, after a dot or at the start.
            if re.match(rf"(.*\.)?({pattern})$", name.removeprefix(PEFT_PREFIX)):
                return str(pattern)
        except (re.error, TypeError) as error:
            raise ArgumentError(f"{prefix}: expected regular expressions, got {short_repr(pattern)}: {error}") from None
    return None
