"""One dialect of options, and a command line that starts quickly."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import typer.main
from typer.testing import CliRunner

from liteattention_rocm.cli import options, root

RUNNER = CliRunner()
HEAVY = ("torch", "numpy", "triton", "diffusers", "matplotlib")
RUN = "import liteattention_rocm_cli as m; m.main()"
#: Numbers that a command checks itself, together with the others of a shape.
OF_SHAPES = {"plan"}
#: A number that is compared with the processors.
CHECKED = {("bench cpu", "--threads")}


def commands(command: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every command without commands below it, by name."""
    below = getattr(command, "commands", {})
    if not below:
        yield name, command
    for each, inner in below.items():
        yield from commands(inner, f"{name} {each}".strip())


def every() -> dict[str, Any]:
    return dict(commands(typer.main.get_command(root.build())))


def started(*arguments: str, code: str = RUN, **variables: str) -> tuple[str, set[str]]:
    """Standard output of a command, and the modules that it has imported at its end."""
    report = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: os.write(3, ' '.join(sys.modules).encode()))\n"
    )
    reading, writing = os.pipe()
    done = subprocess.Popen(
        [sys.executable, "-c", f"import os; os.dup2({writing}, 3)\n{report}{code}", *arguments],
        stdout=subprocess.PIPE, text=True, pass_fds=(writing,), env={**os.environ, **variables},
    )  # fmt: skip
    os.close(writing)
    with os.fdopen(reading) as modules:
        found = set(modules.read().split())
    out, _ = done.communicate()
    assert done.returncode == 0, out
    return out, found


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"], ["--help"], ["bench", "--help"], ["bench", "video", "--help"],
        ["e2e", "--help"], ["generate", "--help"], ["calibrate", "--help"], ["doctor", "--help"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_computes_nothing_imports_nothing_that_computes(arguments: list[str]) -> None:
    out, modules = started(*arguments)
    assert out and "liteattention_rocm.cli.root" in modules
    assert [name for name in HEAVY if name in modules] == []


def test_completion_of_names_and_options_imports_nothing_that_computes() -> None:
    for words, expected in (("liteattention-rocm ca", "calibrate"),
                            ("liteattention-rocm e2e --soft", "--soft-skip")):  # fmt: skip
        out, modules = started(
            code=f"import sys; sys.argv[0] = 'liteattention-rocm'; {RUN}",
            _LITEATTENTION_ROCM_COMPLETE="complete_bash", COMP_WORDS=words,
            COMP_CWORD=str(words.count(" ")), _TYPER_COMPLETE_ARGS=words,
        )  # fmt: skip
        assert expected in out.split()
        assert [name for name in HEAVY if name in modules] == []


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_start_takes_little_processor_time(option: str) -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", RUN, option], stdout=subprocess.PIPE, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) <= 0.3


def test_the_package_is_a_program() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "liteattention_rocm", "--version"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("0.")
    assert "| torch" not in done.stderr


@pytest.mark.parametrize("first", ["", "import torch; "])
def test_the_library_is_whole_without_the_command_line(first: str) -> None:
    """Operators are registered on import; nothing is left for a compiler to find."""
    code = f"{first}import liteattention_rocm as l, sys, torch\n"
    code += "assert torch.ops.liteattention_rocm.attention\n"
    code += "assert 'attention' in vars(l) and l.attention is vars(l)['attention']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_library_is_there_for_commands() -> None:
    code = "import liteattention_rocm_cli, sys\nimport liteattention_rocm as l\n"
    code += "assert 'torch' not in sys.modules\n"
    code += "from liteattention_rocm import attention, SkipPolicy\nimport torch\n"
    code += "assert torch.ops.liteattention_rocm.attention and l.attention is attention\n"
    code += "assert set(l.__all__) <= set(vars(l))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_summaries_are_those_of_commands_that_are_there() -> None:
    found = typer.main.get_command(root.build()).commands  # type: ignore[attr-defined]
    assert set(root.SUMMARIES) == set(found)


def test_help_is_paragraphs_that_wrap_where_the_terminal_ends() -> None:
    for name, command in every().items():
        for block in (command.help or "").split("\n\n"):
            assert "\n" not in block, name
    text, _ = started("doctor", "--help", TERMINAL_WIDTH="60", COLUMNS="60")
    lines = [line.rstrip() for line in text.partition("Options")[0].splitlines()]
    inner = [line for line in lines[4:-4] if line.strip()]
    short = [line for line in inner if len(line) < 40]
    assert len(inner) > 6 and len(short) <= 2, text  # ends of paragraphs


def test_every_number_has_bounds() -> None:
    wrong = [
        f"{name} {param.opts[0]}"
        for name, command in every().items() if name not in OF_SHAPES
        for param in command.params
        if (name, param.opts[0]) not in CHECKED and param.type_descriptor.annotation in (int, float)
        and param.max is None
    ]  # fmt: skip
    assert len(every()) > 15
    assert wrong == []


def test_every_switch_can_be_turned_off() -> None:
    """But for those that do something else than run the command."""
    instead = {"--json", "--library", "--verbose", "--version"}
    wrong = [
        f"{name} {param.opts[0]}"
        for name, command in every().items()
        for param in command.params
        if getattr(param, "is_flag", False) and not param.secondary_opts
        and param.opts[0] not in instead
        and not param.opts[0].endswith("-completion")
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("-4,-2", ["-4", "-2"]),
        (["-4", "-2"], ["-4", "-2"]),
        (["-4,-2", "-inf"], ["-4", "-2", "-inf"]),
        (" a , b ", ["a", "b"]),
    ],
)
def test_lists_have_commas_or_the_option_several_times(given: Any, found: list[str]) -> None:
    assert options.items(given) == found


@pytest.mark.parametrize("given", ["0.1,,0.2", "0.1,", ",", ["0.1", ""]])
def test_an_empty_item_is_refused(given: Any) -> None:
    with pytest.raises(options.EmptyItem, match="empty item"):
        options.items(given)
    from liteattention_e2e.config import load_config

    with pytest.raises(ValueError, match=r"budgets: .* has an empty item"):
        load_config({"model": "x", "prompts": ["p"], "budgets": given})


@pytest.mark.parametrize("field", [
    "steps", "short_steps", "height", "width", "frames", "guidance", "max_sequence_length",
    "repeats", "warmup", "fps",
])  # fmt: skip
def test_numbers_of_a_slipped_key_are_refused(field: str) -> None:
    from liteattention_e2e.config import load_config

    with pytest.raises(ValueError, match=f"{field}=9+: must be at most "):
        load_config({"model": "x", "prompts": ["p"], field: "9" * 20})


def command(**forms: Any) -> typer.Typer:
    app = typer.Typer()

    @app.command(cls=options.Command)
    @options.old_forms(**forms)
    def run(
        word: str = "w", soft_skip: bool | None = None, compile: bool = False, eager: bool = False
    ) -> None:
        typer.echo(json.dumps([word, soft_skip, compile, eager]))

    return app


@pytest.mark.parametrize(
    ("arguments", "now", "found"),
    [
        (["--soft-skip", "true"], "--soft-skip", ["w", True, False, False]),
        (["--soft-skip=False"], "--no-soft-skip", ["w", False, False, False]),
        (["--compile", "off"], "--no-compile", ["w", None, False, False]),
        (["--compile", "both"], "--compile --eager", ["w", None, True, True]),
        (["--compile", "on", "--soft-skip", "no"], "--compile", ["w", False, True, False]),
    ],
)
def test_switches_of_an_earlier_version_are_taken_with_a_line(
    arguments: list[str], now: str, found: list[Any]
) -> None:
    forms = {"soft_skip": options.switch("soft-skip")}
    forms["compile"] = {**options.switch("compile"), "both": ("--compile", "--eager")}
    done = RUNNER.invoke(command(**forms), arguments)
    assert done.exit_code == 0 and json.loads(done.stdout) == found
    (line,) = done.stderr.splitlines()
    assert line.startswith("deprecated, taken until the next minor version: ")
    assert f"is now {now!r}" in line
    for same in (["--soft-skip"], ["--no-soft-skip", "--compile"], ["--word", "--soft-skip"]):
        assert RUNNER.invoke(command(**forms), same).stderr == ""


def test_e2e_and_bench_video_take_both(tmp_path: Path) -> None:
    tree = every()
    for name, old in (("e2e", "--soft-skip"), ("bench video", "--compile")):
        assert old in tree[name].callback.old_forms
    assert tree["bench video"].callback.old_forms["--compile"]["both"] == ("--compile", "--eager")
