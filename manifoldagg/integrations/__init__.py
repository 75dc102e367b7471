"""Integrations with other frameworks. Each integration is a module that is imported on first access."""

__all__: list[str] = []
