"""Versions and client memory: counted, accounted, narrowed, spilled, and gone at once."""

import gc
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifoldagg.federated import Outcome, Payload, Server
from manifoldagg.federated import store as store_module
from manifoldagg.federated.rules import AsyncBezier, FedAsync
from manifoldagg.federated.store import Store
from manifoldagg.manifolds import Flat
from tests.federated.fingerprint import Adds, bits, fingerprint, versions
from tests.support import draw, seeds

P = 6
SPACE = Flat(P)
MODEL = 4 * P


def server(rule=None, start=None, **options):
    return Server(SPACE, rule or Adds(), torch.zeros(P) if start is None else start, weights="uniform", **options)


def forward(s, name="walker", by=1.0):
    """One fresh update."""
    ticket = s.dispatch(name)
    receipt = s.receive(ticket.id, Payload(ticket.message.start[None] + by, 1))
    assert receipt.accepted
    return receipt


class Forgetful(Adds):
    """Keeps nothing for its clients."""

    def message(self, space, state, current, memory):
        return super().message(space, state, current, None)

    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        return state, Outcome(outcome.model, None, outcome.numbers)


def test_a_version_is_kept_once_and_freed_with_its_last_ticket():
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
def test_ten_thousand_clients_on_fifty_versions_cost_fifty_models():
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


def test_a_steady_run_allocates_one_model():
    s = server(Forgetful())
    places = set()
    for _ in range(20):
        forward(s)
        places.add(s._ledger.store[s._ledger.current].data_ptr())
    assert len(places) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(seeds)
def test_a_client_starts_from_exactly_the_base_that_is_kept(dtype, seed):
    seen = []

    class Watches(Adds):
        def step(self, space, state, update, *, out=None):
            seen.append(update)
            return super().step(space, state, update, out=out)

    start = draw(seed, P, dtype=torch.float32)
    s = server(Watches(), start, base_dtype=dtype)
    one, two, brings = s.dispatch("a"), s.dispatch("b"), s.dispatch("c", keep=False)
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


def test_rounded_bases_leave_a_drift():
    """What the narrow dtype costs: a fresh update has a drift, the rounding of its base."""
    start = torch.full((P,), 1.0 + 2**-12)
    receipts = []
    for dtype in (None, torch.bfloat16):
        s = server(FedAsync(0.5), start, base_dtype=dtype)
        receipts.append(s.receive(s.dispatch("a").id, Payload(torch.full((1, P), 2.0), 1)))
    exact, rounded = (receipt.cosine for receipt in receipts)
    assert exact != exact
    assert rounded == pytest.approx(1.0)


def test_a_version_that_overflows_the_narrow_dtype_is_kept_as_it_is():
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
def test_a_memory_limit_changes_where_things_are_and_nothing_else(seed, script, limit):
    plain, tight, open_ = server(AsyncMemory(0.5)), server(AsyncMemory(0.5), memory_limit=limit), {}
    for i, (client, answers, keep) in enumerate(script):
        if client not in open_:
            open_[client] = [s.dispatch(client, keep=keep) for s in (plain, tight)], keep
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
    """Hands a client the point it sent last."""

    def message(self, space, state, current, memory):
        message = super().message(space, state, current, memory)
        return message if memory is None else type(message)(current, {"last": memory["last"]})

    def step(self, space, state, update, *, out=None):
        state, outcome = super().step(space, state, update, out=out)
        same = update.memory is not None and bool((update.points[0] < 0).all())
        return state, Outcome(outcome.model, update.memory if same else {"last": update.points[-1]}, outcome.numbers)


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_files_are_mapped_and_go_with_their_last_holder(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    old = [s.dispatch(name) for name in "ab"]
    forward(s)
    # The version that both hold, and the memory of the client that has moved on.
    assert len(files(tmp_path)) == 2
    assert s.memory["spilled"] == 2 * MODEL
    if (maps := Path("/proc/self/maps")).exists():
        base = s._ledger.store[("version", 0)]
        assert str(files(tmp_path)[0]) in maps.read_text()
        del base
    s.drop(old[0].id)
    assert len(files(tmp_path)) == 2
    s.drop(old[1].id)
    assert len(files(tmp_path)) == 1
    forward(s)
    assert len(files(tmp_path)) == 1
    forward(s, "another")
    assert len(files(tmp_path)) == 2


def test_closing_removes_every_file(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    s.dispatch("a")
    forward(s)
    assert files(tmp_path)
    s.close()
    assert list(tmp_path.iterdir()) == []
    assert s.model.tolist() == [1.0] * P


def test_a_server_that_is_gone_leaves_no_file(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    s.dispatch("a")
    forward(s)
    assert files(tmp_path)
    del s
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_stays_in_memory(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    ticket = s.dispatch("a")
    tmp_path.rmdir()
    with pytest.warns(RuntimeWarning, match=r"memory_limit: .* stays in memory"):
        forward(s)
    assert s.memory["versions"] == MODEL
    with pytest.warns(RuntimeWarning, match=r"'client', 'walker'\) stays in memory"):
        assert s.receive(ticket.id, Payload(torch.ones(1, P), 1)).accepted
    assert s.model.tolist() == [2.0] * P


def test_one_tree_that_no_file_can_have_blocks_no_other(tmp_path):
    store, lock, warned = Store(0, tmp_path), threading.Lock(), r"'odd'\) stays in memory"
    odd = torch.ones(4).to_sparse()
    store.add(("client", "odd"), {"m": odd})
    for name in "ab":
        store.add(("client", name), {"m": torch.ones(1000)})
    with pytest.warns(RuntimeWarning, match=warned):
        store.spill(lock, without=("version", 0))
    # Four values of 4 bytes, four indices of 8.
    assert store.usage(("version", 0)) == {"version": 0, "base": 0, "client": 48, "spilled": 8000}
    store.spill(lock, without=("version", 0))
    assert store[("client", "odd")]["m"] is odd


def test_a_dispatch_whose_file_is_gone_leaves_no_trace(tmp_path):
    s = server(memory_limit=0, spill=tmp_path)
    forward(s)
    for path in files(tmp_path):
        path.unlink()
    before = repr(vars(s._ledger.weights)), s._ledger.store._kept[s._ledger.current].holders
    with pytest.raises(FileNotFoundError):
        s.dispatch("walker")
    assert (repr(vars(s._ledger.weights)), s._ledger.store._kept[s._ledger.current].holders) == before


def test_trees_from_files_are_placed_without_the_lock(tmp_path, monkeypatch):
    s = server(memory_limit=0, spill=tmp_path)
    late, place, placed = s.dispatch("walker"), torch.Tensor.to, []
    forward(s)
    assert len(files(tmp_path)) == 2

    def to(tensor, where, *options, **named):
        if isinstance(where, torch.device):
            placed.append(s._ledger.lock.locked())
        return place(tensor, where, *options, **named)

    monkeypatch.setattr(torch.Tensor, "to", to)
    s.dispatch("walker")
    assert s.receive(late.id, Payload(late.message.start[None] + 1, 1)).accepted
    assert len(placed) >= 3
    assert not any(placed)


def test_a_tree_that_goes_while_it_is_written_leaves_no_file(tmp_path):
    store, lock, key = Store(0, tmp_path), threading.Lock(), ("version", 0)

    class Vanishing(threading.Event):
        """A lock that releases the key when it is taken for the second time."""

        times = 0

        def __enter__(self):
            lock.acquire()
            self.times += 1
            if self.times == 2:
                store.release(key)

        def __exit__(self, *error):
            lock.release()

    store.add(key, torch.ones(3))
    store.spill(Vanishing(), without=("version", 1))
    assert (("version", 0) in store, files(tmp_path), store.usage(("version", 1))["spilled"]) == (False, [], 0)


@pytest.mark.usefixtures("as_shipped")
def test_spilling_asks_nobody_but_who_goes(tmp_path, monkeypatch):
    """However many are in files already, or have nothing to write."""
    monkeypatch.setattr(store_module, "_save", lambda path, tree: path.touch())
    counts = []
    for clients in (10, 300):
        store, lock = Store(0, tmp_path), threading.Lock()
        for i in range(clients):
            store.add(("client", i), {"count": i})
            store.add(("client", -1 - i), {"m": torch.ones(1)})
        store.spill(lock, without=("version", 0))
        store.add(("client", "last"), {"m": torch.ones(1)})
        lines = []

        def each(frame, event, arg, lines=lines):
            lines.append(event)
            return each

        sys.settrace(each)
        try:
            store.spill(lock, without=("version", 0))
        finally:
            sys.settrace(None)
        assert store.usage(("version", 0))["spilled"] == 4 * (clients + 1)
        counts.append(len(lines))
    assert counts[0] == counts[1]


RESIDENT = """
import sys, torch
from manifoldagg import Server
from manifoldagg.federated import Payload
from manifoldagg.federated.rules import FedAsync
from manifoldagg.manifolds import Flat

def resident():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) / 1024

P = 250_000
server = Server(Flat(P), FedAsync(0.5), torch.zeros(P), memory_limit=2 * 10**6, spill=sys.argv[1])
for i in range(100):
    if i == 10:
        before = resident()
    server.dispatch(("away", i))
    ticket = server.dispatch("here")
    assert server.receive(ticket.id, Payload(ticket.message.start[None] + torch.randn(1, P), 1)).accepted
print(resident() - before, server.memory["spilled"] / 2**20)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="only Linux says what is resident")
def test_the_limit_bounds_the_process_and_not_only_the_books(tmp_path):
    """Ninety versions of one million bytes go to files; without returning what they leave the process holds most."""
    command = [sys.executable, "-c", RESIDENT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    grown, spilled = map(float, done.stdout.split())
    assert spilled > 80
    assert grown < spilled / 4


@given(seeds)
def test_any_tree_comes_back_from_its_file(tmp_path_factory, seed):
    big = draw(seed, 4, 3)
    tree = {
        "view": big[1:, ::2],
        "again": [big, big, (big.float(), torch.tensor(3), None)],
        "flags": torch.tensor([True, False]),
        "narrow": big.bfloat16(),
        "words": {"phase": "gradient", "count": 3, "rate": 0.5},
        "empty": torch.zeros(0, 2),
    }
    store = Store(0, tmp_path_factory.mktemp("spill"))
    before = bits(tree)
    store.add(("client", seed), tree)
    store.spill(threading.Lock(), without=("version", 0))
    assert store.usage(("version", 0))["client"] == 0
    assert bits(store[("client", seed)]) == before
    assert bits(tree) == before
    store.close()
