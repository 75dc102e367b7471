"""The record: all that a server knows, as values that are replaced and never written; where it lies, and its files."""

__all__: list[str] = []
