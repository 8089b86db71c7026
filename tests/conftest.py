"""Options and fixtures of all tests.

Every test begins as a fresh process would: no call is remembered, the environment is unread.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import typer

from liteattention_rocm import engines, remembered
from liteattention_rocm.engines import cpu
from liteattention_rocm.lite.once import warn_once
from tests import ROOT
from tests.emulator import toolchain

#: Where tensors are small: on them several torch threads mostly spin and wait.
ONE_THREAD = ("api/serving", "api/test_fuzz", "e2e/model", "engines/cpu", "engines/reference")
ONE_THREAD += ("engines/portable", "integration/diffusers", "lite")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--machine-code",
        choices=("stored", "compare", "update"),
        default="stored",
        help="test programs for gfx942: take the committed machine code (the default); make it "
        "with LLVM 19 and compare; or make it and add it to the committed one",
    )


def pytest_configure(config: pytest.Config) -> None:
    for store in toolchain.STORES:
        store.mode = config.getoption("--machine-code")
    if hasattr(config, "workerinput") and config.getoption("--machine-code") == "update":
        raise pytest.UsageError("--machine-code=update runs in one process: leave -n out")
    with contextlib.suppress(ImportError):  # the environments of serving frameworks are without it
        from hypothesis import settings

        # How long an example may take depends on what else the machine does.
        settings.register_profile("tests", deadline=None)
        settings.load_profile("tests")
    # A shell starts background jobs with interrupts ignored, and their children inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if hasattr(config, "workerinput"):  # one of several processes, which share the processors
        torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: serving environments are without it
def pytest_testnodedown(node: Any) -> None:
    if output := getattr(node, "workeroutput", None):  # a process that crashed has none
        for store, keys in zip(toolchain.STORES, output["programs"], strict=True):
            store.note(keys)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["programs"] = [store.asked() for store in toolchain.STORES]
        return
    for store in toolchain.STORES:
        if left := store.finish():
            first = left[0].replace("\n", "; ")[:200]
            print(f"\n{store.path.name}: {len(left)} programs of no test that ran: {first}")
            print("if tests/emulator and tests/tools ran: run `make machine-code`")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def forget() -> None:
    remembered.forget()
    engines.settings.cache_clear()
    warn_once.cache_clear()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test changes the number of torch threads for another."""
    before = torch.get_num_threads()
    if str(request.path.relative_to(ROOT / "tests")).startswith(ONE_THREAD):
        torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def app() -> typer.Typer:
    """The commands that make videos, with tracebacks of what they do not catch."""
    from liteattention_e2e import calibrate_cli, cli

    made = typer.Typer(pretty_exceptions_enable=False)
    made.command("e2e")(cli.e2e)
    made.command("generate")(cli.generate)
    made.command("calibrate")(calibrate_cli.calibrate)
    return made


@pytest.fixture(params=cpu.available_isas())
def isa(request: pytest.FixtureRequest, fresh: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each path of the CPU engine on this processor; test_numerics.py names the others."""
    monkeypatch.setenv(engines.ISA_VARIABLE, request.param)
    return str(request.param)
