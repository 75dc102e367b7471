"""Executors: client tasks in this process, in other processes or on other machines, with bitwise equal results."""

__all__: list[str] = []
