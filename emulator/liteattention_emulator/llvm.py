"""LLVM's programs, found and their release checked.

Other releases take gfx942 code, too, and make something else of it: release 14 does not know the
chip and assembles for another one without an error.
"""

import re
import shutil
import subprocess
from functools import cache

RELEASE = 19
DEBIAN_PACKAGES = {"clang": "clang-19", "clang++": "clang-19", "ld.lld": "lld-19"}
"""What brings a program; the others come with llvm-19."""
_VERSION = re.compile(r"(?:version|LLD) (\d+)\.")


class ToolMissing(RuntimeError):
    """No program of the release is installed; the message names what is, and the package."""


def release(path: str) -> int | None:
    """The release that a program of LLVM says it is of; None if it does not say."""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = _VERSION.search(done.stdout)
    return int(found[1]) if found else None


def find(tool: str, *, newer: bool = False) -> str:
    """Path of a program by LLVM's name for it, such as ``llvm-mc``, of release 19.

    Looks on PATH for Debian's ``llvm-mc-19``, then for a plain ``llvm-mc``. ``newer`` takes later
    releases, too: for what need not be the same byte for byte.

    Raises:
        ToolMissing: there is none; the message says what was found instead.
    """
    # PATH may change between two calls, and a program is not to be started each time.
    candidates = [shutil.which(f"{tool}-{RELEASE}"), shutil.which(tool)]
    return _choose(tool, tuple(path for path in candidates if path), newer)


@cache
def _choose(tool: str, candidates: tuple[str, ...], newer: bool) -> str:
    instead = []
    for path in candidates:
        found = release(path)
        if found == RELEASE or (newer and found is not None and found > RELEASE):
            return path
        instead.append(f"{path} is of release {found}" if found else f"{path} names no release")
    package = DEBIAN_PACKAGES.get(tool, f"llvm-{RELEASE}")
    need = f"{RELEASE} or newer" if newer else f"{RELEASE}"
    raise ToolMissing(
        f"{tool} of LLVM {need} is missing"
        + (f" ({'; '.join(instead)})" if instead else "")
        + f" (Debian: apt-get install {package})"
    )
