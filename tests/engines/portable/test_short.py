"""The short way into compiled kernels, beside the launcher of the Triton that is installed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_what_the_driver_gets_is_what_tritons_launcher_gives_it(tmp_path: Path) -> None:
    """Grid, shared memory, stream, attributes and every byte of the parameters."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.fail("a C compiler is missing: Triton needs one for its launchers, too")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1", "-o", library,
         HERE / "cuda_driver_stub.c"], check=True,
    )  # fmt: skip
    found = subprocess.run(
        [sys.executable, HERE / "launchers.py", library], capture_output=True, text=True,
        cwd=HERE.parents[2], timeout=300,
        env=os.environ | {
            "TRITON_LIBCUDA_PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache"),
            "LD_LIBRARY_PATH": str(tmp_path),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [os.environ.get("PYTHONPATH", ""), str(HERE.parents[2] / "tools")])
            ),
        },
    )  # fmt: skip
    assert not found.returncode, found.stderr[-3000:]
    assert found.stdout.count("bytes alike") == 3 and "Triton's launcher" in found.stdout
