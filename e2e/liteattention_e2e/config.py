"""What an end-to-end run is asked to do: one pydantic model, checked as a whole.

Every option may come as text, as the command line gives it; all that is wrong with them is
reported at once. Thresholds are in log2 units.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from liteattention_rocm import MI300X_GEOMETRY, SkipPolicy, TileGeometry, engines, json_text
from liteattention_rocm.cli import dtypes, processors
from liteattention_rocm.cli.text import unwritable
from liteattention_rocm.contract import Engine
from liteattention_rocm.lite.policy import Budget, LayerBudgets, Threshold

from .clips import parse_prompt

Attention = Literal["diffusers", "dense", "lite"]
#: What PyTorch's generators take.
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
#: What is taken if nothing is named, by option. The repository has both; the model is also a
#: distribution of its own.
DEFAULTS = {"model": Path("e2e/model/wan-shapes"), "prompts": Path("e2e/prompts/shapes.txt")}
MODEL_PACKAGE = "liteattention_model"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def split(value: Any) -> Any:
    """'a,b' -> ['a', 'b'] and '' -> []; anything that is no text is left as it is.

    Raises:
        ValueError: an item is empty.
    """
    if not isinstance(value, str):
        return value
    parts = [part.strip() for part in value.split(",")]
    if not any(parts):
        return []
    if not all(parts):
        raise ValueError("an item is empty: take out a comma, or write what was left out")
    return parts


def _dtype(value: Any) -> Any:
    return dtypes.long(value) if isinstance(value, str) else value


def _in_utf8(value: Any) -> Any:
    why = unwritable(value)
    if why is not None:
        raise ValueError(f"{why}: give it in UTF-8")
    return value


def _some(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if not value:
        raise ValueError("give at least one")
    return value


def _distinct(value: tuple[Any, ...]) -> tuple[Any, ...]:
    if len(set(value)) < len(value):
        raise ValueError("each only once")
    return value


@dataclass(frozen=True)
class Configuration:
    """One way to run the pipeline: ``policy`` None is diffusers' own attention.

    ``steps`` is the number of denoising steps, None for the suite's own.
    """

    name: str
    kind: Attention
    policy: SkipPolicy | None
    steps: int | None = None

    @property
    def slug(self) -> str:
        """The name as part of a file name."""
        return re.sub(r"[^A-Za-z0-9._-]+", "_", self.name)


class PolicyOptions(BaseModel):
    """Fields of :class:`SkipPolicy` that all lite configurations of a run share."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold_scale: Literal["absolute", "length"] = "absolute"
    layer_thresholds: dict[str, Threshold] = {}
    layer_budgets: dict[str, LayerBudgets] = {}
    warmup_steps: int = Field(default=0, ge=0, le=10**9)
    last_step: int | None = None
    retest_every: int | None = Field(default=None, ge=1)
    branches: Literal["separate", "shared"] = "separate"
    soft_skip: bool = False
    direction: Literal["alternate", "ascending", "descending"] = "alternate"

    @field_validator("layer_thresholds", "layer_budgets", mode="before")
    @classmethod
    def _parse_layers(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, str):
            value = split(value)
        if isinstance(value, list | tuple):
            pairs = [str(item).rpartition("=") for item in value]
            wrong = [str(item) for item, pair in zip(value, pairs, strict=True) if not pair[0]]
            if wrong:
                number = "BUDGET" if info.field_name == "layer_budgets" else "THRESHOLD"
                raise ValueError(f"{', '.join(wrong)}: write PATTERN={number}")
            return {pattern: number for pattern, _, number in pairs}
        return value

    @model_validator(mode="after")
    def _policy_works(self) -> Self:
        # Any valid number will do: this is about the other fields, while they are still reported
        # together with the rest of the configuration.
        self.of("threshold", -1.0)
        if self.layer_budgets:
            self.of("budget", 0.01)
        return self

    def of(self, limit: Literal["threshold", "budget"], value: float) -> SkipPolicy:
        """Return the policy with a threshold (log2 units) or a budget (share of mass).

        What is about the other kind, ``layer_budgets`` or ``layer_thresholds``, is left out.
        Raises ``ValueError`` with every reason.
        """
        other = "layer_budgets" if limit == "threshold" else "layer_thresholds"
        return make_policy({**self.model_dump(exclude={other}), limit: value})


#: Options of what rows share, by field; of those that are for layers more is said.
_SHARED = {
    "threshold_scale": "--threshold-scale",
    "warmup_steps": "--dense-steps",
    "last_step": "--last-step",
    "retest_every": "--retest",
    "branches": "--branches",
    "soft_skip": "--soft-skip",
    "direction": "--direction",
}


class CalibrationOptions(BaseModel):
    """What ``calibrate`` aims at and tries; every option may come as text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    psnr: Annotated[tuple[float, ...], BeforeValidator(split)] = (40.0, 33.0)
    budgets: Annotated[tuple[float, ...], BeforeValidator(split)] = (0.01, 0.05, 0.25)
    by_head: bool = False
    dense_steps: Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(split)] = (4,)
    groups: int | None = Field(default=None, ge=1)
    rounds: int = Field(default=3, ge=1)

    _not_empty = field_validator("dense_steps")(_some)
    _no_doubles = field_validator("dense_steps")(_distinct)

    @field_validator("dense_steps")
    @classmethod
    def _one_or_by_head(cls, value: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        if value[1:] and not info.data.get("by_head"):
            raise ValueError(
                "several numbers are tried head by head: add --by-head, or give one number"
            )
        return value

    @field_validator("psnr")
    @classmethod
    def _decibels(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if not value or not all(10 <= item <= 60 for item in value):
            raise ValueError("qualities are PSNR in dB, from 10 to 60")
        if len({f"{item:g}" for item in value}) < len(value):  # policies are named by them
            raise ValueError("each only once, in six digits")
        return value

    @field_validator("budgets")
    @classmethod
    def _two(cls, value: tuple[float, ...]) -> tuple[float, ...]:
        if len(set(value)) < max(2, len(value)) or not all(0.001 <= item < 1 for item in value):
            raise ValueError("give at least two trial budgets, 0.001 to below 1, each once")
        return value


#: Runs after which every graph of a schedule is captured: forwards are captured the second time
#: that their launches are asked for, and the first steps of a generation come once in it.
GRAPH_WARMUPS = 3


#: More is a slip of the keyboard: schedulers have 1,000 timesteps.
MOST_STEPS, MOST_SIZE, MOST_RUNS = 1000, 1 << 16, 10_000


class SuiteConfig(BaseModel):
    """A whole run. Sizes left out are the model's own defaults (see ``runner.defaults``)."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    runner: Literal["diffusers", "sglang"] = "diffusers"
    model: str = Field(default=None, min_length=1, validate_default=True)
    prompts: tuple[str, ...] = Field(default=None, validate_default=True)
    negative_prompt: str | None = None
    attention: Annotated[tuple[Attention, ...], BeforeValidator(split)] = (
        "diffusers",
        "dense",
        "lite",
    )
    thresholds: Annotated[tuple[Threshold, ...], BeforeValidator(split)] = (
        float("-inf"),  # what it costs where nothing can be skipped
        -8.0,
        -6.0,
        -4.0,
    )
    budgets: Annotated[tuple[Budget, ...], BeforeValidator(split)] = ()
    policy: PolicyOptions = Field(default_factory=PolicyOptions)
    policies: dict[str, SkipPolicy] = {}
    steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    short_steps: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    height: int | None = Field(default=None, ge=1, le=MOST_SIZE)
    width: int | None = Field(default=None, ge=1, le=MOST_SIZE)
    frames: int | None = Field(default=None, ge=1, le=MOST_SIZE)
    guidance: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    max_sequence_length: int | None = Field(default=None, ge=1, le=MOST_SIZE)
    seeds: Annotated[tuple[Seed, ...], BeforeValidator(split)] = (0,)
    repeats: int = Field(default=1, ge=1, le=MOST_RUNS)
    warmup: int = Field(default=1, ge=0, le=MOST_RUNS)
    geometry: TileGeometry | None = None
    engine: str | None = None
    cross_attention: Literal["own", "dense"] | None = None
    threads: int | None = Field(default=None, ge=1)
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], BeforeValidator(_dtype)] = (
        "bfloat16"
    )
    device: str = "cpu"
    compiled: bool = False
    graphs: bool = False
    check_prompts: bool = False
    fps: int = Field(default=8, ge=1, le=1000)
    out: Path = Path("out")

    _not_empty = field_validator("attention", "seeds")(_some)
    _no_doubles = field_validator("attention", "thresholds", "budgets", "seeds")(_distinct)

    @field_validator("*", mode="before")
    @classmethod
    def _writable(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "out":  # the command looks at the folder
            return value
        return _in_utf8(value)

    @field_validator("model", mode="before")
    @classmethod
    def _find_model(cls, value: Any) -> Any:
        return str(_default("model")) if value is None else value

    @field_validator("prompts", mode="before")
    @classmethod
    def _read_prompts(cls, value: Any) -> Any:
        if value is None:
            value = _default("prompts")
        if isinstance(value, str | Path):
            return read_prompts(Path(value))
        return value

    @field_validator("prompts")
    @classmethod
    def _some_prompts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(prompt.strip() for prompt in value):
            raise ValueError("give at least one prompt, and no empty ones")
        return value

    @field_validator("policies", mode="before")
    @classmethod
    def _read_policies(cls, value: Any) -> Any:
        if isinstance(value, str | Path):
            path, value = value, read_json_object(Path(value))
            if not value:
                raise ValueError(
                    f"{path} has no policy: write NAME: FIELDS into it, or leave it out"
                )
        if not isinstance(value, dict):
            return value
        problems, made = [], {}
        for name, fields in value.items():
            if isinstance(name, str) and not name.strip():
                problems.append(f"{name!r} is no name of a policy")
            try:
                made[name] = make_policy(fields) if isinstance(fields, dict) else fields
            except ValueError as error:
                problems.append(f"{name}: {error}")
        if problems:
            raise ValueError("; ".join(problems))
        return made

    @field_validator("geometry", mode="before")
    @classmethod
    def _parse_geometry(cls, value: Any) -> Any:
        return parse_geometry(value) if isinstance(value, str) else value

    @field_validator("engine")
    @classmethod
    def _known_engine(cls, value: str | None) -> str | None:
        if value is not None:
            engines.get(value)
        return value

    @field_validator("threads")
    @classmethod
    def _processors_for_threads(cls, value: int | None) -> int | None:
        for why in () if value is None else processors.thread_reasons(value):
            raise ValueError(why)
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        try:
            device = torch.device(value)
        except RuntimeError as error:
            raise ValueError(f"{value!r} is no device of PyTorch") from error
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"{value!r} is asked for, and PyTorch sees no GPU")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            there = ", ".join(f"cuda:{i}" for i in range(torch.cuda.device_count()))
            raise ValueError(f"{value!r} is asked for, and PyTorch sees {there}")
        return value

    def unfit_steps(self, steps: int) -> list[str]:
        """What is against ``short_steps`` beside a schedule of ``steps``."""
        if self.short_steps is None or self.short_steps < steps:
            return []
        return [f"short_steps must be fewer than steps, got {self.short_steps} and {steps}"]

    @model_validator(mode="before")
    @classmethod
    def _budgets_alone(cls, given: Any) -> Any:
        """Budgets take the place of the default thresholds."""
        if isinstance(given, dict) and given.get("budgets"):
            return {"thresholds": (), **given}
        return given

    @model_validator(mode="after")
    def _works(self) -> Self:
        """Everything that is wrong with fields taken together, one reason per line."""
        problems = [
            *self._unfit_limits(),
            *self._odd_prompts(),
            *self._uncompilable(),
            *([] if self.steps is None else self.unfit_steps(self.steps)),
            *self._unfit_policies(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _unfit_limits(self) -> list[str]:
        """What is against thresholds, budgets and policies: rows without, or some without a row."""
        if "lite" not in self.attention:
            # Nobody asked for the default thresholds.
            thresholds = self.thresholds if "thresholds" in self.model_fields_set else ()
            rows = (
                ("--threshold", "threshold", thresholds),
                ("--budgets", "budget", self.budgets),
                ("--policies", "policy", self.policies),
                ("--layer-threshold", "threshold", self.policy.layer_thresholds),
                ("--layer-budget", "budget", self.policy.layer_budgets),
            )
            return [
                f"{option}: no row has a {what}: add lite to --attention, or leave it out"
                for option, what, given in rows
                if given
            ] + self._shared_without("add lite to --attention")
        problems = []
        if self.policies and not (self.thresholds or self.budgets):  # which bring their own fields
            problems += self._shared_without("give --threshold or --budgets too")
        if not (self.thresholds or self.budgets or self.policies):
            problems.append("lite: give at least one threshold, budget or policy")
        # What is said of layers is said of a row.
        if self.policy.layer_thresholds and not self.thresholds:
            problems.append(
                "--layer-threshold: no row has a threshold: give --threshold too, or leave it out"
            )
        if self.policy.layer_budgets and not self.budgets:
            problems.append(
                "--layer-budget: no row has a budget: give --budgets too, or leave it out"
            )
        return problems

    def _shared_without(self, cure: str) -> list[str]:
        """What is against options that only rows of thresholds and budgets share, without a row."""
        given = ", ".join(
            option for field, option in _SHARED.items() if field in self.policy.model_fields_set
        )
        return [f"{given}: no row has a threshold or budget: {cure}, or leave out"] if given else []

    def _odd_prompts(self) -> list[str]:
        """What is against reading the videos of these prompts."""
        problems = []
        for prompt in self.prompts if self.check_prompts else ():
            try:
                parse_prompt(prompt)
            except ValueError as error:
                problems.append(str(error))
        if not problems:
            return []
        return [
            "check_prompts reads moving shapes, prompts of the small model: " + "; ".join(problems)
        ]

    def _uncompilable(self) -> list[str]:
        """What is against compiled blocks and graphs."""
        problems = []
        if self.compiled and self.runner == "sglang":
            problems.append("compiled is for the runner diffusers: SGLang compiles by itself")
        if self.graphs and self.runner == "sglang":
            problems.append("graphs is for the runner diffusers: SGLang captures its own")
        if self.graphs and torch.device(self.device).type != "cuda":
            problems.append(f"graphs are CUDA's: device must be a GPU, got {self.device!r}")
        return problems

    def _unfit_policies(self) -> list[str]:
        """What is against the configurations, or against their engine on the device."""
        try:
            if self.uses_engine:
                engines.check_device(self.chosen_engine, torch.device(self.device))
        except ValueError as error:
            return [str(error)]
        return []

    def configurations(self) -> tuple[Configuration, ...]:
        """What will be compared, in order: the references first, then every lite policy.

        With ``short_steps`` then all of them again on that schedule.

        Raises:
            ValueError: a policy is invalid, or two configurations have one name.
        """
        found: list[Configuration] = []
        if "diffusers" in self.attention:
            found.append(Configuration("diffusers", "diffusers", None))
        if "dense" in self.attention:
            found.append(Configuration("dense", "dense", SkipPolicy(enabled=False)))
        if "lite" in self.attention:
            found += [
                Configuration(f"lite {value:g}", "lite", self.policy.of("threshold", value))
                for value in self.thresholds
            ]
            found += [
                Configuration(f"lite budget {value:g}", "lite", self.policy.of("budget", value))
                for value in self.budgets
            ]
            found += [Configuration(name, "lite", item) for name, item in self.policies.items()]
        if self.short_steps is not None:
            found += [
                replace(item, name=f"{item.name}, {self.short_steps} steps", steps=self.short_steps)
                for item in found
            ]
        slugs = [item.slug for item in found]
        twice = sorted({slug for slug in slugs if slugs.count(slug) > 1})
        if twice:
            raise ValueError(f"two configurations would be called {', '.join(twice)}: rename one")
        return tuple(found)

    @property
    def uses_engine(self) -> bool:
        """Whether any configuration runs our attention."""
        return any(item.policy is not None for item in self.configurations())

    @property
    def chosen_engine(self) -> Engine:
        """The engine that the dense and lite configurations run on."""
        return engines.choose(self.device, self.engine)

    @property
    def emulated(self) -> bool:
        """Whether our attention runs on an emulated GPU, so that its seconds mean nothing."""
        return self.uses_engine and self.chosen_engine.emulated

    @property
    def dense_cross_attention(self) -> bool:
        """Whether cross-attention runs on our engine, too; on gfx942 it does unless told not to.

        That engine is there to show what a GPU would run, so nothing is left to another.
        """
        if not self.uses_engine:
            return False
        if self.cross_attention is None:
            return self.chosen_engine.name == "gfx942"
        return self.cross_attention == "dense"

    @property
    def warmup_runs(self) -> int:
        """Untimed runs of each configuration; graphs want enough to be captured."""
        return max(self.warmup, GRAPH_WARMUPS) if self.graphs and self.warmup else self.warmup

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as PyTorch names it."""
        return DTYPES[self.dtype]


def _default(option: str) -> Path:
    """What an option is if it is left out: in the checkout of this package, as the distribution
    liteattention-rocm-model (the model only), or in the current folder.

    Raises:
        ValueError: it is nowhere.
    """
    path = DEFAULTS[option]
    roots = [Path(__file__).resolve().parents[2] / path]
    if option == "model":
        with contextlib.suppress(ImportError):  # an optional distribution
            roots.append(Path(importlib.import_module(MODEL_PACKAGE).MODEL))
    roots.append(path)
    for root in roots:
        if root.exists():
            return root
    cure = f"give --{option}, or run at the top of a checkout"
    if option == "model":
        cure = (
            "install liteattention-rocm-model (pip install ./e2e/model in a checkout, or the wheel "
            f"of that name that comes with this one), or {cure}"
        )
    raise ValueError(
        f"the package has none of its own, and there is no {str(path)!r} in the current folder: "
        f"{cure}"
    )


def make_policy(fields: dict[str, Any]) -> SkipPolicy:
    """A policy from its fields.

    Raises:
        ValueError: with every reason in one line.
    """
    try:
        return SkipPolicy(**fields)
    except ValidationError as error:
        raise ValueError("; ".join(reasons(error))) from error


def parse_geometry(text: str) -> TileGeometry | None:
    """'cpu' -> None (the engine's own), 'mi300x' -> the MI300X tile, '128x64x32' -> that tile."""
    if text == "cpu":
        return None
    if text == "mi300x":
        return MI300X_GEOMETRY
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isdecimal() for part in parts):
        raise ValueError(
            f"{text!r} is no tile geometry: write cpu (the engine's own), mi300x or "
            "Q_BLOCKxK_BLOCKxVOTE_ROWS such as 128x64x32"
        )
    return TileGeometry(*(int(part) for part in parts))


def read_prompts(path: Path) -> list[str]:
    """Prompts of a file: a JSON list of texts, or a prompt per line ('#' starts a comment).

    Raises:
        ValueError: the file cannot be read or is of another form.
    """
    content = _read(path)
    if path.suffix == ".json":
        listed = json_text.parse(content, str(path))
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise ValueError(f"{path} must hold a JSON list of texts")
        _in_utf8(listed)
        return listed
    lines = [line.strip() for line in content.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def read_json_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ValueError: the file cannot be read or is of another form, or an object in it has a name
            several times.
    """
    twice: dict[str, None] = {}

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        twice.update(dict.fromkeys(repr(name) for name in names if names.count(name) > 1))
        return dict(pairs)

    value = json_text.parse(_read(path), str(path), once)
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object of names and what they stand for")
    if twice:
        raise ValueError(f"{path} has {', '.join(twice)} several times: keep one of each")
    _in_utf8(value)
    return value


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 (byte {error.start}): save it as UTF-8") from error


def load_config(
    options: dict[str, Any], names: Callable[[Place], str] | None = None
) -> SuiteConfig:
    """Check options as text; those that are None take their default.

    ``names``: see :func:`reasons`.

    Raises:
        ValueError: with every reason, one per line.
    """
    given = {name: value for name, value in options.items() if value is not None}
    try:
        return SuiteConfig.model_validate(given)
    except ValidationError as error:
        raise ValueError("\n".join(reasons(error, names))) from error


#: Where in a configuration something is wrong: names of fields, keys and numbers in lists.
Place = tuple[int | str, ...]


def fields(place: Place) -> str:
    """Name a place as Python code does; "" is the whole."""
    return ".".join(map(str, place))


#: What pydantic finds, by its type, in our words.
_PLAIN = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_parsing": "must be a number",
    "finite_number": "must be finite",
    "int_parsing_size": "is a number of too many digits",
    "bool_parsing": "must be true or false",
    "literal_error": "must be {expected}",
}


def reasons(error: ValidationError, names: Callable[[Place], str] | None = None) -> list[str]:
    """One line per thing that is wrong: where, what was given, and what is wrong with it.

    ``names`` says what whoever gave the fields calls a place, "" if nothing: :func:`fields` by
    default.
    """
    lines = []
    for item in error.errors(include_url=False):
        where = (names or fields)(item["loc"])
        plain = _PLAIN.get(item["type"])
        message = plain.format(**item.get("ctx", {})) if plain else item["msg"]
        message = message.removeprefix("Value error, ")
        given = item.get("input")
        quoted = isinstance(given, str) and repr(given) in message
        if where and isinstance(given, str | int | float) and not quoted:
            where += f"={given}"
        # The whole may have several reasons, a line each.
        lines += [f"{where}: {message}"] if where else message.splitlines()
    return lines
