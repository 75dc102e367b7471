"""Integrations with other frameworks, each of which is imported on first access."""

__all__: list[str] = []
