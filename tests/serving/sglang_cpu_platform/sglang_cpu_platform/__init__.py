"""Test-only: SGLang's runtime on a machine that has a CPU and PyTorch, and nothing else."""
