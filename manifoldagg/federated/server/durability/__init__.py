"""Durability of the server: checkpoints, the journal, and spill files."""

__all__: list[str] = []
