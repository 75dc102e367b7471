"""An engine for tests: Flower's own grid, link state and simulation runtime, with nodes that are threads of this process."""

import copy
import threading
from contextlib import contextmanager

from flwr.clientapp import ClientApp
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.server.superlink.fleet.vce.backend import Backend
from flwr.server.superlink.fleet.vce.metrics import VceMetrics
from flwr.server.superlink.fleet.vce.vce_api import _register_node_info_stores, _register_nodes, run_api
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME, NOOP_FEDERATION_ID, TaskType
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.grid.inmemory_grid import InMemoryGrid

WORKERS = 4


class Threads(Backend):
    """Runs a ClientApp in the threads that ask for it, on copies: no node writes what another one reads."""

    def __init__(self):
        super().__init__({})

    def build(self, app_fn):
        self.app = app_fn()

    @property
    def num_workers(self):
        return WORKERS

    def is_worker_idle(self):
        return True

    def terminate(self):
        pass

    def process_message(self, message, context):
        content = copy.deepcopy(message.content)
        told = copy.copy(message)
        told.__dict__ = {**message.__dict__, "_content": content}
        return self.app(told, context), context


class Crowd(dict):
    """Nodes and their partitions; one may join while others look."""

    def keys(self):
        return list(super().keys())


class Engine:
    """The nodes of a run.

    Attributes:
        grid: for a strategy.
        nodes: their partitions, by id.
    """

    def __init__(self, count):
        self.factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, NoOpFederationManager(), ObjectStoreFactory())
        self.state = self.factory.state()
        run_id = self.state.create_run(
            "", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, primary_task_type=TaskType.SIMULATION
        )
        (self.run,) = self.state.get_run_info(run_ids=[run_id])
        # What a process that runs a ServerApp is told.
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, run_id, SUPERLINK_NODE_ID
        self.grid = InMemoryGrid(self.factory, pull_interval=0.01)
        self.grid.set_run(self.run)
        self.nodes = Crowd()
        self.stores = {}
        for _ in range(count):
            self.join()

    def join(self):
        """A node comes; its id."""
        (node,) = _register_nodes(1, self.factory)
        part = len(self.nodes)
        self.stores |= _register_node_info_stores({node: part}, self.run)
        self.nodes[node] = part
        return node

    def leave(self, node):
        """A node goes, with whatever it has in its hands."""
        self.state.delete_node(NOOP_FLWR_AID, node)


@contextmanager
def running(app: ClientApp, count: int):
    """Nodes that run an app, until the block is left."""
    engine = Engine(count)
    stop = threading.Event()
    arguments = (lambda: app, Threads, engine.nodes, engine.factory, engine.stores, stop, VceMetrics())
    thread = threading.Thread(target=run_api, args=arguments)
    thread.start()
    try:
        yield engine
    finally:
        stop.set()
        thread.join()
