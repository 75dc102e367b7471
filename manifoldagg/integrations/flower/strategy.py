"""The asynchronous strategy: the server side of the Flower integration."""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from torch import nn

from manifoldagg._validation import check_choice, check_count, check_number, short_repr
from manifoldagg.errors import ArgumentError
from manifoldagg.federated import Durability, Rule
from manifoldagg.federated.clients.compression import Codec, check_codec, codec_from_spec
from manifoldagg.federated.server.client_sampling import rule_attribute, sampler_for
from manifoldagg.federated.server.events import Callback
from manifoldagg.federated.server.options import check_option
from manifoldagg.federated.server.validation import check_rule
from manifoldagg.federated.stability import with_buffer_size
from manifoldagg.federated.types import extra_fields
from manifoldagg.integrations.flower.dispatcher import TASK_ENDED
from manifoldagg.integrations.flower.loop import AggregateFn, FlowerMessage, TrainingLoop
from manifoldagg.integrations.flower.metrics import bounded_metrics, sample_count, weighted_mean, with_sample_count
from manifoldagg.integrations.flower.records import num_bytes
from manifoldagg.integrations.flower.setup import check_callbacks, check_options
from manifoldagg.manifolds.buffer_policies import BufferPolicy, check_buffer_policy
from manifoldagg.manifolds.personal import check_patterns

__all__ = ["Asynchronous"]

LOG = logging.getLogger("flwr")


class Asynchronous(TrainingLoop):
    """Asynchronous Flower strategy, which sends each node a new task as soon as the node has replied.

    The strategy runs a [`Server`][manifoldagg.federated.Server] with any aggregation rule. Nodes do not wait for each
    other:

    - **Updates.** The server applies each update on arrival, whatever its staleness. It rejects invalid updates, such
      as updates with a NaN or a wrong shape. After a rejection, the node receives its next task after a backoff time.
    - **Failures.** If a node fails, disconnects, or does not reply within `task_timeout`, other nodes are not delayed.
    - **Rounds.** A round ends when the server has accepted `updates` updates, or after the `timeout` of `start`.
    - **Evaluation.** The nodes evaluate the model at the end of a round while training continues. Each node evaluates
      as soon as it is free.

    An unmodified `ClientApp` works with every rule that needs only the models of the nodes. Its replies must contain
    one `ArrayRecord`, and a `MetricRecord` with the metric `"num-examples"`. An app that
    [`client_app`][manifoldagg.integrations.flower.client_app] builds works with every rule.

    The methods have the same meaning as in other Flower strategies, and subclasses can override them. The strategy
    reports its progress in two places:

    - The logger `"flwr"` receives one line per round, and lines for rejected updates and failed tasks.
    - The training metrics of a round contain the counts `accepted`, `rejected` and `failed`. With a codec, they also
      contain `received-bytes`, the total size of the replies to training tasks.

    Args:
        rule: the aggregation rule.
        model: a module, or a function that returns a module, such as its class. The module determines which arrays are
            parameters, buffers or frozen. With `None`, the strategy uses the names and dtypes of the arrays instead.
        updates: the number of accepted updates per round. The default is the number of nodes at the start of the run.
        concurrency: the number of tasks in flight. The default is one task per node.
        buffer: the number of updates per step, for a rule that buffers updates. The default is the buffer size that the
            rule sets.
        refill: the number of tasks that must have ended before the strategy sends new tasks in their place. The default
            is 1.
        task_timeout: the timeout of a task or an evaluation in seconds. The default is the `timeout` of `start`.
        wire: whether messages have the wire format of `manifoldagg.wire`. With `True`, all nodes must run `client_app`.
            With `None`, messages have the wire format only if the rule sends or requires more than models.
        compress: whether to compress messages in the wire format losslessly.
        codec: the lossy codec of the updates, such as `TopK(fraction=0.01)` or `Int8()` of
            `manifoldagg.federated.clients`. With a codec, all nodes must run `client_app`. Its error feedback stores
            the compression error on the node and adds it to the next update.
        fraction_evaluate: the fraction of the nodes that evaluate the model of a round. With 0, no node evaluates.
        min_evaluate_nodes: the minimum number of nodes in an evaluation. If fewer nodes are connected, the strategy
            skips the evaluation.
        min_available_nodes: the number of nodes for which `start` waits before the first round, for at most `timeout`
            seconds.
        weighted_by_key: the name of the metric that contains the number of samples of a node.
        arrayrecord_key: the key of the model in a message.
        configrecord_key: the key of the configuration in a message.
        train_metrics_aggr_fn: a function that aggregates the metrics of a round. Its arguments are a list with the
            content of each reply, without arrays, and `weighted_by_key`. The default is the sample-weighted mean.
        evaluate_metrics_aggr_fn: a function that aggregates the metrics of an evaluation. It has the same arguments and
            the same default.
        seed: the random seed for sampling nodes.
        buffer_policy: the policies for aggregating the buffers of the model, as in `Server.of`.
        personal: names or glob patterns of parameters and buffers that remain on each node, as in
            [`ParameterSpace.of`][manifoldagg.manifolds.ParameterSpace.of]. Messages and results do not contain them.
        durability: the settings of checkpoints and the journal. The method `start` writes a final checkpoint, and
            stores the metrics of the rounds in a file next to it.
        resume: whether `start` resumes from the checkpoint in `durability`, if the checkpoint exists.
        replace: whether `rule` and `clock` may differ from those in the checkpoint, as in `Server.resume`.
        on_event: callbacks that receive all events of the server, as in `Server.on_event`. The module
            `manifoldagg.integrations.monitoring` provides such callbacks.
        **server_options: other keyword arguments of `Server`, except those that depend on the arrays or on
            `concurrency`.

    Attributes:
        server: the server of the current run or the last run.
        poll_interval: the time between two polls for replies, in seconds.

    Raises:
        ArgumentError: if an argument is invalid.

    Example:
        >>> from manifoldagg.federated.rules import FedAsync
        >>> strategy = Asynchronous(FedAsync(rate=0.5), model=lambda: nn.Linear(2, 1), updates=20)
        >>> strategy.fraction_evaluate
        1.0
    """

    def __init__(
        self,
        rule: Rule,
        *,
        model: nn.Module | Callable[[], nn.Module] | None = None,
        updates: int | None = None,
        concurrency: int | None = None,
        buffer: int | None = None,
        refill: int | None = None,
        task_timeout: float | None = None,
        wire: bool | None = None,
        compress: bool = False,
        codec: Codec | None = None,
        fraction_evaluate: float = 1.0,
        min_evaluate_nodes: int = 2,
        min_available_nodes: int = 2,
        weighted_by_key: str = "num-examples",
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        train_metrics_aggr_fn: AggregateFn | None = None,
        evaluate_metrics_aggr_fn: AggregateFn | None = None,
        seed: int = 0,
        buffer_policy: BufferPolicy = (),
        personal: Sequence[str] = (),
        durability: Durability = Durability(),
        resume: bool = False,
        replace: bool = False,
        on_event: Sequence[Callback] = (),
        **server_options: Any,
    ) -> None:
        super().__init__()
        check_rule(rule)
        self.rule = rule = rule if buffer is None else with_buffer_size(rule, buffer)
        if model is not None and not callable(model):
            raise ArgumentError(f"model: expected a module or a function that returns one, got {short_repr(model)}")
        for name, count in (("updates", updates), ("concurrency", concurrency)):
            if count is not None:
                check_count(name, count)
        routed = list(rule_attribute(rule, "routing") or ())
        sampler_for(rule, routed, concurrency, np.random.default_rng(0), refill=refill)
        if rule_attribute(rule, "over_selection"):
            raise ArgumentError("rule: over_selection: expected 0, as Flower cannot cancel a task on a node")
        check_option("durability", durability, Durability)
        check_buffer_policy(buffer_policy)
        for name, given in (("compress", compress), ("resume", resume), ("replace", replace)):
            check_choice(name, given, (True, False))
        check_choice("wire", wire, (None, True, False))
        if resume and durability.checkpoint is None:
            raise ArgumentError("resume: expected a checkpoint in `durability` to resume from")
        check_options(server_options, STRATEGY_OPTIONS)
        self.model = model
        self.updates = updates
        self.concurrency = concurrency
        self.refill = refill
        self.task_timeout = None if task_timeout is None else check_number("task_timeout", task_timeout, above=0)
        if wire is False and any(extra_fields(rule)):
            raise ArgumentError(f"wire: expected None or True, as {type(rule).__name__} requires more than the model")
        if codec is not None:
            codec_from_spec(check_codec(codec).spec())  # The nodes construct the codec from this spec.
            if wire is False:
                raise ArgumentError("wire: expected None or True, as encoded updates have the wire format")
        self.wire = wire
        self.compress = compress
        self.codec = codec
        self.fraction_evaluate = check_number("fraction_evaluate", fraction_evaluate, at_least=0, at_most=1)
        self.min_evaluate_nodes = check_count("min_evaluate_nodes", min_evaluate_nodes, at_least=0)
        self.min_available_nodes = check_count("min_available_nodes", min_available_nodes, at_least=0)
        self.weighted_by_key = weighted_by_key
        self.arrayrecord_key = arrayrecord_key
        self.configrecord_key = configrecord_key
        self.train_metrics_aggr_fn: AggregateFn = train_metrics_aggr_fn or weighted_mean
        self.evaluate_metrics_aggr_fn: AggregateFn = evaluate_metrics_aggr_fn or weighted_mean
        self.seed = check_count("seed", seed, at_least=0)
        self.buffer_policy = buffer_policy
        self.personal = check_patterns(personal)
        self.durability = durability
        self.resume = resume
        self.replace = replace
        self.on_event = check_callbacks(on_event)
        self.server_options = server_options

    def summary(self) -> None:
        """Log the settings of the strategy."""
        timeout = "the timeout of a round" if self.task_timeout is None else f"{self.task_timeout:g} s"
        wire = any(extra_fields(self.rule)) if self.wire is None else self.wire
        for line in (
            f"├──> Rule: {short_repr(self.rule)}",
            "├──> Asynchronous:",
            f"│\t├── Updates per round: {self.updates or 'one per node'}",
            f"│\t├── Concurrency: {self.concurrency or 'one task per node'}",
            f"│\t├── Free slots before the next tasks: {self.refill or 1}",
            f"│\t├── Task timeout: {timeout}",
            f"│\t└── Messages: {'wire format' if wire or self.codec else 'ArrayRecord'}",
            "├──> Sampling:",
            f"│\t├── Fraction: evaluate ({self.fraction_evaluate:.2f})",
            f"│\t├── Minimum nodes: evaluate ({self.min_evaluate_nodes})",
            f"│\t└── Minimum available nodes: {self.min_available_nodes}",
            "└──> Keys in records:",
            f"\t├── Weighted by: '{self.weighted_by_key}'",
            f"\t├── ArrayRecord key: '{self.arrayrecord_key}'",
            f"\t└── ConfigRecord key: '{self.configrecord_key}'",
        ):
            LOG.info("\t%s", line)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Return training messages for the free nodes, which are the nodes without a message in flight.

        The training loop calls this method several times per round, whenever nodes are free.

        Args:
            server_round: the current round, starting from 1.
            arrays: the model at the start of the round. The method ignores it and sends the current model.
            config: the configuration of the messages. The method may modify it. Each call within a round receives the
                configuration from the start of the round. The next round starts with the changes of the last call.
            grid: the grid of the `ServerApp`.

        Returns:
            At most one message per free node. A node without a message backs off, and then receives another task.
        """
        config["server-round"] = server_round
        tasks = self._dispatcher.train_tasks()
        return [self._make_message(MessageType.TRAIN, node, server_round, records, config) for node, records in tasks]

    def aggregate_train(
        self, server_round: int, replies: Iterable[FlowerMessage]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Process replies of nodes in a training round, and return the new model if the round has ended.

        The training loop calls this method with one reply at a time. To end a round early, for example after a timeout,
        the loop passes an empty list of replies.

        Args:
            server_round: the current round.
            replies: replies of nodes, with content or errors.

        Returns:
            The model and the metrics of the round. If the round continues, both are `None`. The metrics consist of the
                result of `train_metrics_aggr_fn` and the counts `accepted`, `rejected` and `failed`.
        """
        replies = list(replies)
        for reply in replies:
            self._process_reply(reply)
        if replies and not self._is_round_full:
            return None, None
        taken, self._accepted_contents = self._accepted_contents, []
        found = self._with_capped_samples(taken)
        metrics = self.train_metrics_aggr_fn(found, self.weighted_by_key) if found else None
        return self._codec.model(), self._report.extend(metrics, self._num_accepted)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[FlowerMessage]:
        """Return messages that ask a random sample of the nodes to evaluate the model.

        The training loop sends each message as soon as its node is free.

        Args:
            server_round: the round that has ended.
            arrays: the model of this round.
            config: the configuration of the messages.
            grid: the grid of the `ServerApp`.

        Returns:
            One message for each sampled node. If too few nodes are connected, the result is empty.
        """
        present = list(self._dispatcher.nodes.present)
        count = max(int(len(present) * self.fraction_evaluate), self.min_evaluate_nodes)
        if not self.fraction_evaluate:
            return []
        if not 0 < count <= len(present):
            LOG.info(
                "configure_evaluate: %d nodes are connected, %d are required; skipping evaluation", len(present), count
            )
            return []
        config["server-round"] = server_round
        chosen = self._generator.permutation(len(present))[:count]
        model: dict[str, ArrayRecord | ConfigRecord] = {self.arrayrecord_key: arrays}
        return [self._make_message(MessageType.EVALUATE, present[i], server_round, model, config) for i in chosen]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[FlowerMessage]) -> MetricRecord | None:
        """Aggregate the metrics that the nodes report for an evaluation of the model.

        The training loop calls this method after all nodes have replied, or after the evaluation has timed out.

        Args:
            server_round: the round of the evaluated model.
            replies: replies of nodes, with content or errors.

        Returns:
            The result of `evaluate_metrics_aggr_fn`, or `None` if there are no valid replies.
        """
        found = self._with_capped_samples(
            (reply.metadata.src_node_id, reply.content) for reply in replies if reply.has_content()
        )
        return self.evaluate_metrics_aggr_fn(found, self.weighted_by_key) if found else None

    def _with_capped_samples(self, contents: Iterable[tuple[int, RecordDict]]) -> list[RecordDict]:
        """Cap the sample counts in the nodes' replies, and omit replies without a valid count."""
        found = []
        for node, content in contents:
            samples = sample_count(content, self.weighted_by_key)
            if samples is not None:
                # The limit prevents a node with a very large count from dominating the mean. If the server's option
                # `weights` is a mapping, the count of the mapping replaces the reported one.
                counted = self.server.capped_samples(node, samples)
                found.append(with_sample_count(content, self.weighted_by_key, counted))
        return found

    def _process_reply(self, reply: FlowerMessage) -> None:
        name = reply.metadata.reply_to_message_id
        task = self._dispatcher.find_task(name)
        if task is None:
            self._report.reject(reply.metadata.src_node_id, TASK_ENDED)
            return
        node, ticket = task
        accepted = False
        if reply.has_content():  # The dispatcher has already reported a reply with an error.
            if self.codec is not None:
                self._report.add_bytes(num_bytes(reply.content))
            receipt = self._codec.receive(ticket, reply.content)
            accepted = receipt.accepted
            if accepted:
                self._report.accept(receipt.staleness)
                keeps_config = self.train_metrics_aggr_fn is not weighted_mean
                metrics = bounded_metrics(reply.content, self.weighted_by_key, keeps_config=keeps_config)
                self._accepted_contents.append((node, metrics))
                sent, kept = (sum(map(len, x.metric_records.values())) for x in (reply.content, metrics))
                if kept < sent:
                    self._report.drop_metrics(node, sent - kept)
            else:
                self._report.reject(node, receipt.reason)
        self._dispatcher.complete(name, succeeded=accepted)

    def _make_message(
        self,
        message_type: str,
        node: int,
        server_round: int,
        arrays: dict[str, ArrayRecord | ConfigRecord],
        config: ConfigRecord,
    ) -> FlowerMessage:
        content = RecordDict({**arrays, self.configrecord_key: config})
        return FlowerMessage(
            content, dst_node_id=node, message_type=message_type, ttl=self._message_ttl, group_id=str(server_round)
        )


STRATEGY_OPTIONS = [p.name for p in inspect.signature(Asynchronous).parameters.values() if p.kind is p.KEYWORD_ONLY]
"""The names of the keyword arguments of the strategy itself, without those that it passes to the server."""
