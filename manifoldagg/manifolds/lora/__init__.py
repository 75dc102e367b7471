"""Low-rank leaves: LoRA adapters, their scalings, and the algebra of their factors."""

__all__: list[str] = []
