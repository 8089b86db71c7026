"""Kernel benchmarks against peers: ``liteattention-rocm bench``."""
