"""What :mod:`.kernels` measures: shapes in a YAML file, and the work that each has to do."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, model_validator
from typing_extensions import Self

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class _Cell(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Dense(_Cell):
    """Self-attention without lists."""

    batch: PositiveInt
    heads: PositiveInt
    length: PositiveInt
    head_dim: PositiveInt
    kv_heads: PositiveInt | None = None
    causal: bool = False
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        shape = f"{self.batch},{self.heads},{self.length},{self.head_dim}"
        kv = f" kv{self.kv_heads}" if self.kv_heads else ""
        return shape + kv + (" causal" if self.causal else "") + _unusual(self.dtype)

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products."""
        whole = 4.0 * self.batch * self.heads * self.length**2 * self.head_dim
        return whole / 2 if self.causal else whole

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done."""
        return self.flops

    @property
    def traffic(self) -> float:
        """Bytes of q, k, v and the output, each moved once."""
        heads = self.heads + (self.kv_heads or self.heads)
        return 4.0 * self.batch * heads * self.length * self.head_dim


class Lite(_Cell):
    """LiteAttention with part of the tiles skipped, beside dense attention."""

    batch: PositiveInt
    heads: PositiveInt
    length: PositiveInt
    head_dim: PositiveInt
    sparsity: float = Field(ge=0, lt=1)
    pattern: Literal["uniform", "clustered", "uneven"] = "uniform"
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        shape = f"{self.batch},{self.heads},{self.length},{self.head_dim}"
        return f"{shape} {100 * self.sparsity:g}% {self.pattern}{_unusual(self.dtype)}"

    @property
    def flops(self) -> float:
        """Multiplications and additions of the dense call."""
        return 4.0 * self.batch * self.heads * self.length**2 * self.head_dim

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done: those of the tiles that stay."""
        return (1 - self.sparsity) * self.flops

    @property
    def traffic(self) -> float:
        """Bytes of q, k, v and the output, each moved once."""
        return 8.0 * self.batch * self.heads * self.length * self.head_dim


class Decode(_Cell):
    """One new row per request against a paged cache, of fp8 (e4m3) numbers if ``fp8``."""

    requests: PositiveInt
    context: PositiveInt
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    page_size: PositiveInt = 16
    dtype: Literal["bf16", "fp16"] = "bf16"
    fp8: bool = False

    def __str__(self) -> str:
        """Name the cell in tables."""
        return (
            f"decode {self.requests} x {self.context}, {self.q_heads}/{self.kv_heads} x "
            f"{self.head_dim}{'' if self.page_size == 16 else f', pages of {self.page_size}'}"
            f"{', fp8' if self.fp8 else ''}{_unusual(self.dtype)}"
        )

    @property
    def bytes(self) -> float:
        """Bytes of keys and values, which a step has to read."""
        each = 1 if self.fp8 else 2
        return 2.0 * each * self.requests * self.context * self.kv_heads * self.head_dim

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done."""
        return 4.0 * self.requests * self.context * self.q_heads * self.head_dim

    @property
    def traffic(self) -> float:
        """Bytes of the cache, the queries and the output, each moved once."""
        return self.bytes + 4.0 * self.requests * self.q_heads * self.head_dim


class Prefill(_Cell):
    """New rows of every request against a paged cache or packed keys.

    ``fp8``: keys and values are e4m3 numbers of a paged cache. ``causal``: rows see the keys up to
    their own only; encoders' see all.
    """

    requests: PositiveInt
    rows: PositiveInt
    context: PositiveInt
    q_heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    page_size: int = Field(default=16, ge=0, description="0: packed keys")
    dtype: Literal["bf16", "fp16"] = "bf16"
    fp8: bool = False
    causal: bool = True

    @model_validator(mode="after")
    def _rows_are_part_of_the_context(self) -> Self:
        if self.rows > self.context:
            raise ValueError(f"rows {self.rows} must not exceed context {self.context}")
        return self

    @model_validator(mode="after")
    def _a_cache_has_pages(self) -> Self:
        if self.fp8 and not self.page_size:
            raise ValueError("fp8 numbers lie in a cache: give a page_size")
        return self

    def __str__(self) -> str:
        """Name the cell in tables."""
        rows = "" if self.rows == self.context else f"{self.rows} of "
        pages = f"pages of {self.page_size}" if self.page_size else "packed"
        return (
            f"prefill {self.requests} x {rows}{self.context}, {self.q_heads}/{self.kv_heads} x "
            f"{self.head_dim}, {pages}{', fp8' if self.fp8 else ''}"
            f"{'' if self.causal else ', not causal'}{_unusual(self.dtype)}"
        )

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products over what rows see."""
        seen = self.rows * (self.context - self.causal * (self.rows - 1) / 2)
        return 4.0 * self.requests * self.q_heads * seen * self.head_dim

    @property
    def work(self) -> float:
        """Multiplications and additions that have to be done."""
        return self.flops

    @property
    def traffic(self) -> float:
        """Bytes of q, k, v and the output, each moved once."""
        each = 1 if self.fp8 else 2
        numbers = each * self.context * self.kv_heads + 2 * self.rows * self.q_heads
        return 2.0 * self.requests * numbers * self.head_dim


class Host(_Cell):
    """A call so short that the host limits it: what the path through Python costs."""

    batch: PositiveInt = 1
    heads: PositiveInt = 8
    length: PositiveInt = 128
    head_dim: PositiveInt = 128
    dtype: Literal["bf16", "fp16"] = "bf16"

    def __str__(self) -> str:
        """Name the cell in tables."""
        shape = f"{self.batch},{self.heads},{self.length},{self.head_dim}"
        return f"host {shape}{_unusual(self.dtype)}"


def _unusual(dtype: str) -> str:
    """What the name of a cell says of its dtype: rows find their cells by it."""
    return "" if dtype == "bf16" else f", {dtype}"


Cell = Dense | Lite | Decode | Prefill | Host


class Config(BaseModel):
    """What to measure: a YAML file."""

    model_config = ConfigDict(extra="forbid")

    rounds: int = Field(default=15, ge=3)
    warmup: int = Field(default=3, ge=1)
    cold_l2: bool = True
    needs_gpu: bool = Field(default=False, description="of such sizes that a CPU takes hours")
    dense: tuple[Dense, ...] = ()
    lite: tuple[Lite, ...] = ()
    decode: tuple[Decode, ...] = ()
    prefill: tuple[Prefill, ...] = ()
    host: tuple[Host, ...] = ()

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells, in the order in which they are measured."""
        return (*self.host, *self.dense, *self.lite, *self.decode, *self.prefill)


def load(path: Path) -> Config:
    """Read a configuration; a number of ``sparsity`` may be a list, and so may a ``pattern``.

    Raises:
        ValueError: (``pydantic.ValidationError``) lists every mistake of the file.
        yaml.YAMLError: the file is no YAML.
        ValueError: it has no shapes.
    """
    import yaml  # other commands take their cells from here, and read no file

    raw = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    if isinstance(raw, dict) and isinstance(raw.get("lite"), list):
        raw["lite"] = [cell for entry in raw["lite"] for cell in _spread(entry)]
    config = Config.model_validate(raw)
    if not config.cells:
        raise ValueError("it has no shapes")
    return config


def _spread(entry: Any) -> Iterator[Any]:
    if not isinstance(entry, dict):
        yield entry
        return
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    for values in itertools.product(*lists.values()):
        yield entry | dict(zip(lists, values, strict=True))


def reasons(error: ValidationError, options: Mapping[str, str] | None = None) -> list[str]:
    """What is wrong with a model's fields, one reason each; ``options`` has other names of them."""
    found = []
    for item in error.errors(include_url=False):
        field, *more = item["loc"] or ("configuration",)
        name = (options or {}).get(str(field), str(field))
        where = name if name.startswith("-") else ".".join(map(str, (name, *more)))
        message = item["msg"].removeprefix("Value error, ")
        given = item["input"]
        got = f", got {given!r}" if isinstance(given, str | int | float) else ""
        found.append(f"{where}: {message}{got}")
    return found


def kind_of(cell: Cell) -> str:
    """Name the kind of a cell, as rows do."""
    return type(cell).__name__.lower()
