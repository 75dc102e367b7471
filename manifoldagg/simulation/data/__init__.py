"""Data: tasks, their files, and how samples are split over clients."""

__all__: list[str] = []
