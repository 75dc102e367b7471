"""Prefixes that module wrappers such as `DataParallel` add to the names of tensors."""

from collections.abc import Collection

__all__ = ["without_compile_prefix", "wrapper_hint"]

COMPILE_PREFIX = "_orig_mod"

WRAPPER_PREFIXES = {
    "module": "DataParallel and DistributedDataParallel add; use the state dict of `model.module`",
    COMPILE_PREFIX: "torch.compile adds; use the state dict of `model._orig_mod`",
    "_fsdp_wrapped_module": "FullyShardedDataParallel adds; use a full state dict",
}
"""The prefixes and their explanations. The first prefix occurs only at the start of a name, the others anywhere."""


def wrapper_hint(given: Collection[str], expected: Collection[str]) -> str:
    """Return a hint for the error message about a state dict that does not have the expected names.

    If the names differ only by a prefix that a module wrapper such as `DataParallel` adds, the hint contains the prefix
    and the name of the wrapper. Otherwise, the hint is an empty string.

    Example:
        >>> wrapper_hint({"_orig_mod.weight"}, {"weight"})
        "; got '_orig_mod.' in names, which torch.compile adds; use the state dict of `model._orig_mod`"
        >>> wrapper_hint({"bias"}, {"weight"})
        ''
    """
    if not set(map(_unwrapped_name, given)) >= set(map(_unwrapped_name, expected)):
        return ""
    # Without their prefixes the names agree, so the hint reports the prefix that only one side has.
    mine, theirs = (_wrappers_in(names) for names in (given, expected))
    for part, why in WRAPPER_PREFIXES.items():
        if (part in mine) != (part in theirs):
            return f"; {'got' if part in mine else 'expected'} '{part}.' in names, which {why}"
    return ""


def without_compile_prefix(name: str) -> str:
    """Remove the prefixes that `torch.compile` adds to the name of a tensor.

    Example:
        >>> without_compile_prefix("_orig_mod.0._orig_mod.weight")
        '0.weight'
    """
    return ".".join(part for part in name.split(".") if part != COMPILE_PREFIX)


def _wrappers_in(names: Collection[str]) -> set[str]:
    return WRAPPER_PREFIXES.keys() & {part for name in names for part in name.split(".")}


def _unwrapped_name(name: str) -> str:
    """Remove the prefixes of module wrappers from the name of a tensor.

    The prefix `module` is removed only at the start of the name, because a submodule can also have the name `module`.
    """
    parts = [part for part in name.split(".") if part not in WRAPPER_PREFIXES or part == "module"]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)
