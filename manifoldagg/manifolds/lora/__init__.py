"""Low-rank leaves: LoRA adapters, their scaling, and their factors."""

__all__: list[str] = []
