"""Server side of federated learning: the function `aggregate`, and the classes `AsyncAggregator` and `Server`."""

__all__: list[str] = []
