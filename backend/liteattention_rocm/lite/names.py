"""What tells the calls of a LiteAttention apart: generation, step, layer and branch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..arguments import Reasons
from .policy import plain_int


def checked_names(
    generation: Any,
    step: Any,
    layer: Any,
    branch: Any,
    num_steps: Any,
    others: Callable[[], Reasons] = Reasons,
) -> tuple[int, int | None]:
    """Return step and num_steps as plain integers; raise one error with every reason.

    ``others`` tells what else is wrong with the call, for the same error.
    """
    wrong = Reasons()
    if type(step) is not int:
        step = plain_int(step)
    if type(num_steps) is not int and num_steps is not None:
        num_steps = plain_int(num_steps)
    if type(step) is not int:
        wrong.types.append(f"step must be an integer, got {type(step).__name__}: use int(step)")
    elif step < 0:
        wrong.values.append(f"step must be >= 0, got {step}")
    if not isinstance(layer, str):
        wrong.types.append(f"layer must be a string, got {type(layer).__name__}")
    elif not layer:
        wrong.values.append("layer must not be empty: it tells the lists of the layers apart")
    if not isinstance(branch, str):
        wrong.types.append(f"branch must be a string, got {type(branch).__name__}")
    if generation is None:
        wrong.values.append("generation must not be None: reset(None) means all generations")
    elif type(generation) not in (int, str):
        try:
            hash(generation)
            if not _equals_itself(generation):
                wrong.values.append(
                    f"generation {generation!r} does not equal itself, so its lists would not be "
                    "found again: use a number, a string or a tuple of them, without NaN"
                )
        except TypeError:  # a tuple is Hashable, but not one that holds a list
            wrong.types.append(f"generation must be hashable, got {generation!r}")
        except (RuntimeError, ValueError):  # a tensor has an answer for each of its elements
            wrong.types.append(
                f"generation must be comparable, got {generation!r}: use a number, a string or a "
                "tuple of them"
            )
    if num_steps is not None:
        if type(num_steps) is not int:
            wrong.types.append(
                f"num_steps must be an integer or None, got {type(num_steps).__name__}"
            )
        elif num_steps < 1:
            wrong.values.append(f"num_steps must be >= 1, got {num_steps}")
    if wrong:
        wrong.add(others())
        wrong.raise_for("LiteAttention call")
    return step, num_steps


def _equals_itself(value: Any) -> bool:
    """Say whether a copy of ``value`` would be found under it: not if there is a NaN in it."""
    if isinstance(value, tuple | frozenset):  # which compare identity first
        return all(_equals_itself(item) for item in value)
    return bool(value == value)
