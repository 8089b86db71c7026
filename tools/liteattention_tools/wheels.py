"""``python -m liteattention_tools.wheels``: wheels for several versions of Python, and the sources.

Builds on any Linux machine, without a container: Zig's C++ compiler (the package ziglang) links
against the glibc that :data:`PLATFORM` names, whatever the machine's own is, and brings its C++
run-time as a static library. auditwheel then proves the tag. A forge builds the same wheels in
PyPA's containers instead, by ``[tool.cibuildwheel]`` of pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: The distribution of the small model.
MODEL = ROOT / "e2e" / "model"
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
PLATFORM = "manylinux_2_28_x86_64"
_GLIBC = "x86_64-linux-gnu.2.28"


def main() -> None:
    """Build, repair and audit; then replace the wheels and sources in ``--out``. A line per file.

    A build that fails leaves ``--out`` as it was.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--python", nargs="+", default=list(VERSIONS), metavar="X.Y")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--find", metavar="X.Y", help="only print which interpreter would do it")
    options = parser.parse_args()
    if options.find:
        print(interpreters([options.find])[options.find])
        return
    pythons = interpreters(options.python)
    made = options.work / "made"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    compiler = _compiler(options.work)
    requires = _requirements(next(iter(pythons.values())), options.work)
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", made, ROOT)
    _model(made)
    for version, python in pythons.items():
        raw = _build(version, python, options.work, compiler, requires)
        _repair(raw, made)
    for path in _replace(options.out, made):
        print(f"{path.stat().st_size / 1e6:6.1f} MB  {path}")


def _model(made: Path) -> None:
    """Build the wheel of the small model; it holds data, so one does for every Python."""
    command = ("-m", "build", "--wheel", "--no-isolation", "--outdir", made, MODEL)
    _run(sys.executable, *command)


def _replace(out: Path, made: Path) -> list[Path]:
    """Move what was made to ``out``, in place of earlier wheels and sources; other files stay."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.whl", "*.tar.gz"):
        for old in out.glob(pattern):
            old.unlink()
    return [Path(shutil.move(path, out / path.name)) for path in sorted(made.iterdir())]


def interpreters(versions: Iterable[str], path: str | None = None) -> dict[str, Path]:
    """Find an interpreter with C headers for each version, on the path or among pyenv's.

    Args:
        versions: such as "3.10".
        path: directories to look in, as ``PATH`` has them; by default ``PATH``.

    Raises:
        SystemExit: with one line that names every version that is missing.
    """
    found, missing = {}, []
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in versions:
        candidates = [shutil.which(f"python{version}", path=path)]
        if path is None:
            candidates += sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))
        usable = [Path(each) for each in candidates if each and _has_headers(each, version)]
        if usable:
            found[version] = usable[0]
        else:
            missing.append(version)
    if missing:
        raise SystemExit(
            f"missing: Python {', '.join(missing)} with C headers, on the path or in {pyenv} "
            "(pyenv install, or your system's pythonX.Y-dev and pythonX.Y-venv); "
            "--python builds for fewer versions"
        )
    return found


def _has_headers(python: str, version: str) -> bool:
    """Whether it runs (a shim of pyenv may not), is that version, and has Python.h and venv."""
    code = (
        "import ensurepip, os, sys, sysconfig; "
        "print('%d.%d' % sys.version_info[:2], "
        "os.path.exists(os.path.join(sysconfig.get_path('include'), 'Python.h')))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    return done.returncode == 0 and done.stdout.split() == [version, "True"]


def _compiler(work: Path) -> Path:
    """Write a C++ compiler for the glibc of the platform; CMake wants one file."""
    script = work / "zig-c++"
    command = f'exec "{sys.executable}" -m ziglang c++ -target {_GLIBC} "$@"'
    text = f"#!/bin/sh\n{command}\n"
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
        script.chmod(0o755)
    return script


def _requirements(oldest: Path, work: Path) -> Path:
    """Install what builds the package once for all versions; it is Python and headers only.

    scikit-build-core empties its build folder whenever its own place has changed.
    """
    folder = work / "requires"
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    python = _venv(oldest, work / "oldest")
    _run(
        python, "-m", "pip", "install", "-q", "--upgrade", "--target", folder,
        "-c", ROOT / "constraints.txt", *requires,
    )  # fmt: skip
    return folder


def _venv(python: Path, folder: Path) -> Path:
    if not (folder / "bin" / "python").exists():
        _run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def _build(version: str, python: Path, work: Path, compiler: Path, requires: Path) -> Path:
    """Build one wheel. All share the object files that do not depend on Python."""
    raw = work / f"raw-{version}"
    shutil.rmtree(raw, ignore_errors=True)
    environment = os.environ | {
        "CXX": str(compiler),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",  # cmake and ninja
        "PYTHONPATH": str(requires),
    }
    _run(
        _venv(python, work / f"python{version}"), "-m", "pip", "wheel", "-q", "--no-deps",
        "--no-build-isolation", f"--config-settings=build-dir={work / 'objects'}", "-w", raw, ROOT,
        environment=environment,
    )  # fmt: skip
    (wheel,) = raw.glob("*.whl")
    return wheel


def _repair(raw: Path, out: Path) -> None:
    """Give the wheel its platform's tag; auditwheel refuses what a wider platform lacks."""
    _auditwheel("repair", "--plat", PLATFORM, "--only-plat", "-w", out, raw)
    (wheel,) = out.glob(f"{raw.name.rpartition('-')[0]}-*.whl")
    shown = " ".join(_auditwheel("show", wheel).split())
    tag = re.search(r'is consistent with the following platform tag: "([^"]+)"', shown)
    # Symbols may be older than the platform's; what the wheel is named for, it must satisfy.
    if not tag or _glibc(tag[1]) > _glibc(PLATFORM) or not wheel.stem.endswith(PLATFORM):
        raise SystemExit(f"{wheel.name} is no wheel of {PLATFORM}: {shown}")
    print(f"{wheel.name}: consistent with {tag[1]}")


def _glibc(tag: str) -> tuple[int, int]:
    numbers = re.match(r"manylinux_(\d+)_(\d+)_x86_64$", tag)
    return (int(numbers[1]), int(numbers[2])) if numbers else (99, 0)


def _auditwheel(*arguments: object) -> str:
    command = [sys.executable, "-m", "auditwheel", *map(str, arguments)]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[2:])}:\n{done.stdout}{done.stderr}")
    return done.stdout


def _run(*command: object, environment: Mapping[str, str] | None = None) -> None:
    done = subprocess.run([str(each) for each in command], env=environment)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
