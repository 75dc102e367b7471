"""Implementations of the two kernels: PyTorch (`reference`), C++ (`cpu`) and Triton (`triton`)."""

__all__: list[str] = []
