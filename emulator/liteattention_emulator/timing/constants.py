"""The timing model's constants: read from the library, which has the one table, and overridden."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from liteattention_emulator import native


class BadConstants(ValueError):
    """Overrides that are no constants of the model or out of bounds; the text has every reason."""


@dataclass(frozen=True, slots=True)
class Constant:
    """One entry of ``emulator/src/timing/constants.def``.

    ``low`` and ``high`` bound what the value may be on hardware; they are equal where somebody
    measured it.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    source: str

    @property
    def open(self) -> bool:
        """Whether results are to be given over a range."""
        return self.low < self.high


@cache
def table() -> tuple[Constant, ...]:
    """All constants, in the order in which the library takes their values."""
    rows = native.json_of(native.functions().lae_timing_constants())
    return tuple(Constant(*row) for row in rows)


_LEAST = {"B/clk": 1, "lines": 1, "sets": 1, "loads": 1}
#: At least one clk of each, or nothing would ever take time.
_POSITIVE = ("valu_issue", "salu_issue", "matrix_pass", "wait_issue", "issue_period")


@cache
def _overrides() -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for constant in table():
        least = 1 if constant.name in _POSITIVE else _LEAST.get(constant.unit, 0)
        bounds = Field(constant.value, ge=least, allow_inf_nan=False)
        fields[constant.name] = (float, bounds)
    config = ConfigDict(extra="forbid")
    made: type[BaseModel] = create_model("Overrides", __config__=config, **fields)
    return made


def checked(overrides: Mapping[str, float] | None = None) -> dict[str, float]:
    """The value of every constant by name, some of them replaced.

    Raises BadConstants with every unknown name and every value out of bounds.
    """
    try:
        made = _overrides()(**dict(overrides or {}))
    except ValidationError as error:
        reasons = []
        for problem in error.errors():
            name = str(problem["loc"][0])
            if problem["type"] == "extra_forbidden":
                reasons.append(f"there is no constant {name}")
            else:
                reasons.append(f"{name}: {problem['msg'].lower()}, got {problem['input']!r}")
        known = ", ".join(constant.name for constant in table())
        raise BadConstants(f"{'; '.join(reasons)} (constants: {known})") from None
    return dict(made.model_dump())
