"""Federated aggregation: server rules, client trainers, servers, and functions for custom training loops."""

from manifoldagg.federated.clients.client import train_client
from manifoldagg.federated.limits import UpdateLimits
from manifoldagg.federated.rules._gram_rule import GramRule
from manifoldagg.federated.server.aggregate import aggregate
from manifoldagg.federated.server.async_aggregator import AsyncAggregator
from manifoldagg.federated.server.durability.checkpoint_writer import CheckpointPolicy
from manifoldagg.federated.server.durability.journal import Journal
from manifoldagg.federated.server.durability.manager import Durability
from manifoldagg.federated.server.options import InitialModel, MemoryPolicy, ServerLimits, UpdateInfo
from manifoldagg.federated.server.server import Server
from manifoldagg.federated.stability import stability_limit, suggest_rate
from manifoldagg.federated.types import Averaging, Message, Outcome, Payload, Receipt, Rule, Ticket, Trainer, Update

__all__ = [
    "AsyncAggregator",
    "Averaging",
    "CheckpointPolicy",
    "Durability",
    "GramRule",
    "InitialModel",
    "Journal",
    "MemoryPolicy",
    "Message",
    "Outcome",
    "Payload",
    "Receipt",
    "Rule",
    "Server",
    "ServerLimits",
    "Ticket",
    "Trainer",
    "Update",
    "UpdateInfo",
    "UpdateLimits",
    "aggregate",
    "stability_limit",
    "suggest_rate",
    "train_client",
]
