"""The federated server: `aggregate`, `AsyncAggregator`, `Server` and their shared parts."""

__all__: list[str] = []
