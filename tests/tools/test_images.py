"""What the images' script says where no wheel fits."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docker" / "install.sh"


@pytest.mark.parametrize("release", ["3.10", "3.12"])
def test_a_missing_wheel_is_named_with_the_line_that_makes_it(release: str, tmp_path: Path) -> None:
    python, dist = tmp_path / "python", tmp_path / "dist"
    python.write_text(f'#!/bin/sh\ncase "$*" in *torch*) exit 1;; esac\necho {release}\n')
    python.chmod(0o755)
    dist.mkdir()

    def install() -> str:
        done = subprocess.run(
            [SCRIPT, dist],
            env={**os.environ, "PYTHON": str(python)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 1 and not done.stdout
        return done.stderr

    assert install().rstrip().endswith(f"{dist} has none")
    (dist / "liteattention_rocm-0.1.0-cp311-cp311-linux_x86_64.whl").touch()
    text = install()
    assert f"is Python {release}" in text and f"`make wheels WHEELS={release}`" in text
    assert "has liteattention_rocm-0.1.0-cp311-cp311-linux_x86_64.whl" in text
    tag = "cp" + release.replace(".", "")
    (dist / f"liteattention_rocm-0.1.0-{tag}-{tag}-linux_x86_64.whl").touch()
    assert install().startswith("missing: PyTorch")  # the next step
