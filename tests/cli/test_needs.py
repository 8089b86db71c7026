"""Commands in an installation that lacks something: one line that says what and how to get it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Sequence

from liteattention_rocm.cli.needs import installed

LACKING = """
import contextlib, io, json, sys

hidden, commands = json.loads(sys.argv[1])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None

sys.meta_path.insert(0, Blocker())
from liteattention_rocm.cli.root import main

found = []
for arguments in commands:
    sys.argv[1:] = arguments
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as end:
            code = end.code or 0
    found.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(found))
"""

#: What a bare `pip install` of the package lacks.
EXTRAS = ("diffusers", "transformers", "accelerate", "ftfy", "safetensors", "tokenizers")
EXTRAS += ("imageio_ffmpeg", "matplotlib", "PIL", "psutil", "skimage", "tabulate", "yaml")
FRAMEWORKS = ("sglang", "vllm", "triton")

COMMANDS = {
    "generate": ["generate"],
    "generate --emulate": ["generate", "--emulate"],
    "e2e": ["e2e", "--prompts", "none.txt"],
    "e2e --runner sglang": ["e2e", "--runner", "sglang"],
    "doctor": ["doctor"],
    "bench cpu": ["bench", "cpu"],
    "bench kernels": ["bench", "kernels", "--config", "smoke"],
    "bench video": ["bench", "video", "--config", "wan-smoke"],
    "bench video --runtime sglang": ["bench", "video", "--runtime", "sglang"],
    "bench tune": ["bench", "tune", "--shape", "1,1,128,128"],
    "bench emulator": ["bench", "emulator"],
    "bench mapping": ["bench", "mapping"],
    "bench serving --framework vllm": ["bench", "serving", "--framework", "vllm"],
    "bench serving --framework sglang": ["bench", "serving", "--framework", "sglang"],
}
HELP = [
    [], ["env"], ["plan"], ["doctor"], ["emulate"], ["generate"], ["e2e"], ["bench"],
    *(["bench", name] for name in ("cpu", "kernels", "video", "tune", "emulator", "serving")),
    ["bench", "mapping"],
]  # fmt: skip


def lacking(hidden: Sequence[str], commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each command where packages are hidden."""
    done = subprocess.run(
        [sys.executable, "-c", LACKING, json.dumps([hidden, commands])],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


def advice(hidden: Sequence[str], commands: Sequence[str]) -> dict[str, tuple[str, str]]:
    """What each command says that it needs, and the arguments of pip that install it."""
    found = {}
    asked = [COMMANDS[name] for name in commands]
    for name, (code, out, err) in zip(commands, lacking(hidden, asked), strict=True):
        assert (code, out) == (1, ""), f"{name}: {out}{err}"
        (line,) = err.strip().splitlines()
        start = f"liteattention-rocm {name.partition(' --')[0]} needs "
        assert line.startswith(start)
        needs, _, install = line.removeprefix(start).partition(": pip install ")
        found[name] = needs, install
    return found


def test_without_torch_and_extras_each_command_says_how_to_get_them() -> None:
    for needs, install in advice(("torch", *EXTRAS, *FRAMEWORKS), list(COMMANDS)).values():
        assert "torch" in needs.split(", ") and re.match(r"torch\b", install)
        assert "https://pytorch.org/get-started" in install


def test_without_extras_each_command_names_its_own() -> None:
    expected = {
        "generate": ("diffusers", "[bench,diffusers]"),
        "generate --emulate": ("matplotlib", "[bench,diffusers]"),
        "e2e": ("imageio_ffmpeg", "[bench,diffusers]"),
        "e2e --runner sglang": ("sglang", "[bench,sglang-diffusion]"),
        "bench kernels": ("matplotlib", "[bench]"),
        "bench video": ("diffusers", "[bench,diffusers]"),
        "bench video --runtime sglang": ("sglang", "[bench,sglang-diffusion]"),
        "bench serving --framework vllm": ("vllm", "[vllm]"),
        "bench serving --framework sglang": ("sglang", "[sglang]"),
    }
    for name, (needs, install) in advice((*EXTRAS, *FRAMEWORKS), list(expected)).items():
        package, extras = expected[name]
        assert package in needs.split(", ")
        assert install == f"'liteattention-rocm{extras}'"


def test_one_missing_package_is_named_with_its_extra() -> None:
    found = advice(("matplotlib",), ["generate"])
    assert found == {"generate": ("matplotlib", "'liteattention-rocm[bench]'")}


def test_commands_that_read_no_yaml_do_not_need_it() -> None:
    shape = ["--shape", "1,1,128,64"]
    asked = [
        ["bench", "cpu", *shape, "--rounds", "3", "--warmup", "0", "--json"],
        ["model", *shape, "--no-range", "--json"],
    ]
    # torch looks for tabulate, and takes the error of a hidden package for its own
    for code, out, err in lacking([name for name in EXTRAS if name != "tabulate"], asked):
        assert code == 0 and json.loads(out), err


def test_every_help_works_without_torch_and_extras() -> None:
    asked = [[*arguments, "--help"] for arguments in HELP]
    for code, out, err in lacking(("torch", *EXTRAS, *FRAMEWORKS), asked):
        assert (code, err) == (0, "")
        assert "Usage: " in out and "Not usable here" not in out


def test_what_no_command_foresaw_is_one_line_too() -> None:
    ((code, _, err),) = lacking(("pydantic_core",), [COMMANDS["bench kernels"]])
    assert code == 1
    (line,) = err.strip().splitlines()
    assert line == "liteattention-rocm: needs pydantic_core: pip install pydantic_core"


def test_nothing_is_imported_to_find_out() -> None:
    assert installed("this") and "this" not in sys.modules
    assert not installed("no_such_package")
