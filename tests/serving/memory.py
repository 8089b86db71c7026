"""Whether a server leaks, told from one measurement a round."""

from __future__ import annotations

from collections.abc import Callable

#: What a round may add without being a leak. vLLM's own attention, too, adds 1 to 8 MiB in most
#: rounds of 64 requests, and now and then an allocator takes 30 MiB at once.
SLACK = 8 << 20


def settle(serve_a_round: Callable[[], int], rounds: int = 6) -> None:
    """Serve until a round ends with no more than SLACK above the one before.

    ``serve_a_round`` returns the bytes held after it. A leak adds to every round, allocators only
    to some; the first round, which warms everything up, is not counted.

    Raises:
        AssertionError: every round added more.
    """
    held = [serve_a_round(), serve_a_round()]
    while held[-1] - held[-2] > SLACK:
        assert len(held) <= rounds, f"MiB after each round: {[size >> 20 for size in held]}"
        held.append(serve_a_round())
