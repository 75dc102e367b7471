"""Executors: client tasks run in this process, in other processes or on other machines, with the same bits."""

__all__: list[str] = []
