"""Implementations of the two kernels in PyTorch (`reference`), C++ (`cpu`) and Triton (`triton`)."""

__all__: list[str] = []
