"""Workers: what a client was asked for is trained here, in other processes or on other machines, with equal bits."""

__all__: list[str] = []
