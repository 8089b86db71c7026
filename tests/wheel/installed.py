"""Is an installed wheel whole? ``python tests/wheel/installed.py`` in the environment that has it.

Runs with the package and nothing else. Every command shows its help; every command that lacks an
extra names it; with torch, ``doctor --emulate`` finds the expected bits of all kernels. Without
torch, every command that needs it says so.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

import liteattention_rocm_cli

PROGRAM = Path(sys.executable).parent / "liteattention-rocm"
#: What needs torch and no extra: these work as soon as torch is there.
WITHOUT_EXTRAS = (
    ["env"],
    ["doctor", "--no-time"],
    ["plan", "--shape", "1,4,1024,128"],
    ["model", "--shape", "1,1,384,64"],
)
#: These need extras as well.
WITH_EXTRAS = (["generate"], ["e2e", "--prompts", "none.txt"], ["calibrate"])
WITH_EXTRAS += (["bench", "kernels", "--config", "smoke"],)
WITH_EXTRAS += (["bench", "serving", "--framework", "vllm"],)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the installed program."""
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group below ``command``."""
    yield path
    for name, inner in sorted(getattr(command, "commands", {}).items()):
        yield from commands(inner, (*path, name))


def main() -> None:
    """Print a line per check; the first that fails ends it."""
    torch = importlib.util.find_spec("torch") is not None
    place = Path(liteattention_rocm_cli.__file__)
    assert "site-packages" in place.parts, f"not installed: {place}"
    from liteattention_rocm.cli.root import build

    root = build()
    shown = list(commands(typer.main.get_command(root)))
    assert len(shown) > 20, shown
    for path in shown:
        text = CliRunner().invoke(root, [*path, "--help"])
        assert text.exit_code == 0 and "Usage: " in text.output, (path, text)
        assert "Not usable here" not in text.output, (path, text.output)
    print(f"{len(shown)} commands show their help")
    told = run("--version").stdout.strip()
    assert re.fullmatch(r"[\d.]+ \(commit [0-9a-f]{12}(-dirty)?\)", told), told
    print(told)
    for arguments in WITH_EXTRAS:
        done = run(*arguments)
        assert done.returncode == 1 and " needs " in done.stderr, (arguments, done)
        assert "pip install " in done.stderr and "Traceback" not in done.stderr, done.stderr
        print(done.stderr.strip())
    if torch:
        from liteattention_rocm.engines import cpu

        flags = Path("/proc/cpuinfo").read_text().split()
        has = {"avx2": "avx2", "avx512": "avx512bw", "avx512_bf16": "avx512_bf16"}
        expected = {name for name, flag in has.items() if flag in flags}
        assert set(cpu.available_isas()) - {"amx_bf16", "portable"} == expected, expected
        print(f"CPU engine: {', '.join(cpu.available_isas())}")
    for arguments in WITHOUT_EXTRAS if torch else ():
        done = run(*arguments)
        assert done.returncode == 0, (arguments, done)
        print(f"{' '.join(arguments)}: works")
    done = run("doctor", "--emulate")
    if torch:
        last = done.stdout.strip().rpartition("\n")[2]
        assert done.returncode == 0 and re.match(r"\d+ ok; gfx942", last), done
        print(f"doctor --emulate: {last}")
    else:
        assert done.returncode == 1 and "needs torch" in done.stderr, done
        print(done.stderr.strip())


if __name__ == "__main__":
    main()
