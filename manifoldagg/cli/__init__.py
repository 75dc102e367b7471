"""The command line: `manifoldagg compare`, `report`, `route` and `doctor`, one file each."""

__all__: list[str] = []
