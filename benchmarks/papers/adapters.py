r"""Compare ways to combine low-rank adapters that clients of different speeds train on a frozen transformer.

    python benchmarks/papers/adapters.py --data build/data

The base transformer is trained on a text of plays, without the speeches of the 40 speakers with the most text, and is
then frozen. A seed draws the clients from these speakers. A client receives an adapter, trains a low-rank product $B A$
for every weight of attention and MLP with a few steps of Adam, and returns it. The fastest clients are up to eight
times as fast as the slowest. The server applies each update on arrival with the weight
$\rho = \min(1, \alpha N n_i / \sum_j n_j)$. The ways to combine adapters are:

* *factors*: FedAsync on $A$ and $B$ as plain vectors.
* *residuals*: the same, and the frozen weight absorbs the error of the mean of products (after FedEx-LoRA):
  $W' = W + [(1 - \rho) B A + \rho B_i A_i] - B' A'$. Clients also receive this change.
* *matrices*: FedAsync on points of `LowRank`, one for each pair of factors (`adapters=True`).
* *OrthoDC*: FedOrtho instead of FedAsync, on factors and on matrices.
* *tangent*: the same with `transport="projection"`.
* *as sent*: FedAsync on matrices, for clients of a lower rank than the server. Such a client receives the nearest
  adapter of its rank, and the server moves towards the returned adapter alone. In all other ways, the server adds the
  part that it did not send to the returned adapter.

The settings are:

* *common*: all clients have rank 4.
* *ranks*: the clients have the ranks 2, 4 and 8, and the server has rank 8.
* *gauges*: the same ranks. Each client also multiplies its factors by a random matrix of condition 4, new for each
  update: $B G$ and $G^{-1} A$.

To make the clients differ from the base, a third of them writes without capitals, a third only in capitals, and a third
without punctuation. The local rate and $\alpha$ are selected for each way and setting from the same grid, on another
seed and on a part of the clients' text that no test run uses for testing. The loss is that of the server model in nats
per character, on the last fifth of the text of each client. A seed determines the clients, their speeds, batches and
gauges, which are equal for all ways. All seeds share one base.

Bytes are those of float32 adapters in both directions. For *residuals*, they include the change of the frozen weights
since the last visit of the client, as factors or as matrices, whichever is smaller. Each finished run is a row of
`adapters.jsonl` and is not repeated. The tables are computed from the finished runs.
"""

import argparse
import math
import platform
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import manifoldagg
from manifoldagg import Server, average_adapters
from manifoldagg._io import new_figure
from manifoldagg.errors import DivergenceError
from manifoldagg.experiments.models import Signature, transformer
from manifoldagg.experiments.statistics import MeanCI, mean_ci
from manifoldagg.federated import Rule, rules
from manifoldagg.simulation import IndependentClients, LogNormal

sys.path.insert(0, str(Path(__file__).parents[1]))
from runs import Row, Runs

HERE = Path(__file__).parent
POOL = 40
"""The number of speakers with the most text, from whom the clients are drawn."""
TUNED_ON = (100,)
TEST_SEEDS = tuple(range(5))
CONDITION = 4.0
SPREAD = 3.0
"""The range of the mean task times of clients, in powers of two."""
State = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """The settings of a run.

    Attributes:
        clients: the number of clients.
        num_updates: the number of updates of all clients.
        steps: the number of Adam steps per update.
        batch: the number of sequences per step.
        length: the number of characters per sequence.
        width: the width of the transformer.
        layers: the number of layers of the transformer.
        base: the number of training steps of the base, each with 16 sequences.
        held: the maximum number of held-out sequences.
        eval_every: the number of updates between two evaluations.
        rates: the local rates to select from.
        shares: the values of $\\alpha$ to select from.
    """

    clients: int = 16
    num_updates: int = 96
    steps: int = 6
    batch: int = 4
    length: int = 64
    width: int = 64
    layers: int = 2
    base: int = 1000
    held: int = 256
    eval_every: int = 16
    rates: tuple[float, ...] = (1e-2,)
    shares: tuple[float, ...] = (0.1, 0.25, 0.6)

    def looks(self, done: int) -> bool:
        """Return whether to evaluate after this number of updates.

        Evaluations are more frequent at first, when *residuals* reach the number of bytes of the other ways.
        """
        return (
            done % self.eval_every == 0
            or done == self.num_updates
            or (done < 3 * self.eval_every and done % (self.eval_every // 4) == 0)
        )


FULL = Size()
QUICK = Size(clients=4, num_updates=8, steps=2, batch=2, length=32, width=16, layers=1, base=4, held=50, eval_every=4)


@dataclass(frozen=True)
class Setting:
    """The properties of the clients.

    Attributes:
        ranks: the ranks, which are assigned to the clients cyclically. The server has the largest rank.
        gauges: whether each client changes the basis of its factors.
    """

    ranks: tuple[int, ...]
    gauges: bool = False

    @property
    def rank(self) -> int:
        """The rank of the server."""
        return max(self.ranks)


SETTINGS = {"common": Setting((4,)), "gauges": Setting((2, 4, 8), gauges=True), "ranks": Setting((2, 4, 8))}


@dataclass(frozen=True)
class Way:
    """A way to combine adapters.

    Attributes:
        rule: a function that returns the rule for $\\alpha$ times the number of clients, or `None` for `Residuals`.
        matrices: whether each pair of factors is one point of `LowRank`.
        keeps: whether the server keeps the part of the adapter that a client of a lower rank did not receive.
    """

    rule: Callable[[float], Rule] | None
    matrices: bool = True
    keeps: bool = True


def mixing(rate: float) -> Rule:
    """Return FedAsync with weights in proportion to the samples of the clients."""
    return rules.FedAsync(rate, weighted=True)


WAYS = {
    "factors": Way(mixing, matrices=False),
    "factors, OrthoDC": Way(rules.FedOrtho, matrices=False),
    "residuals": Way(None, matrices=False),
    "matrices": Way(mixing),
    "matrices, OrthoDC": Way(rules.FedOrtho),
    "matrices, OrthoDC, tangent": Way(partial(rules.FedOrtho, transport="projection")),
    "matrices, as sent": Way(mixing, keeps=False),
}


def ways_of(setting: str) -> list[str]:
    """Return the ways that differ from each other in a setting."""
    return [name for name, way in WAYS.items() if way.keeps or len(set(SETTINGS[setting].ranks)) > 1]


class World:
    """The text, its speakers, and the frozen transformer.

    Args:
        data: the folder of the text of plays.
        size: the settings of a run.
        cache: the folder that stores the frozen transformer.
    """

    def __init__(self, data: Path, size: Size, cache: Path) -> None:
        self.size = size
        text = (data / "input.txt").read_text()
        self._number = {character: i for i, character in enumerate(sorted(set(text)))}
        said: dict[str, list[str]] = {}
        for speech in text.split("\n\n"):
            name, colon, words = speech.strip("\n").partition(":\n")
            if colon and "\n" not in name:
                said.setdefault(name, []).append(words)
        whole = sorted(("\n".join(speeches) for speeches in said.values()), key=len, reverse=True)
        self.pool = whole[:POOL]
        tokens = len(self._number)
        torch.manual_seed(0)
        self.model = transformer(
            Signature((size.length,), tokens, tokens, per_token=True), width=size.width, layers=size.layers
        )
        path = (
            cache / f"adapters-{zlib.crc32(text.encode()):08x}-{size.width}-{size.layers}-{size.length}-{size.base}.pt"
        )
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._learn(self.cut("\n".join(whole[POOL:])))
            torch.save(self.model.state_dict(), path)
        self.model.load_state_dict(torch.load(path, weights_only=True))
        self.model.requires_grad_(False)
        self.base = dict(self.model.named_parameters())
        self.weights = {
            name.removesuffix("weight").rstrip("._"): name
            for name, weight in self.base.items()
            if name.startswith("layers.layers.") and weight.ndim == 2
        }

    def cut(self, text: str) -> Tensor:
        """Split a text into sequences of tokens, (any, length + 1)."""
        tokens = torch.tensor([self._number[character] for character in text])
        return tokens.unfold(0, self.size.length + 1, self.size.length)

    def _learn(self, sequences: Tensor) -> None:
        """Train the base."""
        draw = np.random.default_rng(0)
        optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.size.base)
        for _ in range(self.size.base):
            chosen = sequences[draw.integers(len(sequences), size=16)]
            optimizer.zero_grad()
            cross_entropy(self.model(chosen[:, :-1]), chosen[:, 1:]).backward()
            optimizer.step()
            falling.step()

    def start(self, rank: int, seed: int) -> State:
        """Return an initial adapter, with A drawn as in PEFT and B = 0."""
        draw = torch.Generator().manual_seed(seed)
        found = {}
        for stem, name in self.weights.items():
            m, n = self.base[name].shape
            found[f"{stem}.lora_A.weight"] = (2 * torch.rand(rank, n, generator=draw) - 1) / math.sqrt(n)
            found[f"{stem}.lora_B.weight"] = torch.zeros(m, rank)
        return found

    def loss(self, adapter: Mapping[str, Tensor], beside: Mapping[str, Tensor], samples: Tensor) -> Tensor:
        """Return the loss of the base with an adapter, and with the changes `beside` of frozen weights by stem."""
        own = {}
        for stem, name in self.weights.items():
            own[name] = self.base[name] + adapter[f"{stem}.lora_B.weight"] @ adapter[f"{stem}.lora_A.weight"]
            if stem in beside:
                own[name] = own[name] + beside[stem]
        return cross_entropy(functional_call(self.model, own, (samples[:, :-1],)), samples[:, 1:])


STYLES: tuple[Callable[[str], str], ...] = (
    str.lower,
    str.upper,
    lambda text: "".join(c for c in text if c.isalpha() or c.isspace()),
)
"""The writing styles of clients: without capitals, only in capitals, and without punctuation."""


@dataclass(frozen=True)
class Cast:
    """The clients of a seed.

    Attributes:
        train: the training tokens of each client, (sequences, length + 1).
        held: the held-out tokens of all clients, (sequences, length + 1).
        paces: the mean seconds per task of each client.
    """

    train: list[Tensor]
    held: Tensor
    paces: list[float]

    @staticmethod
    def of(world: World, seed: int, *, tuning: bool) -> "Cast":
        """Draw the clients. Test runs hold out the last fifth of a text, and tuning runs the fifth before it."""
        draw = np.random.default_rng([seed, 0])
        train, held = [], []
        styles = draw.permutation(np.arange(world.size.clients) % len(STYLES))
        for speaker, style in zip(draw.choice(POOL, world.size.clients, replace=False), styles, strict=True):
            own = world.cut(STYLES[style](world.pool[speaker]))
            end = len(own) - len(own) // 5
            cut = end - len(own) // 5 if tuning else end
            train.append(own[:cut])
            held.append(own[cut:end] if tuning else own[end:])
        every = torch.cat(held)
        some = torch.linspace(0, len(every) - 1, min(len(every), world.size.held)).long()
        return Cast(train, every[some], (2.0 ** draw.uniform(0, SPREAD, world.size.clients)).tolist())


@dataclass(frozen=True)
class Given:
    """A message to a client.

    Attributes:
        adapter: the adapter of the rank of the client.
        bytes: the number of sent bytes.
        rest: the part of the server's adapter that was not sent.
        told: the ticket of the server.
        beside: the changes of the frozen weights, by stem.
    """

    adapter: State
    bytes: int
    rest: State
    told: Any
    beside: State = field(default_factory=dict)


class Hub:
    """A server of the library that truncates adapters for clients of lower ranks."""

    def __init__(self, way: Way, setting: Setting, start: State, share: float, samples: Sequence[int]) -> None:
        assert way.rule is not None
        self._way, self._setting, self._samples = way, setting, samples
        sizes = dict(enumerate(samples))
        self._server = Server.of(start, way.rule(share * len(samples)), adapters=way.matrices, weights=sizes)

    def send(self, client: int) -> Given:
        """Return a message for a client."""
        ticket = self._server.dispatch(client)
        rank = self._setting.ranks[client % len(self._setting.ranks)]
        cut = nearest if self._way.matrices else first
        adapter, rest = cut(ticket.state_dict(), rank) if rank < self._setting.rank else (ticket.state_dict(), {})
        return Given(adapter, size_of(adapter), rest if self._way.keeps else {}, ticket)

    def take(self, client: int, given: Given, answer: State) -> None:
        """Apply the update of a client."""
        whole = beside(answer, given.rest)
        self._server.receive_model(given.told, whole, samples=self._samples[client]).check()

    def adapter(self) -> State:
        """Return the adapter of the server."""
        return self._server.state_dict()

    def frozen(self) -> State:
        """Return the changes of the frozen weights, by stem."""
        return {}


class Residuals:
    """A server that averages factors and adds the error of the mean of products to the frozen weights."""

    def __init__(self, way: Way, setting: Setting, start: State, share: float, samples: Sequence[int]) -> None:
        self._setting, self._share, self._samples = setting, share, samples
        self._adapter, self._version = start, 0
        self._residual = {stem: torch.zeros_like(change) for stem, change in products(start).items()}
        self._seen = dict.fromkeys(range(len(samples)), 0)

    def send(self, client: int) -> Given:
        """Return a message with the factors and the change of the residual since the last message."""
        rank = self._setting.ranks[client % len(self._setting.ranks)]
        adapter, rest = first(self._adapter, rank)
        since = self._version - self._seen[client]
        self._seen[client] = self._version
        changed = 0
        for change in self._residual.values():
            m, n = change.shape
            changed += min(since * self._setting.rank * (m + n), m * n) * change.itemsize
        return Given(adapter, size_of(adapter) + changed, rest, None, beside=dict(self._residual))

    def take(self, client: int, given: Given, answer: State) -> None:
        """Apply the update of a client."""
        whole = beside(answer, given.rest)
        rho = min(1.0, self._share * len(self._samples) * self._samples[client] / sum(self._samples))
        before, theirs = products(self._adapter), products(whole)
        self._adapter = {name: x + rho * (whole[name] - x) for name, x in self._adapter.items()}
        after = products(self._adapter)
        self._residual = {
            stem: x + before[stem] + rho * (theirs[stem] - before[stem]) - after[stem]
            for stem, x in self._residual.items()
        }
        self._version += 1

    def adapter(self) -> State:
        """Return the adapter of the server."""
        return self._adapter

    def frozen(self) -> State:
        """Return the changes of the frozen weights, by stem."""
        return self._residual


def pairs(adapter: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Yield the names of A and B of each pair."""
    for name in adapter:
        if "lora_A" in name:
            yield name, name.replace("lora_A", "lora_B")


def products(adapter: Mapping[str, Tensor]) -> State:
    """Return the product of each pair, by the stem of its weight."""
    return {a.removesuffix(".lora_A.weight"): adapter[b] @ adapter[a] for a, b in pairs(adapter)}


def size_of(adapter: Mapping[str, Tensor]) -> int:
    """Return the size of an adapter in bytes."""
    return sum(x.nbytes for x in adapter.values())


def nearest(adapter: State, rank: int) -> tuple[State, State]:
    """Return the nearest adapter of a rank, and the residual."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "adapters: at .* two singular values are equal")
        found, info = average_adapters([adapter], None, rank, return_info=True)
    return found, info.residual


def first(adapter: State, rank: int) -> tuple[State, State]:
    """Return an adapter of the first rows of A and columns of B, and an adapter of the others."""
    found, rest = {}, {}
    for a, b in pairs(adapter):
        found |= {a: adapter[a][:rank].clone(), b: adapter[b][:, :rank].clone()}
        rest |= {a: adapter[a][rank:], b: adapter[b][:, rank:]}
    return found, rest


def beside(adapter: State, rest: Mapping[str, Tensor]) -> State:
    """Concatenate an adapter and its rest."""
    found = dict(adapter)
    for a, b in pairs(rest):
        found |= {a: torch.cat([adapter[a], rest[a]]), b: torch.cat([adapter[b], rest[b]], 1)}
    return found


def turned(adapter: State, draw: torch.Generator) -> State:
    """Return other factors with the same products."""
    found = {}
    for a, b in pairs(adapter):
        rank = len(adapter[a])
        left, right = (torch.linalg.qr(torch.randn(rank, rank, generator=draw, dtype=torch.float64)).Q for _ in "lr")
        values = torch.logspace(-0.5, 0.5, rank, base=CONDITION, dtype=torch.float64)
        found[a] = (right.mT / values @ left.mT @ adapter[a].double()).float()
        found[b] = (adapter[b].double() @ (left * values @ right)).float()
    return found


def fitted(world: World, given: Given, samples: Tensor, rate: float, draw: np.random.Generator) -> State:
    """Train the adapter of a client."""
    leaves = {name: x.clone().requires_grad_() for name, x in given.adapter.items()}
    optimizer = torch.optim.Adam(leaves.values(), rate)
    for _ in range(world.size.steps):
        chosen = samples[draw.integers(len(samples), size=world.size.batch)]
        optimizer.zero_grad()
        loss = world.loss(leaves, given.beside, chosen)
        if not loss.isfinite():
            raise DivergenceError(f"loss: {loss.item()}")
        loss.backward()
        optimizer.step()
    return {name: x.detach() for name, x in leaves.items()}


@torch.no_grad()
def held_out(world: World, hub: Hub | Residuals, samples: Tensor) -> float:
    """Return the loss of the server model."""
    adapter, residual = hub.adapter(), hub.frozen()
    total = sum(world.loss(adapter, residual, part).item() * len(part) for part in samples.split(256))
    return total / len(samples)


def trained(world: World, setting: str, name: str, rate: float, share: float, seed: int, *, tuning: bool) -> Row:
    """Run one training and return its row."""
    started = time.process_time()
    cast, kind = Cast.of(world, seed, tuning=tuning), SETTINGS[setting]
    sizes = [len(part) for part in cast.train]
    make = Residuals if WAYS[name].rule is None else Hub
    hub = make(WAYS[name], kind, world.start(kind.rank, seed), share, sizes)
    clock = IndependentClients(
        {i: LogNormal(pace, pace / 4) for i, pace in enumerate(cast.paces)}, np.random.default_rng([seed, 1])
    )
    count = [0] * len(sizes)
    out: dict[int, Given] = {}
    down = up = late = 0

    def ask(client: int) -> None:
        nonlocal down
        out[client] = hub.send(client)
        down += out[client].bytes
        clock.dispatch(client, 1)

    for client in range(len(sizes)):
        ask(client)
    log: list[Row] = []

    def look(update: int, now: float) -> None:
        loss = held_out(world, hub, cast.held)
        log.append({"updates": update, "time": now, "down": down, "up": up, "loss": loss})

    look(0, 0.0)
    try:
        for done in range(1, world.size.num_updates + 1):
            event = clock.next()
            client = event.client
            late += event.relative_delay
            key = [seed, 2, client, count[client]]
            count[client] += 1
            answer = fitted(world, out[client], cast.train[client], rate, np.random.default_rng(key))
            if kind.gauges:
                answer = turned(answer, torch.Generator().manual_seed(int(np.random.default_rng(key).integers(2**60))))
            up += size_of(answer)
            hub.take(client, out[client], answer)
            if done == world.size.num_updates or (world.size.looks(done) and not tuning):
                look(done, event.time)
            ask(client)
    except DivergenceError as error:
        print(f"{setting}, {name}, rate {rate:g}, share {share:g}: {error}")
        log.append({"updates": done, "time": event.time, "down": down, "up": up, "loss": None})
    return {"log": log, "staleness": late / world.size.num_updates, "seconds": time.process_time() - started}


class Rows(Runs):
    """Finished runs of any grid."""

    free = ("rates", "shares")

    def trials(self, setting: str, way: str) -> dict[tuple[float, float], float]:
        """Return the mean final loss of each pair of rates for which all tuning seeds are finished."""
        grid = product(self._size["rates"], self._size["shares"])
        found = {}
        for rate, share in grid:
            done = [
                self.found(setting=setting, way=way, rate=rate, share=share, seed=seed, tuning=True)
                for seed in TUNED_ON
            ]
            if all(row is not None for row in done):
                found[rate, share] = sum(loss_of(row) for row in done if row is not None) / len(done)
        return found

    def chosen(self, setting: str, way: str) -> tuple[float, float] | None:
        """Return the pair of rates with the lowest loss, if all trials are finished."""
        trials = self.trials(tuned_in(setting, way), way)
        whole = len(trials) == len(self._size["rates"]) * len(self._size["shares"])
        return min(trials, key=lambda pair: trials[pair]) if whole else None

    def tests(self, setting: str) -> dict[str, dict[int, Row]]:
        """Return the test runs with the selected rates, by way and seed."""
        found: dict[str, dict[int, Row]] = {}
        for way in ways_of(setting):
            pair = self.chosen(setting, way)
            if pair is None:
                continue
            key = {"setting": setting, "way": way, "rate": pair[0], "share": pair[1], "tuning": False}
            done = {row["seed"]: row for row in self._rows if key.items() <= row.items()}
            if done:
                found[way] = dict(sorted(done.items()))
        return found


def loss_of(row: Row, budget: float = math.inf) -> float:
    """Return the last loss within a budget of bytes."""
    losses = [entry["loss"] for entry in row["log"] if entry["down"] + entry["up"] <= budget]
    return math.inf if not losses or losses[-1] is None else float(losses[-1])


def tuned_in(setting: str, way: str) -> str:
    """Return the setting in which the rates of a way are selected. The basis of factors does not affect matrices."""
    return "gauges" if setting == "ranks" and WAYS[way].matrices else setting


def tail_loss_of(row: Row) -> float:
    """Return the mean loss over the last third of the updates, because single evaluations fluctuate."""
    end = row["log"][-1]["updates"]
    losses = [entry["loss"] for entry in row["log"] if 3 * entry["updates"] >= 2 * end]
    return math.inf if None in losses else float(np.mean(losses))


def spent(row: Row) -> int:
    """Return the number of bytes at the end of a run."""
    return int(row["log"][-1]["down"] + row["log"][-1]["up"])


def work(
    world: World, rows: Rows, settings: Sequence[str], names: Sequence[str], seeds: Sequence[int], until: float
) -> None:
    """Run the missing trials of each setting, and then all ways for one test seed after another."""

    def once(setting: str, way: str, pair: tuple[float, float], seed: int, *, tuning: bool) -> None:
        rate, share = pair
        key = {"setting": setting, "way": way, "rate": rate, "share": share, "seed": seed, "tuning": tuning}
        if rows.found(**key) is None and time.monotonic() < until:
            row = key | trained(world, setting, way, rate, share, seed, tuning=tuning)
            rows.add(row)
            told = f"rate {rate:<6g} share {share:<4g} seed {seed:<4}"
            print(f"{setting:<7} {way:<27} {told} {loss_of(row):.4f}  {row['seconds']:.0f} s", flush=True)

    for setting in settings:
        ways = [way for way in ways_of(setting) if way in names]
        for way in ways:
            for seed in TUNED_ON:
                for pair in product(world.size.rates, world.size.shares):
                    once(tuned_in(setting, way), way, pair, seed, tuning=True)
        for seed in seeds:
            for way in ways:
                pair = rows.chosen(setting, way)
                if pair is not None:
                    once(setting, way, pair, seed, tuning=False)


def less(scores: Mapping[int, float], others: Mapping[int, float]) -> MeanCI | None:
    """Return the difference to the losses of another way, over the seeds of both."""
    both = [scores[seed] - others[seed] for seed in scores if seed in others]
    return mean_ci(both) if both and all(map(math.isfinite, both)) else None


def said(mean: MeanCI | None, sign: str = "") -> str:
    """Format a mean with half the width of its confidence interval."""
    if mean is None:
        return "-"
    return f"{mean.value:{sign}.4f}" if mean.half_width is None else f"{mean.value:{sign}.4f} +- {mean.half_width:.4f}"


def tables(rows: Rows, size: Size, command: str) -> list[str]:
    """Return the tables of the finished runs in Markdown."""
    lines = [
        "# Adapters put together: nats a character",
        "",
        f"`{command}`; rates chosen on {', '.join(map(str, TUNED_ON))}. "
        f"manifoldagg {manifoldagg.__version__}, torch {torch.__version__}, numpy {np.__version__}, Python "
        f"{platform.python_version()}, one thread.",
        "",
        f"{size.clients} clients, {size.num_updates} answers of {size.steps} steps of Adam with {size.batch} sequences "
        f"of {size.length} characters; a transformer of {size.layers} layers of width {size.width}. Means over seeds "
        "with Student's intervals of 95 %; differences are paired by seed, above 0 where the way loses more. *Last "
        "third*: mean of the looks in the last third of the answers, as single looks jump.",
    ]
    for setting in SETTINGS:
        tests = rows.tests(setting)
        if not tests:
            continue
        # All ways have the same schedule, and all ways except *residuals* send the same number of bytes.
        budget = {seed: spent(row) for way, done in tests.items() if way != "residuals" for seed, row in done.items()}
        untrained = mean_ci([row["log"][0]["loss"] for row in next(iter(tests.values())).values()]).value
        lines += [
            "",
            f"## {setting}",
            "",
            f"Before any answer {untrained:.4f}. Equal bytes are those of *factors* at the end of the same seed.",
            "",
            "| way | seeds | share | MB | last third | less factors | less matrices | the end | less factors "
            "| equal bytes | less factors |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        read = {
            "tail": {way: {seed: tail_loss_of(row) for seed, row in done.items()} for way, done in tests.items()},
            "end": {way: {seed: loss_of(row) for seed, row in done.items()} for way, done in tests.items()},
            "equal": {
                way: {seed: loss_of(row, budget.get(seed, math.inf)) for seed, row in done.items()}
                for way, done in tests.items()
            },
        }
        for way, done in tests.items():
            pair = rows.chosen(setting, way)
            assert pair is not None
            sent = mean_ci([spent(row) for row in done.values()]).value
            cells = [way, str(len(done)), f"{pair[1]:g}", f"{sent / 1e6:.1f}"]
            for kind, others in (
                ("tail", ("factors", "matrices")),
                ("end", ("factors",)),
                ("equal", ("factors",)),
            ):
                cells.append(said(mean_ci(list(read[kind][way].values()))))
                cells += [said(less(read[kind][way], read[kind].get(other, {})), "+") for other in others]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "## Trials", "", "Loss at the end of each pair (local rate, share $\\alpha$), on the tuning seeds."]
    for setting in SETTINGS:
        for way in ways_of(setting):
            trials = rows.trials(tuned_in(setting, way), way)
            if trials and tuned_in(setting, way) == setting:
                told = "; ".join(f"({rate:g}, {share:g}) {loss:.4f}" for (rate, share), loss in trials.items())
                lines += ["", f"*{setting}*, {way}: {told}."]
    return lines


def draw(rows: Rows, path: Path) -> None:
    """Plot the loss over updates and over bytes, with one row per setting. Thin lines are single seeds."""
    found = {setting: tests for setting in SETTINGS if (tests := rows.tests(setting))}
    figure = new_figure(10, 3.6 * max(1, len(found)))
    for i, (setting, tests) in enumerate(found.items()):
        for j, (label, of) in enumerate(AXES.items()):
            axes = figure.add_subplot(len(found), len(AXES), len(AXES) * i + j + 1)
            for way, done in tests.items():
                colour = f"C{list(WAYS).index(way)}"
                logs = [[(of(entry), entry["loss"]) for entry in row["log"] if entry["loss"]] for row in done.values()]
                for log in logs:
                    axes.plot(*zip(*log, strict=True), color=colour, alpha=0.2, linewidth=0.8)
                common = min(map(len, logs))
                middle = np.array([log[:common] for log in logs]).mean(0)
                axes.plot(*middle.T, color=colour, label=way)
            axes.set(title=setting, xlabel=label, ylabel="nats a character")
            axes.set_ylim(top=axes.get_ylim()[0] + 1.8)
            if j:
                axes.set_xscale("log")
            axes.legend(fontsize=7, loc="upper right")
    figure.set_layout_engine("tight")
    figure.savefig(path, dpi=80)


AXES: Mapping[str, Callable[[Row], float]] = {
    "answers": lambda entry: entry["updates"],
    "bytes, both directions": lambda entry: entry["down"] + entry["up"],
}


def main() -> None:
    """Run the missing trainings and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("build/data"), help="the folder of tinyshakespeare/")
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="SETTING")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="WAY")
    parser.add_argument("--seeds", type=int, nargs="*", default=list(TEST_SEEDS))
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run after this time")
    parser.add_argument("--tables", action="store_true", help="only write the tables of the finished runs")
    parser.add_argument("--quick", action="store_true", help="a tiny run in build/papers that tests the script")
    options = parser.parse_args()
    torch.set_num_threads(1)
    size = QUICK if options.quick else FULL
    out = Path("build/papers") if options.quick else HERE.parent / "results" / "papers"
    out.mkdir(parents=True, exist_ok=True)
    rows = Rows(out / "adapters.jsonl", size)
    if not options.tables:
        world = World(options.data / "tinyshakespeare", size, Path("build/papers"))
        work(world, rows, options.settings, options.ways, options.seeds, time.monotonic() + 60 * options.minutes)
    lines = tables(rows, size, "python benchmarks/papers/adapters.py")
    print("", *lines, sep="\n")
    (out / "adapters.md").write_text("\n".join(lines) + "\n")
    draw(rows, out / "adapters.png")


if __name__ == "__main__":
    main()
