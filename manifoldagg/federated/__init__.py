"""Thin federated drivers over the geometry: rules, trainers, the server, and a front door for other codebases."""

from manifoldagg.federated.aggregate import aggregate
from manifoldagg.federated.contract import Message, Outcome, Payload, Rule, Trainer, Update
from manifoldagg.federated.server import Receipt, Server, Ticket

__all__ = [
    "Message",
    "Outcome",
    "Payload",
    "Receipt",
    "Rule",
    "Server",
    "Ticket",
    "Trainer",
    "Update",
    "aggregate",
]
