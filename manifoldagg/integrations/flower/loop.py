"""Training loop of the asynchronous Flower strategy, which runs rounds and evaluations and writes checkpoints."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import flwr.app
import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from manifoldagg._validation import check_count, check_number
from manifoldagg.errors import ArgumentError, CheckpointError
from manifoldagg.federated import Durability, Rule, Server
from manifoldagg.federated.clients.compression import Codec
from manifoldagg.federated.server.client_sampling import ClientSampler, rule_attribute, sampler_for
from manifoldagg.federated.server.events import Callback
from manifoldagg.integrations.flower.codec import MessageCodec
from manifoldagg.integrations.flower.dispatcher import EvaluationRound, MessageDispatcher
from manifoldagg.integrations.flower.metrics import bounded_metrics, weighted_mean
from manifoldagg.integrations.flower.reporting import RunReport, log_metrics, log_start
from manifoldagg.integrations.flower.rounds import Rounds
from manifoldagg.integrations.flower.setup import ModelSource, build_server
from manifoldagg.manifolds.buffer_policies import BufferPolicy

__all__ = ["FlowerMessage", "TrainingLoop"]

LOG = logging.getLogger("flwr")
FlowerMessage: TypeAlias = flwr.app.Message
"""A message of Flower, in contrast to `manifoldagg.federated.Message`, which contains a model for a client."""
AggregateFn: TypeAlias = Callable[[list[RecordDict], str], MetricRecord]
EvaluateFn: TypeAlias = Callable[[int, ArrayRecord], MetricRecord | None]


class TrainingLoop(Strategy):
    """Base class of the asynchronous Flower strategy, which runs the rounds of training and evaluation.

    A round ends after a number of accepted updates, so it does not wait for the slowest nodes. Subclasses build the
    messages to the nodes and process the replies.

    Attributes:
        server: the server of the current run or the last run.
        poll_interval: the time between two polls for replies, in seconds.
    """

    server: Server
    rule: Rule
    model: ModelSource
    updates: int | None
    concurrency: int | None
    refill: int | None
    task_timeout: float | None
    wire: bool | None
    compress: bool
    codec: Codec | None
    min_available_nodes: int
    weighted_by_key: str
    arrayrecord_key: str
    seed: int
    buffer_policy: BufferPolicy
    personal: tuple[str, ...]
    durability: Durability
    resume: bool
    replace: bool
    on_event: tuple[Callback, ...]
    server_options: dict[str, Any]
    train_metrics_aggr_fn: AggregateFn
    evaluate_metrics_aggr_fn: AggregateFn
    _dispatcher: MessageDispatcher
    _codec: MessageCodec
    _report: RunReport
    _rounds: Rounds
    _accepted_contents: list[tuple[int, RecordDict]]
    _updates_per_round: int

    def __init__(self) -> None:
        self.poll_interval = 0.1
        self._stop_requested = False
        self._unsubscribe: list[Callable[[], None]] = []

    def stop(self) -> None:
        """Request the end of the run.

        The running call to `start` then stops dispatching tasks, writes the checkpoint and returns. Any thread or
        signal handler can call `stop`. A call before `start` has no effect.
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
        """Train the model for a number of rounds.

        An exception, such as `KeyboardInterrupt` or an error in `evaluate_fn`, ends the run. In this case, the method
        writes the checkpoint and then re-raises the exception.

        Args:
            grid: the grid of the `ServerApp`.
            initial_arrays: the complete state dict of the initial model.
            num_rounds: the number of rounds.
            timeout: the maximum duration of a round in seconds. An evaluation on the nodes has the same maximum
                duration, so `start` waits at most this time for evaluations after the last round.
            train_config: the configuration of training messages. The strategy adds the entry `"server-round"`.
            evaluate_config: the configuration of evaluation messages. The strategy adds the entry `"server-round"`.
            evaluate_fn: a function that evaluates the model in this process, before the first round and after each
                round. Its arguments are the number of finished rounds and the model. It returns metrics or `None`.

        Returns:
            The last model and the metrics of each round.

        Raises:
            ArgumentError: if an argument is invalid.
            CheckpointError: if the checkpoint is invalid, or belongs to another model or rule.
        """
        if not isinstance(initial_arrays, ArrayRecord):
            raise ArgumentError(f"initial_arrays: expected an ArrayRecord, got {type(initial_arrays).__name__}")
        check_count("num_rounds", num_rounds, at_least=0)
        self._stop_requested = self._is_open = False
        self._timeout = check_number("timeout", timeout, above=0)
        configs: dict[str, Mapping[str, Any]] = {"train": train_config or {}, "evaluate": evaluate_config or {}}
        log_start(type(self).__name__, num_rounds, initial_arrays, configs)
        self.summary()
        began = time.monotonic()
        self._message_ttl = self.task_timeout or timeout
        self._train_config = ConfigRecord(dict(train_config or {}))
        self._evaluate_config = ConfigRecord(dict(evaluate_config or {}))
        try:
            self._prepare(initial_arrays, evaluate_fn)
            if self._rounds.count < num_rounds:
                self._num_rounds = num_rounds
                self._connect(grid, sum(len(array.data) for array in initial_arrays.values()), timeout)
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

    def _prepare(self, initial_arrays: ArrayRecord, evaluate_fn: EvaluateFn | None) -> None:
        checkpoint = self.durability.checkpoint
        path = None if checkpoint is None else Path(checkpoint.path)
        resume = self.resume and path is not None
        self.server = build_server(
            self.rule,
            self.model,
            initial_arrays,
            buffer_policy=self.buffer_policy,
            durability=self.durability,
            resume=resume,
            replace=self.replace,
            personal=self.personal,
            **self.server_options,
        )
        for unsubscribe in self._unsubscribe:  # The server of an earlier run may still publish a checkpoint event.
            unsubscribe()
        self._report = RunReport()
        callbacks = [self._report.on_event, *map(self._report.guarded, self.on_event)]
        self._unsubscribe = [self.server.on_event(callback) for callback in callbacks]
        self._codec = MessageCodec(
            self.server,
            self.wire,
            self.compress,
            key=self.arrayrecord_key,
            weighted_by_key=self.weighted_by_key,
            codec=self.codec,
        )
        self._accepted_contents = []
        self._rounds = Rounds(path)
        self._set_model(self._codec.model())
        if resume:
            for ticket in self.server.tickets:
                self.server.drop(ticket)
            self._rounds.read(self.server.updates)
            LOG.info("Resuming after %d rounds and %d updates", self._rounds.count, self.server.updates)
        # Evaluate the model at the start of a new run. After a resume, repeat an evaluation during which the process
        # was killed.
        is_new = self.server.updates == self._rounds.cumulative_updates[-1]
        if is_new and self._rounds.count not in self._rounds.result.evaluate_metrics_serverapp:
            self._evaluate_on_server(evaluate_fn)
        self._write_rounds()

    def _connect(self, grid: Grid, largest_reply_bytes: int, timeout: float) -> None:
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

        def make_sampler(here: list[int]) -> ClientSampler:
            self._updates_per_round = self.updates or max(1, len(here))
            clients = here if routing is None else list(routing)
            return sampler_for(self.rule, clients, self.concurrency, drawn, refill=self.refill)

        self._dispatcher = MessageDispatcher(
            grid,
            self.server,
            self._report,
            dispatch=self._codec.dispatch,
            bound_evaluation=partial(
                bounded_metrics,
                key=self.weighted_by_key,
                keeps_config=self.evaluate_metrics_aggr_fn is not weighted_mean,
            ),
            largest_reply_bytes=largest_reply_bytes,
            poll_interval=self.poll_interval,
            accepts_node=lambda node: all(node in clients for clients in known),
        )
        self._is_open = True
        self._dispatcher.open(make_sampler)

    def _run_round(self, grid: Grid, timeout: float, evaluate_fn: EvaluateFn | None) -> None:
        number = self._rounds.count + 1
        began = time.monotonic()
        LOG.info("")
        LOG.info("[ROUND %d/%d]", number, self._num_rounds)
        config = self._train_config

        def configure() -> Iterable[FlowerMessage]:
            self._train_config = ConfigRecord(dict(config))
            return self.configure_train(number, self._arrays, self._train_config, grid)

        arrays = metrics = None
        if self._is_round_full:  # The process was killed between the last update and the end of the round.
            arrays, metrics = self.aggregate_train(number, [])
        while arrays is None:
            self._dispatcher.send(configure)
            reply = self._dispatcher.next_reply()
            if reply is not None:
                arrays, metrics = self.aggregate_train(number, [reply])
                # If a subclass overrides `aggregate_train` and ignores the reply, the task has failed.
                self._dispatcher.complete(reply.metadata.reply_to_message_id, succeeded=False)
            self._record_evaluations()
            if arrays is None and self._stop_requested:
                LOG.info("round %d: stopped before its end", number)
                self._report.end_round(self._num_accepted, time.monotonic() - began)
                return
            if arrays is None and time.monotonic() > began + timeout:
                LOG.warning(
                    "round %d: timeout of %g s, with %d of %d updates",
                    *(number, timeout, self._num_accepted, self._updates_per_round),
                )
                arrays, metrics = self.aggregate_train(number, [])
                break
        if arrays is not None:
            self._set_model(arrays)
        self._report.end_round(self._num_accepted, time.monotonic() - began)
        log_metrics(metrics)
        self._rounds.finish_round(self.server.updates)
        self._rounds.record("train_metrics_clientapp", number, metrics)
        self._write_rounds()
        messages = self.configure_evaluate(number, self._arrays, self._evaluate_config, grid)
        self._dispatcher.start_evaluation(EvaluationRound(number, time.monotonic() + timeout), messages)
        self._evaluate_on_server(evaluate_fn)
        self._write_rounds()

    def _evaluate_on_server(self, evaluate_fn: EvaluateFn | None) -> None:
        if evaluate_fn is not None:
            number = self._rounds.count
            metrics = evaluate_fn(number, self._arrays)
            if number:
                LOG.info("Global evaluation")
                log_metrics(metrics, "MetricRecord")
            else:
                LOG.info("Initial global evaluation results: %s", metrics)
            self._rounds.record("evaluate_metrics_serverapp", number, metrics)

    def _set_model(self, arrays: ArrayRecord) -> None:
        self._arrays = self._rounds.result.arrays = arrays
        self._model_updates = self.server.updates

    @property
    def _num_accepted(self) -> int:
        return self.server.updates - self._rounds.cumulative_updates[-1]

    @property
    def _is_round_full(self) -> bool:
        return self._num_accepted >= self._updates_per_round

    def _await_evaluations(self) -> None:
        self._dispatcher.close()
        while self._dispatcher.evaluations and not self._stop_requested:
            self._dispatcher.send(list)
            self._dispatcher.next_reply()
            self._record_evaluations()
        if self.server.updates > self._model_updates:
            self._set_model(self._codec.model())
        self._codec.release()
        self._report.flush()

    def _close_after_error(self) -> None:
        """Stop the run after an exception, and write the checkpoint. Log any further error."""
        if self._is_open:
            for step in (self._report.flush, self._dispatcher.close, self._codec.release, self._save_checkpoint):
                try:
                    step()
                except Exception:
                    LOG.exception("an exception was raised while stopping the run:")

    def _save_checkpoint(self) -> None:
        """Write a checkpoint and the metrics of the finished rounds. If a write fails, log it."""
        # An error is not raised, so that `start` can still return the result of the run.
        if self.durability.checkpoint is not None:
            try:
                self.server.save()
            except CheckpointError as error:
                LOG.error("checkpoint: %s", error)
            self._write_rounds()

    def _record_evaluations(self) -> None:
        for evaluation in self._dispatcher.finished_evaluations():
            metrics = self.aggregate_evaluate(evaluation.round, evaluation.replies)
            results = sum(reply.has_content() for reply in evaluation.replies)
            if evaluation.num_nodes:
                LOG.info(
                    "aggregate_evaluate: Received %d results and %d failures (round %d)",
                    *(results, evaluation.num_nodes - results, evaluation.round),
                )
                log_metrics(metrics)
            self._rounds.record("evaluate_metrics_clientapp", evaluation.round, metrics)
            self._write_rounds()

    def _write_rounds(self) -> None:
        """Write the metrics of the finished rounds to their file.

        The method logs an error instead of raising it, so that the run continues.
        """
        try:
            self._rounds.write()
        except CheckpointError as error:
            LOG.error("checkpoint: %s", error)
