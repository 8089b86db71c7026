"""Which Triton is installed, and what it compiles. Triton is imported when first asked about."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re

from ...lite.once import warn_once

#: Oldest Triton with the functions that the plain kernels are written in; PyTorch 2.9 has it.
OLDEST = (3, 5)
#: Oldest Triton with the Gluon that the Hopper kernels are written in; PyTorch 2.10 has it. In 3.5
#: ``warp_specialize`` takes other arguments.
OLDEST_FOR_HOPPER = (3, 6)


def without_triton() -> str:
    """Why this installation's Triton does not do, "" if it does."""
    return _asked()[1]


def compiles_hopper() -> bool:
    """Whether this Triton compiles the Hopper kernels; without them plain ones run there."""
    numbers, problem = _asked()
    return not problem and not (numbers and numbers < OLDEST_FOR_HOPPER)


def registers_grow() -> bool:
    """Whether this Triton's ptxas takes more than 96 registers for tiles of split keys.

    From 3.7 on, it does for 64 bf16 keys, 128 columns and four warps: 116 with 3.8 and 3.9.
    """
    numbers, _ = _asked()
    return not (numbers and numbers < (3, 7))


def warn_of_plain_kernels() -> None:
    """Log, once per process, that a Hopper GPU runs plain kernels as Triton is too old."""
    numbers, _ = _asked()
    warn_once(
        f"Triton {_dotted(numbers)} does not compile the kernels for Hopper GPUs, so slower plain "
        f"ones run: install Triton {_dotted(OLDEST_FOR_HOPPER)} or newer (PyTorch 2.10 or newer)"
    )


@functools.cache
def _asked() -> tuple[tuple[int, ...], str]:
    """(version, () if it says none; why it does not do)."""
    if importlib.util.find_spec("triton") is None:
        return (), "it needs Triton, which comes with PyTorch for GPUs: pip install triton"
    # Distributions of Triton have many names, so the package itself is asked.
    try:
        found = importlib.import_module("triton").__version__
    except (ImportError, AttributeError) as error:
        return (), f"it needs Triton, which cannot be imported: {error}"
    read = re.match(r"(\d+)\.(\d+)", found)
    numbers = (int(read[1]), int(read[2])) if read else ()
    if numbers and numbers < OLDEST:
        return numbers, (
            f"it needs Triton {_dotted(OLDEST)} or newer, as PyTorch 2.9 has it, got {found}"
        )
    return numbers, ""


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))
