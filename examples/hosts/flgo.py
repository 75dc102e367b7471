"""FLGo: an algorithm for `flgo.init`, with a simulator of delays."""

from flgo.algorithm.asyncbase import AsyncServer
from flgo.algorithm.fedbase import BasicClient as Client  # noqa: F401

from manifoldagg import AsyncAggregator
from manifoldagg.federated.rules import FedOrtho


class Server(AsyncServer):
    def initialize(self):
        self.versions = AsyncAggregator(FedOrtho(rate=0.5), self.model.state_dict())

    def pack(self, client_id, mtype=0, *args, **kwargs):
        self.versions.checkout(client_id, restart=True)  # the simulator may have lost what it had
        return super().pack(client_id, mtype, *args, **kwargs)

    def package_handler(self, received_packages):
        for client, model in zip(received_packages["__cid"], received_packages["model"], strict=True):
            self.versions.submit(client, model.state_dict(), samples=self.clients[client].datavol)
        self.model.load_state_dict(self.versions.model)
        return not self.is_package_empty(received_packages)
