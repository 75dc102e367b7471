"""The options of a server, written flat in tests that vary a few of them."""

from dataclasses import fields

from manifoldagg.federated import Durability, InitialModel, MemoryPolicy, ServerLimits, UpdateLimits

LIMITS = {field.name for field in fields(ServerLimits)} - {"update"}
UPDATE = {field.name for field in fields(UpdateLimits)}
MEMORY = {"memory_limit": "limit", "spill": "spill", "base_dtype": "base_dtype"}
DURABILITY = {field.name for field in fields(Durability)}


def grouped(**flat):
    """The keywords of a server, of the fields of its `limits`, `memory` and `durability`.

    `memory_limit` is the limit of `memory`, and `update_limits` that of updates, beside single fields of it.
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
    """The start of a server, with the options `buffers` and `buffer_policy`, which are removed."""
    buffers, policy = options.pop("buffers", None), options.pop("buffer_policy", ())
    return start if buffers is None and not policy else InitialModel(start, buffers, policy)
