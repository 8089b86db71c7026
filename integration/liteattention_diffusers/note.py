"""Which layer calls the dispatcher: said by a hook on the module just before, read once.

diffusers calls a backend with tensors only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusers.models.attention_dispatch import AttentionBackendName


class Beside(NamedTuple):
    """Another sequence that a module was given, and the name of the layer.

    Whether the module attends to both together, as to one sequence, or only to the other one, is
    seen in the rows of its queries and keys alone.
    """

    rows: int
    layer: str


class Note:
    """Who is calling the dispatcher: written by a module's hook, read once by the backend.

    Owner: this module; one per thread, plus one for code that ``torch.compile`` is tracing.
    Lifetime: set when an attention module is entered, cleared when it is left.
    """

    def __init__(self) -> None:
        self.inside = False
        self.slot: torch.Tensor | None = None
        self.previous: AttentionBackendName | None = None
        self.dense = False
        self.engine: str | None = None
        self.beside: Beside | None = None
        #: Whether the backend was called in this call of the module, and its slot given out.
        self.reached = self.given = False
        #: Told of a call of an enabled layer that skip state could not take, and why.
        self.missed: Callable[[str], None] | None = None


class _ThreadNote(Note, threading.local):
    pass


_thread_note = _ThreadNote()
# Dynamo cannot trace a thread-local. What it traces it replays in program order, and the slot
# itself is baked into the graph as an input, so one plain object is enough while compiling.
_traced_note = Note()


def current() -> Note:
    """Return the note of whoever runs now: this thread, or code that is being traced."""
    return _traced_note if torch.compiler.is_compiling() else _thread_note


def read() -> Note:
    """Return the note that the hook wrote for this call of the backend."""
    note = current()
    if not note.inside and not torch.compiler.is_compiling():
        # The hook ran in a compiled frame that broke before this call.
        note = _traced_note
    return note


def enter(
    slot: torch.Tensor | None,
    previous: AttentionBackendName | None,
    *,
    dense: bool = False,
    engine: str | None = None,
    beside: Beside | None = None,
    missed: Callable[[str], None] | None = None,
) -> None:
    """Note that an attention module is entered; ``slot`` None says: not self-attention.

    ``previous`` is the backend the module had before, None for the process-wide one; a call
    without a slot goes there unless ``dense`` says that ours takes it, on ``engine``. With
    ``beside`` the slot is for calls that attend to both sequences together. ``missed`` is told why
    a call that could have had skip state has none.
    """
    note = current()
    note.inside, note.slot, note.previous = True, slot, previous
    note.dense, note.engine, note.beside = dense, engine, beside
    note.reached, note.given, note.missed = False, False, missed


def leave() -> None:
    """Note that the attention module is left."""
    note = current()
    note.inside, note.slot, note.previous = False, None, None
    note.dense, note.engine, note.beside = False, None, None
    note.reached, note.given, note.missed = False, False, None
