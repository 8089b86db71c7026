"""The lines of the quickstart that `make test-quickstart` runs in clean roots."""

from __future__ import annotations

import importlib.util
import re
import subprocess

import pytest

from tests import ROOT

SPEC = importlib.util.spec_from_file_location("lines", ROOT / "tests" / "quickstart" / "lines.py")
assert SPEC and SPEC.loader
lines = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lines)

BLOCKS = lines.blocks((ROOT / "docs" / "quickstart.md").read_text())


def test_every_marked_block_is_run_and_every_run_block_is_there() -> None:
    script = (ROOT / "tests" / "quickstart" / "in_root.sh").read_text()
    assert set(re.findall(r"^ +page ([\w-]+)", script, re.MULTILINE)) == set(BLOCKS)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name != "python"])
def test_blocks_of_shell_are_whole(name: str) -> None:
    subprocess.run(["bash", "-n"], input=BLOCKS[name].encode(), check=True)


def test_a_block_ends_with_its_indentation() -> None:
    indented = "<!-- run: a -->\n\n    one \\\n        two\n\nText.\n\n"
    fenced = "<!-- run: b -->\n\n```sh\nx\n\ny\n```\n"
    assert lines.blocks(indented + fenced) == {"a": "one \\\n    two", "b": "x\n\ny"}


@pytest.mark.parametrize("page", ["<!-- run: a -->\nText\n", "<!-- run: a -->\n\n    x\n\n" * 2])
def test_a_marker_without_a_block_and_two_of_a_name_are_refused(page: str) -> None:
    with pytest.raises(ValueError, match="a"):
        lines.blocks(page)
