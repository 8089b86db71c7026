"""Builds and inspects the gfx942 code objects, from a checkout: ``python -m liteattention_tools``.

Not part of the wheel. The library reads what these tools write: code objects and manifest.
"""
