"""Flower integration: an asynchronous strategy for the server, and a `ClientApp` that runs on the nodes."""

from importlib.util import find_spec

if find_spec("flwr") is None:
    raise ModuleNotFoundError("flower: expected Flower; pip install 'manifoldagg[flower]'", name="flwr")

from manifoldagg.integrations.flower.client import client_app
from manifoldagg.integrations.flower.strategy import Asynchronous

__all__ = ["Asynchronous", "client_app"]
