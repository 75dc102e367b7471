"""A helper for tests that pass options of a server as flat keywords."""

from dataclasses import fields

from manifoldagg.federated import Durability, InitialModel, MemoryPolicy, ServerLimits, UpdateLimits

LIMITS = {field.name for field in fields(ServerLimits)} - {"update"}
UPDATE = {field.name for field in fields(UpdateLimits)}
MEMORY = {"memory_limit": "limit", "spill": "spill", "base_dtype": "base_dtype"}
DURABILITY = {field.name for field in fields(Durability)}


def grouped(**flat):
    """Group flat keywords into the `limits`, `memory` and `durability` of a server.

    `memory_limit` is the field `limit` of `memory`. Single fields of the limits of updates override `update_limits`.
    """
    taken = set()

    def select(names):
        taken.update(names & flat.keys())
        return {name: flat[name] for name in names if name in flat}

    update = flat.get("update_limits") or UpdateLimits()
    own = select(UPDATE)
    limits = select(LIMITS)
    memory = {MEMORY[name]: value for name, value in select(set(MEMORY)).items()}
    durability = select(DURABILITY)
    made = {name: value for name, value in flat.items() if name not in taken | {"update_limits"}}
    if own:
        update = UpdateLimits(**{**{name: getattr(update, name) for name in UPDATE}, **own})
    if limits or own or "update_limits" in flat:
        made["limits"] = ServerLimits(update, **limits)
    if memory:
        made["memory"] = MemoryPolicy(**memory)
    if durability:
        made["durability"] = Durability(**durability)
    return made


def with_buffers(start, options):
    """Return the start of a server with the options `buffers` and `buffer_policy`, and remove them from the options."""
    buffers, policy = options.pop("buffers", None), options.pop("buffer_policy", ())
    return start if buffers is None and not policy else InitialModel(start, buffers, policy)
