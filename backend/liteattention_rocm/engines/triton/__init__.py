"""The portable engine, its Triton kernels and what launches them.

Importing this package needs no Triton; binding a call does.
"""

from .engine import PortableEngine

__all__ = ["PortableEngine"]
