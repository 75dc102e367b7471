"""The command line: `manifoldagg compare`, `report`, `route`, `inspect` and `doctor`, one file each."""

__all__: list[str] = []
