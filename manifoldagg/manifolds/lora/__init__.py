"""LoRA adapters as points of a manifold of low-rank matrices."""

__all__: list[str] = []
