"""What CONTRIBUTING.md, the pages and the workflows name is there."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
import yaml

from liteattention_rocm.cli.root import build
from tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "tests" / "README.md"])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)) | {
        "test-serving-vllm", "test-serving-sglang", "test-serving-diffusion", ".venv/dev.stamp",
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_site_has_every_page() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"'([\w/-]+\.md)'", str(site["nav"])))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    elsewhere = re.findall(r'": "([\w-]+\.md)"', (ROOT / "docs" / "hooks.py").read_text())
    assert named == pages | set(elsewhere)


def test_contributing_names_paths_that_are_there() -> None:
    named = re.findall(r"`([\w./]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    paths = [name for name in named if "/" in name and not name.startswith((".venv", "engines/"))]
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_contributing_and_the_workflow_name_make_targets_that_are_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    asked = " ".join(workflow["jobs"]["make"]["strategy"]["matrix"]["target"]).split()
    asked += re.findall(r"`make ([\w./-]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert {"lint", "test", "test-machine-code"} <= set(asked) <= make_targets()


def test_the_changelog_has_the_version_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_hooks_are_what_lint_runs() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    lint = subprocess.run(
        ["make", "-n", "-o", ".venv/dev.stamp", "lint"], cwd=ROOT, capture_output=True, text=True,
        check=True,
    ).stdout  # fmt: skip
    assert {Path(hook["entry"].split()[0]).name for hook in hooks} == set(
        re.findall(r"^\.venv/bin/([\w-]+)", lint, re.MULTILINE)
    )


def commands(page: Path) -> Iterator[list[str]]:
    """Words of each call of liteattention-rocm that a page shows."""
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"liteattention-rocm ([^`\n#|)<]*)", text):
        yield line.split()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_are_there(page: Path) -> None:
    wrong = []
    for words in commands(page):
        command = typer.main.get_command(build())
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        if getattr(command, "commands", {}) and words and words[0].isalpha():
            wrong.append(words[0])
        known = {n for option in command.params for n in (*option.opts, *option.secondary_opts)}
        asked = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
        wrong += [f"{command.name} {option}" for option in sorted(asked - known)]
    assert wrong == []


def said() -> str:
    """Every string that the package holds, without what is filled in."""
    found = []
    for path in [*ROOT.glob("backend/**/*.py"), *ROOT.glob("integration/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    found += (re.sub(r'"\s*"', "", path.read_text()) for path in ROOT.glob("csrc/host/*.cpp"))
    return "\n".join(found)


def test_errors_that_the_page_explains_are_raised() -> None:
    page = (ROOT / "docs" / "errors.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    filled_in = r"\.\.\.|\bNAME\b|-?\b(?:0\.0)?[MNXYZ]\b|'[^']*'|\b\d[\d.]*\b"
    spoken = said()
    parts = [part.strip(" ,;:()=?") for m in messages for part in re.split(filled_in, m)]
    assert len(messages) > 50
    assert [part for part in parts if len(part) > 5 and part not in spoken] == []


def test_every_option_of_every_command_is_in_the_page() -> None:
    """As the commands describe them now: `python docs/options.py` writes them anew."""
    found = runpy.run_path(str(ROOT / "docs" / "options.py"))
    page = (ROOT / "docs" / "commands.md").read_text()
    assert page == found["with_options"](page)
    rows = set(re.findall(r"`(--[\w-]+)`", page.partition(found["BEGIN"])[2]))
    tree = list(found["commands"](typer.main.get_command(build())))
    asked = {
        opt for _, command in tree for param in found["options"](command) for opt in param.opts
    }
    assert len(asked) > 90 and {opt for opt in asked if opt.startswith("--")} <= rows
