"""The memory traffic of `Server.receive` is equal to the cost in the docstring of every rule.

The tests count the vectors of the size of a model that `Server.receive` reads, writes and allocates.
"""

import re
from dataclasses import fields, replace

import pytest
import torch

from manifoldagg.federated import Payload, Server, rules
from manifoldagg.federated.types import extra_fields
from manifoldagg.manifolds import Flat
from tests.federated.rules.memory_traffic import SIZE, counted
from tests.federated.rules.registered import RULES, golden
from tests.support import draw

CASES = golden()
WARM = 18
"""The number of updates after which the state of every rule is in its long-run form."""
MOVES = re.compile(
    r"Cost: (?:an update that moves the model|a step) reads ([\d.]+) words (?:a|per) parameter, "
    r"writes (\d+) and (?:makes|allocates) (\d+)"
)
KEEPING = {"HeLoCo": {(1, 2)}, "DelayedNesterov": {(1, 2)}, "Private": {(1, 1), (2, 2)}}
"""The kernel passes of rules that need more than one reading and one writing pass.

A momentum needs an additional writing pass. A rule with noise needs an additional pass that reads the sum.
"""
WAITS = re.compile(r"(?:one that waits|A buffered update) reads ([\d.]+), writes (\d+) and (?:makes|allocates) (\d+)")


def received(rule):
    """Run a rule, and return its largest memory traffic and its kernel passes.

    The results distinguish updates that move the model and updates that wait in a buffer. The models are in float32.
    The clients return stale updates in turn. A curve has two control points, and a buffer has three updates.
    """
    sizes = {field.name: 3 for field in fields(rule) if field.name in ("size", "cohort")}
    rule = replace(rule, **sizes)
    clients = ["heavy", "light"] if hasattr(rule, "routing") else ["heavy", "light", "other"]
    server = Server(Flat(SIZE), rule, draw(0, SIZE, dtype=torch.float32), weights=dict.fromkeys(clients, 1))
    tensors, names = extra_fields(rule)
    count = getattr(
        rule, "vertices", 1 if getattr(rule, "single_point", "AsyncCurve" not in type(rule).__name__) else 2
    )
    tickets = [server.dispatch(client) for client in 3 * clients]
    seen = {}
    passes = {}
    for i in range(2 * WARM):
        ticket = tickets.pop(0)
        points = ticket.message.start + 1e-4 * draw(i, count, SIZE, dtype=torch.float32)
        brought = {
            name: draw(i + 100, *([] if k is None else [k]), SIZE, dtype=torch.float32) for name, k in tensors.items()
        }
        numbers = {name: ticket.message.numbers.get(name, 1.0) for name in names}
        payload = Payload(points, 5, brought, numbers)
        with counted() as words:
            receipt = server.receive(ticket.id, payload)
        assert receipt.accepted, receipt.reason
        tickets.append(server.dispatch(clients[i % len(clients)]))
        if i >= WARM:
            kind = "waits" if receipt.buffered else "moves"
            seen[kind] = tuple(map(max, zip(words.counts, seen.get(kind, words.counts), strict=True)))
            passes.setdefault(kind, set()).add((words.grams, words.combines))
    return seen, passes


@pytest.mark.parametrize("name", RULES)
def test_memory_traffic_equals_the_cost_in_the_docstring(name):
    seen, passes = received(CASES[name])
    words = " ".join(getattr(rules, name).__doc__.split())
    for kind, pattern in (("moves", MOVES), ("waits", WAITS)):
        said = pattern.search(words)
        assert (said is not None) == (kind in seen), f"{name}: {kind}: expected the cost in its docstring: {seen}"
        if said:
            assert tuple(map(float, said.groups())) == seen[kind], f"{name}: {kind}"
    if getattr(CASES[name], "accepts_tensor_lists", False):
        # Only two passes access the parameters. The first pass reads, and the second pass reads and writes.
        assert set().union(*passes.values()) == KEEPING.get(name, {(1, 1)})


def test_word_counter_counts_reads_writes_and_allocations():
    a, b = torch.ones(2, SIZE)
    with counted() as words:
        c = a.clone()
        c.add_(b)
        c.double()
        c[:10].add_(1)
    # Ten entries count as the fraction 10 / SIZE of a word.
    assert words.read == pytest.approx(4 + 10 / SIZE)
    assert words.written == pytest.approx(4 + 10 / SIZE)
    assert words.made == 3
