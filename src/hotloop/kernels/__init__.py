"""Kernels of our own, in Triton, where PyTorch's or the compiler's pass over memory more often than they must.

Each has a test that it equals the plain way. They are imported on a GPU only.
"""
