"""Prefixes that wrappers of modules add to the names of tensors."""

from collections.abc import Collection

__all__ = ["wrapper_hint"]

WRAPPER_PREFIXES = {
    "module": "DataParallel and DistributedDataParallel put it there: use that of `model.module`",
    "_orig_mod": "torch.compile puts it there: use that of `model._orig_mod`",
    "_fsdp_wrapped_module": "FullyShardedDataParallel puts it there: use a full state dict",
}
"""What they put before each name, the first, or before a part of it, the others; and what to do."""


def wrapper_hint(given: Collection[str], expected: Collection[str]) -> str:
    """Return a hint for an error message if names differ from the expected ones by wrapper prefixes alone.

    Example:
        >>> wrapper_hint({"module.weight"}, {"weight"})
        "; 'module.' is in them: DataParallel and DistributedDataParallel put it there: use that of `model.module`"
        >>> wrapper_hint({"bias"}, {"weight"})
        ''
    """
    if not set(map(_unwrapped_name, given)) >= set(map(_unwrapped_name, expected)):
        return ""
    mine, theirs = (_wrappers_in(names) for names in (given, expected))
    for part, why in WRAPPER_PREFIXES.items():
        if (part in mine) != (part in theirs):
            return f"; '{part}.' is {'in them' if part in mine else 'in those that are expected'}: {why}"
    return ""


def _wrappers_in(names: Collection[str]) -> set[str]:
    """What wrappers have put there, as far as it can be told."""
    return WRAPPER_PREFIXES.keys() & {part for name in names for part in name.split(".")}


def _unwrapped_name(name: str) -> str:
    """A name without it. A module of one's own may be called `module` too, further inside."""
    parts = [part for part in name.split(".") if part not in WRAPPER_PREFIXES or part == "module"]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
