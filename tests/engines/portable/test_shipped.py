"""Every shipped Hopper kernel compiles with the Triton that is installed, without a GPU.

`make test-machine-code` runs it with the oldest and the newest Triton that compile them.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import triton

from liteattention_rocm.engines.triton.versions import OLDEST_FOR_HOPPER, compiles_hopper
from liteattention_tools import sass


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    patch = pytest.MonkeyPatch()
    patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
    yield
    patch.undo()


def test_triton_is_the_one_that_was_asked_for() -> None:
    """Makefile's directories come before the environment's Triton."""
    wanted = os.environ.get("TRITON_EXPECTED", triton.__version__)
    assert triton.__version__ == wanted
    numbers = tuple(map(int, triton.__version__.split(".")[:2]))
    assert compiles_hopper() == (numbers >= OLDEST_FOR_HOPPER)


@pytest.mark.parametrize("name", sass.shipped())
def test_a_shipped_hopper_kernel_compiles(name: str, tmp_path: Path) -> None:
    loop = sass.count(*sass.shipped()[name])
    assert loop.keys in (64, 128) and loop.classes["products"] >= 16
