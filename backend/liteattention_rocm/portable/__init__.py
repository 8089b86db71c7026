"""Triton kernels of the portable engine and what launches them."""
