"""The command-line interface `manifoldagg`, with one module for each command, such as `compare` and `merge`."""

__all__: list[str] = []
