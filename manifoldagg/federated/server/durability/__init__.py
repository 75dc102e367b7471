"""Durability of the server: checkpoints, the journal, spilled client state, and their files."""

__all__: list[str] = []
