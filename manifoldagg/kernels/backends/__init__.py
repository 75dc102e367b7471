"""Implementations of the kernels `gram` and `combine` in PyTorch (`reference`), C++ (`cpu`) and Triton (`triton`)."""

__all__: list[str] = []
