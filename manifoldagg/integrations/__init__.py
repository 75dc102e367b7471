"""Integrations with other frameworks, such as Flower. Each integration is a module that must be imported separately."""

__all__: list[str] = []
