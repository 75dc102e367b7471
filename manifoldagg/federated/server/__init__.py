"""The federated server: `aggregate`, `AsyncAggregator` and `Server`, and the parts that they share."""

__all__: list[str] = []
