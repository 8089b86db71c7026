"""A cycle model of one CU of an MI300X: replays what a recorded workgroup executed.

``replay`` says when each instruction issues and where the matrix cores' time goes; ``report`` and
``picture`` show it. The unit is clk, clocks of the CU, never seconds: the clock is no part of it.
docs/model.md says what is modelled and how far it can be believed.
"""

from .chip import Chip, Cost, Launch, launch, residency
from .constants import BadConstants, Constant, checked, table
from .loops import Loop, find
from .model import Flight, Idle, Replay, Spread, replay, spread
from .work import Work, work

__all__ = [
    "BadConstants",
    "Chip",
    "Constant",
    "Cost",
    "Flight",
    "Idle",
    "Launch",
    "Loop",
    "Replay",
    "Spread",
    "Work",
    "checked",
    "find",
    "launch",
    "replay",
    "residency",
    "spread",
    "table",
    "work",
]
