"""The function `aggregate`, the classes `AsyncAggregator` and `Server`, and the modules that they share."""

__all__: list[str] = []
