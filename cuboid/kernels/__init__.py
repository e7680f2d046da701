"""Kernels and helpers of tensors that know nothing of ranks: Triton kernels, precision, pinned memory."""
