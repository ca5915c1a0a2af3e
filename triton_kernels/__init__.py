"""Triton kernels of tagc's operators."""
