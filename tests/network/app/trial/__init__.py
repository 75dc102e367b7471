"""A Flower app that trains on the digits. The run configuration selects nodes that fail."""
