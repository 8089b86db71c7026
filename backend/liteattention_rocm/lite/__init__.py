"""LiteAttention over the steps of a generation, and the bitmaps that say what it skips.

``attention`` holds :class:`~liteattention_rocm.LiteAttention` and ``policy`` its settings;
``parallel`` splits a sequence over processes; ``bitmap``, ``run_length``, ``statistics`` and
``picture`` make, convert, count and draw. The engines know only ``bitmap``.
"""
