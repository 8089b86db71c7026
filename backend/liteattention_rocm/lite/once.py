"""Warnings that a process logs once, however many calls or layers have their cause."""

from __future__ import annotations

import functools
import logging

logger = logging.getLogger(__name__)


@functools.lru_cache(maxsize=256)
def warn_once(text: str) -> None:
    """Log a warning that this process has not logged lately."""
    logger.warning("%s", text)
