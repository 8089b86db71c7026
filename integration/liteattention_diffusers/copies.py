"""A copy or pickle of a module that is taken over is the plain module.

What ``enable`` adds belongs to one pipeline: its clock, its handle, the lists of its run. Copied
along with a module (``copy.deepcopy`` for an average of the weights, ``torch.save``) it would drag
the pipeline's other models with it, or count the steps of the wrong pipeline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

#: Both copy and pickle look it up on the object, before its class.
_REDUCE = "__reduce_ex__"


def stay_plain(module: torch.nn.Module, undo: Callable[[dict[str, Any]], None]) -> None:
    """Let ``undo`` take out of a copy's attributes what was added; see :func:`release`.

    ``undo`` gets a new dict of the module's attributes. It must replace values, not change them:
    they are the module's own.
    """

    def reduce(protocol: Any) -> Any:
        made: Any = type(module).__reduce_ex__(module, protocol)
        state = dict(made[2])
        del state[_REDUCE]
        undo(state)
        return (*made[:2], state, *made[3:])

    vars(module)[_REDUCE] = reduce


def release(module: torch.nn.Module) -> None:
    """Undo :func:`stay_plain`."""
    vars(module).pop(_REDUCE, None)
