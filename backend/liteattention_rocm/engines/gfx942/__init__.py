"""The MI300X engine, its code objects and their manifest."""

from .engine import TARGET, Gfx942Engine, code_objects

__all__ = ["TARGET", "Gfx942Engine", "code_objects"]
