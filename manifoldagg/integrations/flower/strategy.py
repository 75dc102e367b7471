"""The server side of the Flower integration: a strategy that dispatches a new task to each node that replies."""

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import flwr.app
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import nn

from manifoldagg._validation import check_choice, check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import CheckpointPolicy, Rule, Server
from manifoldagg.federated.server.client_sampling import ClientSampler, rule_attribute, sampler_for
from manifoldagg.federated.server.validation import check_rule
from manifoldagg.federated.types import extra_fields
from manifoldagg.integrations.flower.codec import MessageCodec
from manifoldagg.integrations.flower.dispatcher import EvaluationRound, MessageDispatcher
from manifoldagg.integrations.flower.metrics import sample_count, weighted_mean, without_arrays
from manifoldagg.integrations.flower.records import array_record
from manifoldagg.integrations.flower.rounds import Rounds
from manifoldagg.integrations.flower.setup import build_server, check_options

__all__ = ["Asynchronous"]

LOG = logging.getLogger("flwr")
FlowerMessage: TypeAlias = flwr.app.Message
AggregateFn: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


class Asynchronous(Strategy):
    """An asynchronous Flower strategy: each node receives a new task as soon as it has replied.

    It drives a [`Server`][manifoldagg.federated.Server] with any rule. What a node sends is taken at once, however
    stale; what does not fit, such as a NaN or another shape, is refused, and the node gets the model anew. A node that
    fails, says nothing for `task_timeout` seconds or leaves costs nobody else anything. An unmodified `ClientApp`,
    which returns one `ArrayRecord` and a `MetricRecord` with `"num-examples"`, works with every rule that needs no more
    than models; [`client_app`][manifoldagg.integrations.flower.client_app] makes one for all.

    A round is over when the server has accepted `updates` updates, or after `timeout` seconds of `start`. Then the
    model is evaluated, and training continues. A node evaluates the model when it is next free. The methods that
    Flower's strategies have mean what they mean there, and can be overridden.

    Args:
        rule: how the model moves.
        model: a module, or a function that makes one such as its class: what of the arrays is a parameter, and what a
            buffer, or frozen. `None`: as names and dtypes in the arrays tell it.
        updates: accepted updates in each round; `None`: as many as nodes are connected at the beginning.
        concurrency: the number of tasks in flight; `None`: one for each node.
        task_timeout: seconds that a node may take for a task, or an evaluation; `None`: `timeout` of `start`.
        wire: messages go in the wire's form, whole, to nodes that run `client_app`. `None`: where the rule asks for
            more than models, or tells more.
        compress: them, without loss.
        fraction_evaluate: of the nodes that evaluate a round; 0 for none.
        min_evaluate_nodes: that evaluate; where fewer are connected nobody does.
        min_available_nodes: that are waited for at the beginning, for `timeout` seconds.
        weighted_by_key: of the metric that says how many samples a node has.
        arrayrecord_key: of the model in a message.
        configrecord_key: of the config.
        train_metrics_aggr_fn: makes one record of those of a round, without their arrays; `None`: the mean by samples.
        evaluate_metrics_aggr_fn: likewise.
        seed: of who is asked.
        checkpoint: when to write checkpoints, and where to; also when `start` returns. What the rounds have come to is
            beside it.
        resume: resume from the checkpoint, if it exists.
        replace: take this rule, and this clock, where those of the checkpoint are others; see `Server.resume`.
        **server_options: what `Server` takes by keyword, but what the arrays have and the concurrency.

    Attributes:
        server: of the current run, or the last one.
        poll_interval: the interval between two polls for replies, in seconds.

    Raises:
        ArgumentError: naming the argument that does not fit.

    Example:
        >>> from manifoldagg.federated.rules import FedAsync
        >>> strategy = Asynchronous(FedAsync(rate=0.5), model=lambda: nn.Linear(2, 1), updates=20)
        >>> strategy.fraction_evaluate
        1.0
    """

    server: Server
    _dispatcher: MessageDispatcher
    _codec: MessageCodec
    _rounds: Rounds
    _accepted_contents: list[RecordDict]
    _updates_per_round: int

    def __init__(
        self,
        rule: Rule,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        updates: int | None = None,
        concurrency: int | None = None,
        task_timeout: float | None = None,
        wire: bool | None = None,
        compress: bool = False,
        fraction_evaluate: float = 1.0,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateFn | None = None,
        evaluate_metrics_aggr_fn: AggregateFn | None = None,
        seed: int = 0,
        checkpoint: CheckpointPolicy | None = None,
        resume: bool = False,
        replace: bool = False,
        **server_options: Any,
    ) -> None:
        self.rule = check_rule(rule)
        if model is not None and not callable(model):
            raise ArgumentError(f"model: expected a module or a function that makes one, got {short_repr(model)}")
        for name, count in (("updates", updates), ("concurrency", concurrency)):
            if count is not None:
                check_count(name, count)
        if concurrency is not None:
            sampler_for(rule, list(rule_attribute(rule, "routing") or ()), concurrency, np.random.default_rng(0))
        if checkpoint is not None and not isinstance(checkpoint, CheckpointPolicy):
            raise ArgumentError(f"checkpoint: expected CheckpointPolicy, got {short_repr(checkpoint)}")
        for name, given in (("compress", compress), ("resume", resume), ("replace", replace)):
            check_choice(name, given, (True, False))
        check_choice("wire", wire, (None, True, False))
        if resume and checkpoint is None:
            raise ArgumentError("resume: expected a `checkpoint` to resume from")
        check_options(server_options, STRATEGY_OPTIONS)
        self.model = model
        self.updates = updates
        self.concurrency = concurrency
        self.task_timeout = None if task_timeout is None else check_number("task_timeout", task_timeout, above=0)
        if wire is False and any(extra_fields(rule)):
            raise ArgumentError(f"wire: expected None or True, as {type(rule).__name__} needs more than the model")
        self.wire = wire
        self.compress = compress
        self.fraction_evaluate = check_number("fraction_evaluate", fraction_evaluate, at_least=0, at_most=1)
        self.min_evaluate_nodes = check_count("min_evaluate_nodes", min_evaluate_nodes, at_least=0)
        self.min_available_nodes = check_count("min_available_nodes", min_available_nodes, at_least=0)
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn: AggregateFn = train_metrics_aggr_fn or weighted_mean
        self.evaluate_metrics_aggr_fn: AggregateFn = evaluate_metrics_aggr_fn or weighted_mean
        self.seed = check_count("seed", seed, at_least=0)
        self.checkpoint = checkpoint
        self.resume = resume
        self.replace = replace
        self.server_options = server_options
        self.poll_interval = 0.1
        self._stop_requested = False

    def summary(self) -> None:
        """Log the settings of the strategy."""
        whole = any(extra_fields(self.rule)) if self.wire is None else self.wire
        form = "whole, in the wire's form" if whole else "models"
        LOG.info("\t├──> Rule: %s", self.rule)
        LOG.info("\t├──> Asynchronous:")
        LOG.info("\t│\t├── Updates a round: %s", self.updates or "one a node")
        LOG.info("\t│\t├── Concurrency: %s", self.concurrency or "one a node")
        LOG.info("\t│\t├── Task timeout: %s", f"{self.task_timeout:g} s" if self.task_timeout else "the timeout")
        LOG.info("\t│\t└── Messages: %s", form)
        LOG.info("\t├──> Sampling:")
        LOG.info("\t│\t├── Fraction: evaluate (%.2f)", self.fraction_evaluate)
        LOG.info("\t│\t├── Minimum nodes: evaluate (%d)", self.min_evaluate_nodes)
        LOG.info("\t│\t└── Minimum available nodes: %d", self.min_available_nodes)
        LOG.info("\t└──> Keys in records:")
        LOG.info("\t\t├── Weighted by: '%s'", self.weighted_by_key)
        LOG.info("\t\t├── ArrayRecord key: '%s'", self.arrayrecord_key)
        LOG.info("\t\t└── ConfigRecord key: '%s'", self.configrecord_key)

    def stop(self) -> None:
        """Make `start` stop dispatching, write the checkpoint and return; safe in any thread or signal handler.

        Nothing is to be stopped before `start`, and a later `start` goes on.
        """
        self._stop_requested = True

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Train for a number of rounds.

        Args:
            grid: of the `ServerApp`.
            initial_arrays: the model to begin with, its whole state dict.
            num_rounds: how many.
            timeout: seconds that a round may last, whatever has come; and that evaluations are waited for in the end.
            train_config: goes with each model, and `"server-round"` with it.
            evaluate_config: likewise, in evaluation.
            evaluate_fn: evaluates the model here, before the first round and after each.

        Returns:
            The last model, and the metrics of each round.

        Whatever comes out of it, of `evaluate_fn` or an interruption, the checkpoint is written first.

        Raises:
            ArgumentError: naming the argument that does not fit.
            CheckpointError: if the checkpoint to go on from is none, or of something else.
        """
        if not isinstance(initial_arrays, ArrayRecord):
            raise ArgumentError(f"initial_arrays: expected an ArrayRecord, got {type(initial_arrays).__name__}")
        check_count("num_rounds", num_rounds, at_least=0)
        self._stop_requested = self._is_open = False
        self._timeout = check_number("timeout", timeout, above=0)
        LOG.info("Starting %s strategy:", type(self).__name__)
        LOG.info("\t├── Number of rounds: %d", num_rounds)
        LOG.info("\t├── ArrayRecord (%.2f MB)", _num_bytes(initial_arrays) / 2**20)
        LOG.info("\t├── ConfigRecord (train): %s", dict(train_config or {}) or "(empty!)")
        LOG.info("\t├── ConfigRecord (evaluate): %s", dict(evaluate_config or {}) or "(empty!)")
        self.summary()
        began = time.monotonic()
        self._message_ttl = self.task_timeout or timeout
        self._train_config = ConfigRecord(dict(train_config or {}))
        self._evaluate_config = ConfigRecord(dict(evaluate_config or {}))
        try:
            self._prepare(initial_arrays, evaluate_fn)
            if self._rounds.count < num_rounds:
                self._connect(grid, _num_bytes(initial_arrays), timeout)
                while self._rounds.count < num_rounds and not self._stop_requested:
                    self._run_round(grid, timeout, evaluate_fn)
                self._await_evaluations()
            self._save_checkpoint()
        except BaseException:
            self._close_after_error()
            raise
        LOG.info("")
        LOG.info("Strategy execution finished in %.2fs", time.monotonic() - began)
        LOG.info("Final results:")
        for line in str(self._rounds.result).splitlines():
            LOG.info("\t%s", line)
        return self._rounds.result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Return messages for the nodes that train next; called whenever there are some.

        Args:
            server_round: the current round, from 1.
            arrays: the model at its beginning; what a node is sent is newer.
            config: to go with the messages. Each call of a round gets it as it was at the beginning; what the last one
                leaves in it the next round begins with.
            grid: of the `ServerApp`.

        Returns:
            At most one for each of these nodes, with the model to start from. Who gets none is asked later.
        """
        config["server-round"] = server_round
        tasks = self._dispatcher.train_tasks()
        return [
            self._make_message(MessageType.TRAIN, node, server_round, self._codec.encode(ticket), config)
            for node, ticket in tasks
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process replies; called with each reply on arrival, and with none when a round times out.

        Args:
            server_round: the current round.
            replies: of nodes, with errors or with content.

        Returns:
            The model and the metrics of the round where it is over with these replies, else `None` twice.
        """
        replies = list(replies)
        for reply in replies:
            self._process_reply(reply)
        if replies and not self._is_round_full:
            return None, None
        taken, self._accepted_contents = self._accepted_contents, []
        found = self._with_sample_count(taken)
        metrics = self.train_metrics_aggr_fn(found, self.weighted_by_key) if found else None
        return array_record(self.server.state_dict()), metrics

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Return evaluation messages for a round's model, each of which is sent when its node is free.

        Args:
            server_round: that is over.
            arrays: its model.
            config: to go with the messages.
            grid: of the `ServerApp`.
        """
        present = list(self._dispatcher.nodes.present)
        count = max(int(len(present) * self.fraction_evaluate), self.min_evaluate_nodes)
        if not self.fraction_evaluate:
            return []
        if not 0 < count <= len(present):
            LOG.info(
                "configure_evaluate: %d nodes are connected, of at least %d; skipping evaluation", len(present), count
            )
            return []
        config["server-round"] = server_round
        chosen = self._generator.permutation(len(present))[:count]
        model = {self.arrayrecord_key: arrays}
        return [self._make_message(MessageType.EVALUATE, present[i], server_round, model, config) for i in chosen]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[FlowerMessage]) -> MetricRecord | None:
        """Aggregate the metrics of an evaluation once all nodes have replied or it has timed out.

        Args:
            server_round: whose model it was.
            replies: of nodes, with errors or with content.
        """
        found = self._with_sample_count(reply.content for reply in replies if reply.has_content())
        return self.evaluate_metrics_aggr_fn(found, self.weighted_by_key) if found else None

    def _with_sample_count(self, contents: Iterable[RecordDict]) -> list[RecordDict]:
        """Those that say how many samples they stand for: no other one has a place in a mean."""
        return [content for content in contents if sample_count(content, self.weighted_by_key) is not None]

    def _prepare(self, initial_arrays: ArrayRecord, evaluate_fn: EvaluateFn | None) -> None:
        """Set up the server and the rounds before the first round."""
        path = None if self.checkpoint is None else Path(self.checkpoint.path)
        resume = self.resume and path is not None and path.exists()
        self.server = build_server(
            self.rule,
            self.model,
            initial_arrays,
            resume=resume,
            replace=self.replace,
            checkpoint=self.checkpoint,
            **self.server_options,
        )
        self._codec = MessageCodec(
            self.server, self.wire, self.compress, key=self.arrayrecord_key, weighted_by_key=self.weighted_by_key
        )
        self._accepted_contents = []
        self._rounds = Rounds(path)
        self._set_model(array_record(self.server.state_dict()))
        if resume:
            for ticket in self.server.tickets:
                self.server.drop(ticket)
            self._rounds.read(self.server.updates)
            LOG.info("Resuming after %d rounds and %d updates", self._rounds.count, self.server.updates)
        # At the beginning, or where a server was killed while it evaluated.
        is_new = self.server.updates == self._rounds.cumulative_updates[-1]
        if is_new and self._rounds.count not in self._rounds.result.evaluate_metrics_serverapp:
            self._evaluate_on_server(evaluate_fn)
        self._write_rounds()

    def _connect(self, grid: Grid, largest_reply_bytes: int, timeout: float) -> None:
        """The nodes that are there."""
        until = time.monotonic() + timeout
        while len(list(grid.get_node_ids())) < self.min_available_nodes and time.monotonic() < until:
            if self._stop_requested:
                break
            LOG.info("Waiting for at least %d nodes to connect", self.min_available_nodes)
            time.sleep(self.poll_interval)
        routing = rule_attribute(self.rule, "routing")
        weights = self.server_options.get("weights")
        known = [clients for clients in (routing, weights) if isinstance(clients, Mapping)]
        drawn, self._generator = (np.random.default_rng([self.seed, i, self.server.updates]) for i in range(2))

        def asked(here: list[int]) -> ClientSampler:
            self._updates_per_round = self.updates or max(1, len(here))
            return sampler_for(self.rule, here if routing is None else list(routing), self.concurrency, drawn)

        self._dispatcher = MessageDispatcher(
            grid,
            self.server,
            largest_reply_bytes=largest_reply_bytes,
            poll_interval=self.poll_interval,
            accepts_node=lambda node: all(node in clients for clients in known),
        )
        self._is_open = True
        self._dispatcher.open(asked)

    def _run_round(self, grid: Grid, timeout: float, evaluate_fn: EvaluateFn | None) -> None:
        """Run one round."""
        number = self._rounds.count + 1
        LOG.info("")
        LOG.info("[ROUND %d]", number)
        config = self._train_config

        def configure() -> Iterable[FlowerMessage]:
            self._train_config = ConfigRecord(dict(config))
            return self.configure_train(number, self._arrays, self._train_config, grid)

        until = time.monotonic() + timeout
        arrays = metrics = None
        if self._is_round_full:  # a server that was killed between its last update and the end of the round
            arrays, metrics = self.aggregate_train(number, [])
        while arrays is None:
            self._dispatcher.send(configure)
            reply = self._dispatcher.next_reply()
            if reply is not None:
                arrays, metrics = self.aggregate_train(number, [reply])
                # What a method of somebody else's has not taken is a failure.
                self._dispatcher.complete(reply.metadata.reply_to_message_id, succeeded=False)
            self._record_evaluations()
            if arrays is None and self._stop_requested:
                return
            if arrays is None and time.monotonic() > until:
                LOG.warning("round %d: ends after %g s, with %d updates", number, timeout, len(self._accepted_contents))
                arrays, metrics = self.aggregate_train(number, [])
                break
        if arrays is not None:
            self._set_model(arrays)
        self._rounds.finish_round(self.server.updates)
        self._rounds.record("train_metrics_clientapp", number, metrics)
        self._write_rounds()
        messages = self.configure_evaluate(number, self._arrays, self._evaluate_config, grid)
        self._dispatcher.start_evaluation(EvaluationRound(number, time.monotonic() + timeout), messages)
        self._evaluate_on_server(evaluate_fn)
        self._write_rounds()

    def _evaluate_on_server(self, evaluate_fn: EvaluateFn | None) -> None:
        """Evaluate the model of the last round here."""
        if evaluate_fn is not None:
            number = self._rounds.count
            self._rounds.record("evaluate_metrics_serverapp", number, evaluate_fn(number, self._arrays))

    def _set_model(self, arrays: ArrayRecord) -> None:
        """The model, after all updates that were taken."""
        self._arrays = self._rounds.result.arrays = arrays
        self._model_updates = self.server.updates

    @property
    def _is_round_full(self) -> bool:
        """Whether enough updates for the round were taken."""
        return self.server.updates - self._rounds.cumulative_updates[-1] >= self._updates_per_round

    def _await_evaluations(self) -> None:
        """After the last round: evaluations are waited for."""
        self._dispatcher.close()
        while self._dispatcher.evaluations and not self._stop_requested:
            self._dispatcher.send(list)
            self._dispatcher.next_reply()
            self._record_evaluations()
        if self.server.updates > self._model_updates:
            self._set_model(array_record(self.server.state_dict()))

    def _close_after_error(self) -> None:
        """Something was raised: stop all nodes, and write the checkpoint if possible."""
        if self._is_open:
            for step in (self._dispatcher.close, self._save_checkpoint):
                try:
                    step()
                except Exception:
                    LOG.exception("after an error:")

    def _save_checkpoint(self) -> None:
        """Write a checkpoint; a full disk does not lose the result in memory."""
        if self.checkpoint is not None:
            try:
                self.server.save()
            except CheckpointError as error:
                LOG.error("checkpoint: %s", error)
            self._write_rounds()

    def _record_evaluations(self) -> None:
        """Enter what nodes have found."""
        for evaluation in self._dispatcher.finished_evaluations():
            metrics = self.aggregate_evaluate(evaluation.round, evaluation.replies)
            self._rounds.record("evaluate_metrics_clientapp", evaluation.round, metrics)
            self._write_rounds()

    def _write_rounds(self) -> None:
        """Write the rounds; a full disk does not stop the run."""
        try:
            self._rounds.write()
        except CheckpointError as error:
            LOG.error("checkpoint: %s", error)

    def _process_reply(self, reply: FlowerMessage) -> None:
        """Process a reply to a task, and free its node for the next one."""
        name = reply.metadata.reply_to_message_id
        ticket = self._dispatcher.ticket_id(name)
        if ticket is None:
            return
        accepted = reply.has_content() and self._codec.receive(ticket, reply.content).accepted
        if accepted:
            self._accepted_contents.append(without_arrays(reply.content))
        self._dispatcher.complete(name, succeeded=accepted)

    def _make_message(
        self, message_type: str, node: int, server_round: int, arrays: dict[str, ArrayRecord], config: ConfigRecord
    ) -> FlowerMessage:
        content = RecordDict({**arrays, self.configrecord_key: config})
        return FlowerMessage(
            content, dst_node_id=node, message_type=message_type, ttl=self._message_ttl, group_id=str(server_round)
        )


STRATEGY_OPTIONS = [p.name for p in inspect.signature(Asynchronous).parameters.values() if p.kind is p.KEYWORD_ONLY]
"""Those that a strategy has beside its server's."""


def _num_bytes(arrays: ArrayRecord) -> int:
    return sum(len(array.data) for array in arrays.values())
