"""What a command needs beyond the library itself, checked before it starts to work.

Commands import what they need when they run, so that each ``--help`` works in any installation.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, requires

import typer

PACKAGE = "liteattention-rocm"
#: Import names that differ from the names of their distributions.
_IMPORT_NAMES = {"pillow": "PIL", "pyyaml": "yaml", "scikit-image": "skimage"}
#: Required, but not named as a requirement: its build depends on the device.
_TORCH = "torch"


def need(command: str, *packages: str, extras: Iterable[str] = ()) -> None:
    """Say in one line what ``command`` lacks and how to install it, and exit with 1.

    Args:
        command: what the user called, without the program's name.
        packages: import names of further packages, of no extra or of one not needed as a whole.
        extras: extras of this package, all of whose requirements are needed.
    """
    extras = tuple(extras)
    wanted = list(packages)
    for extra, name in _requirements():
        if extra in extras:
            wanted.append(_import_name(name))
    advice = lacking(*wanted, extras=extras)
    if advice:
        typer.echo(f"liteattention-rocm {command} {advice}", err=True)
        raise typer.Exit(1)


def lacking(*packages: str, extras: tuple[str, ...] = ()) -> str:
    """Say which of the packages are not installed and how to get them; empty if all are."""
    missing = [name for name in dict.fromkeys(packages) if not installed(name)]
    return _advice(missing, extras) if missing else ""


def explain(error: ImportError | OSError) -> str:
    """One line about a failed import: what is missing and what installs it."""
    name = (getattr(error, "name", None) or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and not installed(name):
        return _advice([name], ())
    return f"{' '.join(str(error).split())} (`liteattention-rocm env` shows the installation)"


def installed(name: str) -> bool:
    """Whether a top-level package can be found; it is not imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _advice(missing: list[str], extras: tuple[str, ...]) -> str:
    """``missing`` are import names; of their extras those in ``extras`` are preferred."""
    homes: dict[str, list[str]] = {}
    for extra, name in _requirements():
        homes.setdefault(_import_name(name), []).append(extra)
    chosen: set[str] = set()
    others = []
    for name in missing:
        found = homes.get(name, [])
        preferred = [extra for extra in found if extra in extras] or found[:1]
        chosen.update(preferred)
        if not preferred:
            others.append(name)
    parts = [*others, *([f"'{PACKAGE}[{','.join(sorted(chosen))}]'"] if chosen else [])]
    text = f"needs {', '.join(missing)}: pip install {' '.join(parts)}"
    if _TORCH in missing:
        text += " (for a GPU, the build of torch that https://pytorch.org/get-started names)"
    return text


def _import_name(distribution: str) -> str:
    return _IMPORT_NAMES.get(distribution, distribution.replace("-", "_"))


def _requirements() -> Iterator[tuple[str, str]]:
    """(extra, distribution) of every requirement that belongs to an extra."""
    try:
        lines = requires(PACKAGE) or []
    except PackageNotFoundError:  # a source tree that was never installed: imports will tell
        lines = []
    for line in lines:
        found = re.match(r"([\w.-]+).*\bextra\s*==\s*['\"]([\w.-]+)['\"]", line)
        if found:
            yield found[2], found[1].lower()
