"""Forward hooks of PyTorch that look the same on every module, and in no copy of it."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.hooks import RemovableHandle

#: PyTorch counts its hooks upwards from 0, so a negative number is ours alone.
HOOK_KEY = -942
#: Where a module keeps its hooks, by key.
_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_always_called",
)


def same_key(hook: RemovableHandle, *tables: dict[int, Any]) -> RemovableHandle:
    """Give a hook the key that it has on every module.

    PyTorch numbers hooks through the process, and compiled code guards on that number: blocks
    compiled one by one (``compile_repeated_blocks``) would be compiled once per layer.
    """
    for table in tables:
        table[HOOK_KEY] = table.pop(hook.id)
    hook.id = HOOK_KEY
    return hook


def take_out(state: dict[str, Any]) -> None:
    """Take our hooks out of the attributes of a copy of a module; the module keeps its tables."""
    for table in _HOOK_TABLES:
        state[table] = copy.copy(state[table])
        state[table].pop(HOOK_KEY, None)
