"""Tests of the store of versions and client states.

They cover reference counts, memory accounting, rounding, spilling and release.
"""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.errors import SpillError
from manifoldagg.federated import Outcome, Payload, Server
from manifoldagg.federated.rules import AsyncBezier, FedAsync, FedBuff
from manifoldagg.federated.server.durability.spill import Spill
from manifoldagg.federated.server.durability.store import InMemoryTree, Store
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, bits, fingerprint, versions
from tests.federated.server.durability.spilled import alter, mapped, needs_maps, open_files
from tests.server_options import grouped
from tests.support import draw, seeds

P = 6
SPACE = Flat(P)
MODEL = 4 * P


def server(rule=None, start=None, **options):
    return Server(
        SPACE, rule or Adds(), torch.zeros(P) if start is None else start, weights="uniform", **grouped(**options)
    )


def forward(s, name="walker", by=1.0):
    """Send one fresh update to the server."""
    ticket = s.dispatch(name)
    receipt = s.receive(ticket.id, Payload(ticket.message.start[None] + by, 1))
    assert receipt.accepted
    return receipt


class Forgetful(Adds):
    """Rule without client states."""

    def message(self, space, state, current, client_state):
        return super().message(space, state, current, None)

    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        return state, Outcome(outcome.model, None, outcome.numbers)


def test_version_is_stored_once_and_freed_with_its_last_ticket():
    s = server(Forgetful())
    tickets = [s.dispatch(i) for i in range(20)]
    assert s.memory["versions"] == 0
    forward(s)
    assert s.memory["versions"] == MODEL
    for ticket in tickets[:19]:
        s.drop(ticket.id)
    assert s.memory["versions"] == MODEL
    assert s.receive(tickets[19].id, Payload(torch.ones(1, P), 1)).accepted
    assert s.memory == {"model": MODEL, "state": 0, "versions": 0, "clients": 0, "spilled": 0}


@pytest.mark.usefixtures("as_shipped")
def test_memory_grows_with_versions_instead_of_clients():
    s = server(Forgetful())
    held = []
    for version in range(50):
        held += [s.dispatch((version, i)).id for i in range(200)]
        if version < 49:
            forward(s)
    assert (len(held), s.version) == (10_000, 49)
    assert s.memory == {"model": MODEL, "state": 0, "versions": 49 * MODEL, "clients": 0, "spilled": 0}
    for ticket in held:
        s.drop(ticket)
    assert s.memory["versions"] == 0
    assert versions(s) == [49]


def test_steady_run_allocates_one_model():
    s = server(Forgetful())
    places = set()
    for _ in range(20):
        forward(s)
        places.add(s._state.value.model_state.current.data_ptr())
    assert len(places) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(seeds)
def test_client_starts_exactly_from_the_stored_base(dtype, seed):
    seen = []

    class Watches(Adds):
        def step(self, space, state, update, *, out=None):
            seen.append(update)
            return super().step(space, state, update, out=out)

    start = draw(seed, P, dtype=torch.float32)
    s = server(Watches(), start, base_dtype=dtype)
    one, two, brings = s.dispatch("a"), s.dispatch("b"), s.dispatch("c", retain_base=False)
    assert torch.equal(one.message.start, start.to(dtype).float())
    assert torch.equal(brings.message.start, start)
    assert s.memory["versions"] == 2 * P
    forward(s)
    assert s.memory["versions"] == 2 * P
    for ticket in (one, two):
        assert s.receive(ticket.id, Payload(ticket.message.start[None] + 1, 1)).accepted
        assert torch.equal(seen[-1].base, ticket.message.start)
        assert seen[-1].current.dtype == seen[-1].base.dtype == torch.float32
    assert s.memory["versions"] == 0
    forward(s)
    assert s.model.dtype == torch.float32


def test_rounded_base_gives_a_fresh_update_a_drift():
    """The drift is the rounding error of the base, which is the price of a narrow dtype."""
    start = torch.full((P,), 1.0 + 2**-12)
    receipts = []
    for dtype in (None, torch.bfloat16):
        s = server(FedAsync(0.5), start, base_dtype=dtype)
        receipts.append(s.receive(s.dispatch("a").id, Payload(torch.full((1, P), 2.0), 1)))
    exact, rounded = (receipt.cosine for receipt in receipts)
    assert exact != exact
    assert rounded == pytest.approx(1.0)


def test_version_that_overflows_the_narrow_dtype_is_stored_unrounded():
    start = torch.full((P,), 1e6)
    s = server(Forgetful(), start, base_dtype=torch.float16)
    ticket = s.dispatch("a")
    assert torch.equal(ticket.message.start, start)
    forward(s)
    assert s.memory["versions"] == MODEL
    assert s.receive(ticket.id, Payload(start[None] + 1, 1)).accepted


@given(
    seeds,
    st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=25),
    st.sampled_from([0, 30, 60]),
)
def test_memory_limit_does_not_change_the_results(seed, script, limit):
    plain, tight, open_ = server(AsyncMemory(0.5)), server(AsyncMemory(0.5), memory_limit=limit), {}
    for i, (client, answers, retain_base) in enumerate(script):
        if client not in open_:
            open_[client] = [s.dispatch(client, retain_base=retain_base) for s in (plain, tight)], retain_base
            continue
        tickets, kept = open_.pop(client)
        assert bits(tickets[0].message) == bits(tickets[1].message)
        if not answers:
            for s, ticket in zip((plain, tight), tickets, strict=True):
                s.drop(ticket.id)
            continue
        payload = Payload(draw(seed + i, 2, P, dtype=torch.float32), 1, base=None if kept else tickets[0].message.start)
        receipts = [s.receive(ticket.id, payload) for s, ticket in zip((plain, tight), tickets, strict=True)]
        assert bits(receipts[0]) == bits(receipts[1])
        used = tight.memory
        assert used["versions"] + used["clients"] <= limit
        assert (
            used["versions"] + used["clients"] + used["spilled"] == plain.memory["versions"] + plain.memory["clients"]
        )
    before, after = fingerprint(plain), fingerprint(tight)
    assert all(before[name] == after[name] for name in ("model", "state", "contents", "history", "weights"))


class AsyncMemory(AsyncBezier):
    """Rule that sends each client the point from its previous update."""

    def message(self, space, state, current, client_state):
        message = super().message(space, state, current, client_state)
        return message if client_state is None else type(message)(current, {"last": client_state["last"]})

    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        same = update.client_state is not None and bool((update.points[0] < 0).all())
        return state, Outcome(
            outcome.model, update.client_state if same else {"last": update.points[-1]}, outcome.numbers
        )


@needs_maps
def test_files_are_mapped_and_freed_with_their_last_reference(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    old = [s.dispatch(name) for name in "ab"]
    forward(s)
    # The version of both tickets, and the state of the client whose update was applied.
    assert len(mapped(tmp_path)) == 2
    assert s.memory["spilled"] == 2 * MODEL
    s.drop(old[0].id)
    assert len(mapped(tmp_path)) == 2
    s.drop(old[1].id)
    assert len(mapped(tmp_path)) == 1
    forward(s)
    assert len(mapped(tmp_path)) == 1
    forward(s, "another")
    assert len(mapped(tmp_path)) == 2
    assert list(tmp_path.iterdir()) == open_files(tmp_path) == []


def test_a_spilled_tree_is_copied_unless_it_is_only_read(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    s.dispatch("a")
    forward(s)
    store = s._state.value.store
    before = bits(store.load(("version", 0)))
    store.load(("version", 0)).add_(1)
    assert bits(store.load(("version", 0), copy=False)) == before
    assert store.load(("version", 0), copy=False).data_ptr() == store.load(("version", 0), copy=False).data_ptr()
    assert store.load(("version", 7), copy=False) is None


@needs_maps
def test_closing_frees_every_file(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    s.dispatch("a")
    forward(s)
    assert mapped(tmp_path)
    s.close()
    assert mapped(tmp_path) == []
    assert s.model.tolist() == [1.0] * P


@needs_maps
def test_a_deleted_server_leaves_no_file(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    s.dispatch("a")
    forward(s)
    assert mapped(tmp_path)
    del s
    gc.collect()
    assert mapped(tmp_path) == []


def test_unwritable_tree_stays_in_memory(tmp_path, caplog, monkeypatch):
    s = server(memory_limit=0, spill=tmp_path)
    ticket = s.dispatch("a")

    def full(self, tree):
        raise SpillError("spill: no space left", temporary=True)

    with monkeypatch.context() as patch:
        patch.setattr(Spill, "write", full)
        forward(s)
        assert s.memory["versions"] == MODEL
        assert "('version', 0) stays in memory: spill: no space left" in caplog.text
        assert s.receive(ticket.id, Payload(torch.ones(1, P), 1)).accepted
    assert s.model.tolist() == [2.0] * P
    assert s.memory["clients"] == 2 * MODEL
    forward(s)
    assert (s.memory["clients"], s.memory["spilled"]) == (0, 2 * MODEL)


def test_unspillable_tree_does_not_block_other_trees(tmp_path, caplog):
    class Odd(Adds):
        def step(self, space, state, update, *, out=None):
            state, outcome = super().step(space, state, update, out=out)
            memory = outcome.client_state | ({"odd": torch.ones(4).to_sparse()} if update.client == "odd" else {})
            return state, Outcome(outcome.model, memory, outcome.numbers)

    s = server(Odd(), memory_limit=0, spill=tmp_path)
    for name in ("odd", "a", "b"):
        forward(s, name)
    assert "('client', 'odd') stays in memory" in caplog.text
    # Four values of 4 bytes, four indices of 8, and what the others have too.
    assert (s.memory["clients"], s.memory["spilled"]) == (48 + MODEL, 2 * MODEL)
    assert s._state.value.store.load(("client", "odd"))["odd"].is_sparse


def test_dispatch_with_damaged_file_fails_without_side_effects(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    forward(s)
    late = s.dispatch("walker")
    assert alter(s) == 1
    before = s._state.value
    with pytest.raises(SpillError, match=f"{tmp_path}.* altered"):
        s.dispatch("walker")
    assert s._state.value is before
    receipt = s.receive(late.id, Payload(torch.ones(1, P), 1))
    assert not receipt.accepted
    assert str(tmp_path) in receipt.reason
    assert s.receive(late.id, Payload(torch.ones(1, P), 1)) is receipt
    assert s.rejected == {"spill": 1}
    forward(s, "another")


def test_lost_base_does_not_block_dispatch_of_the_same_version(tmp_path):
    s = server(FedBuff(size=2), memory_limit=0, spill=tmp_path, base_dtype=torch.bfloat16)
    late = s.dispatch("late")
    forward(s)
    assert s.version == 0
    assert alter(s) == 1
    again = s.dispatch("again")
    assert torch.equal(again.message.start, late.message.start)
    assert "altered" in s.receive(late, Payload(torch.ones(1, P), 1)).reason


def test_tree_released_while_it_is_written_leaves_no_file(tmp_path, monkeypatch):
    s = server(Forgetful(), memory_limit=0, spill=tmp_path)
    ticket, write = s.dispatch("a"), Spill.write

    def vanishing(self, tree):
        filed = write(self, tree)
        s.drop(ticket.id)
        return filed

    with monkeypatch.context() as patch:
        patch.setattr(Spill, "write", vanishing)
        forward(s)
    assert (versions(s), mapped(tmp_path), s.memory["spilled"]) == ([1], [], 0)


@pytest.mark.usefixtures("as_shipped")
def test_spilling_only_visits_the_spilled_trees():
    """The cost does not depend on the number of trees that are already in files or have no data."""
    counts = []
    filed = Spill().write(torch.ones(1))
    for clients in (10, 300):
        store = Store()
        for i in range(clients):
            store = store.retain(("client", i), InMemoryTree({"count": i})).retain(
                ("client", -1 - i), InMemoryTree(torch.ones(1))
            )
        lines = []

        def each(frame, event, arg, lines=lines):
            lines.append(event)
            return each

        while (over := store.next_victim(0, exclude=("version", 0))) is not None:
            lines.clear()
            sys.settrace(each)
            try:
                assert store.next_victim(0, exclude=("version", 0)) == over
                store = store.evicted(*over, filed)
            finally:
                sys.settrace(None)
        assert store.memory_usage(("version", 0))["spilled"] == 4 * clients
        counts.append(len(lines))
    assert counts[0] == counts[1]


KEYS = [("version", 0), ("version", 1), ("base", 0), ("client", "a"), ("client", "b")]


@given(st.lists(st.tuples(st.lists(st.sampled_from(KEYS)), st.lists(st.sampled_from(KEYS), unique=True)), max_size=8))
def test_one_replacement_equals_several_single_steps(script):
    trees = {key: InMemoryTree(torch.ones(i)) for i, key in enumerate(KEYS)}
    trees["base", 0] = Spill().write(torch.ones(3))
    store = single = Store()
    for released, retained in script:
        held = {key: references for key, (_, references) in single.entries.items()}
        released = [key for i, key in enumerate(released) if released[:i].count(key) < held.get(key, 0)]
        store = store.replaced(released, {key: trees[key] for key in retained})
        for key in released:
            single = single.release(key)
        for key in retained:
            single = single.retain(key, trees[key])
        assert dict(store.entries) == dict(single.entries)
        assert list(store.evictable) == list(single.evictable)
        assert store.memory_usage(KEYS[0]) == single.memory_usage(KEYS[0])
        by_kind = {"version": 0, "base": 0, "client": 0, "spilled": 0}
        for key, (tree, _) in store.entries.items():
            by_kind["spilled" if key == ("base", 0) else key[0]] += tree.size
        assert {kind: store.used_bytes.get(kind, 0) for kind in by_kind} == by_kind


def test_failed_replacement_changes_nothing():
    store = Store().retain(("version", 0), InMemoryTree(torch.ones(1)))
    for released, retained in (([("version", 1)], {}), ([("version", 0)] * 2, {}), ([], {("version", 1): None})):
        with pytest.raises(KeyError):
            store.replaced(released, retained)
    assert (dict(store.entries).keys(), store.memory_usage(("version", 1))["version"]) == ({("version", 0)}, 4)


RESIDENT = """
import sys, torch
from manifoldagg import Server
from manifoldagg.federated import MemoryPolicy, Payload
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat

def resident():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

P = 250_000
server = Server(Flat(P), FedAsync(0.5), torch.zeros(P), memory=MemoryPolicy(2 * 10**6, sys.argv[1]))
for i in range(100):
    if i == 10:
        before = resident()
    server.dispatch(("away", i))
    ticket = server.dispatch("here")
    assert server.receive(ticket.id, Payload(ticket.message.start[None] + torch.randn(1, P), 1)).accepted
print(resident() - before, server.memory["spilled"] / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux says what is resident")
def test_memory_limit_bounds_the_memory_of_the_process(tmp_path):
    """Ninety versions of one million bytes are spilled.

    Without returning freed memory to the system, the process would keep most of it.
    """
    command = [sys.executable, "-c", RESIDENT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    grown, spilled = map(float, done.stdout.split())
    assert spilled > 80
    assert grown < spilled / 4
