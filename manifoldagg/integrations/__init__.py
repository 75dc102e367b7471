"""Hosts: what makes this package work inside another framework, each of which is loaded when it is touched."""

__all__: list[str] = []
