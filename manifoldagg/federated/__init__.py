"""Thin federated drivers over the geometry: rules, trainers, the server, and a front door for other codebases."""

from manifoldagg.federated.aggregate import aggregate
from manifoldagg.federated.checks import Checks
from manifoldagg.federated.contract import Averaging, Message, Outcome, Payload, Receipt, Rule, Ticket, Trainer, Update
from manifoldagg.federated.record.checkpoint import Every
from manifoldagg.federated.record.journal import Journal
from manifoldagg.federated.server import Server
from manifoldagg.federated.versions import Versions
from manifoldagg.federated.work import work

__all__ = [
    "Averaging",
    "Checks",
    "Every",
    "Journal",
    "Message",
    "Outcome",
    "Payload",
    "Receipt",
    "Rule",
    "Server",
    "Ticket",
    "Trainer",
    "Update",
    "Versions",
    "aggregate",
    "work",
]
