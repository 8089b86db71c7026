"""The AMX path on processors without AMX: its tiles in plain C++, everything else as shipped."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pybind11
import pytest

import liteattention_rocm
from liteattention_rocm.engines import cpu
from tests import ROOT

#: Runs pytest with the package in argv[1] instead of the installed one, editable or not.
SCRIPT = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if isinstance(f, type) or "Editable" not in repr(f)
                    and "ScikitBuild" not in type(f).__name__]
sys.path[:0] = [sys.argv[1], sys.argv[2]]
import pytest
from liteattention_rocm import _core
assert _core.__file__.startswith(sys.argv[1]), _core.__file__
assert "amx_bf16" in _core.cpu_available_isas()
sys.exit(pytest.main(["-q", "-o", "addopts=", "-m", "not slow", "-k", "amx_bf16", *sys.argv[3:]]))
"""


@pytest.mark.slow
def test_the_amx_path_with_software_tiles(tmp_path: Path) -> None:
    if "avx512_bf16" not in cpu.available_isas():
        pytest.skip("the path needs AVX-512-BF16 beside its tiles")
    if "amx_bf16" in cpu.available_isas():
        pytest.skip("this processor has AMX: the other tests ran on it")
    site = tmp_path / "site"
    shutil.copytree(Path(liteattention_rocm.__file__).parent, site / "liteattention_rocm",
                    ignore=shutil.ignore_patterns("_core*", "__pycache__"))  # fmt: skip
    cmake, build = [sys.executable, "-m", "cmake"], str(tmp_path / "build")
    definitions = {
        "LITEATTENTION_SOFT_TILES": "ON",
        "CMAKE_LIBRARY_OUTPUT_DIRECTORY": site / "liteattention_rocm",
        "Python_EXECUTABLE": sys.executable,
        "pybind11_DIR": pybind11.get_cmake_dir(),
    }
    defined = [f"-D{name}={value}" for name, value in definitions.items()]
    subprocess.run([*cmake, "-S", str(ROOT), "-B", build, "-G", "Ninja", *defined], check=True)
    subprocess.run([*cmake, "--build", build, "--target", "_core"], check=True)
    tests = [
        str(ROOT / "tests" / name) for name in ("engines/cpu", "api/serving/test_attention.py")
    ]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(site), str(ROOT), *tests],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= 40, done.stdout[-500:]
