"""Integrations with other frameworks. Each one is imported on first access."""

__all__: list[str] = []
