"""``bench serving --device cuda`` on a made-up device with made-up engines; its arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from liteattention_benchmark import serving_backends as benchmark
from liteattention_benchmark.cli import app
from liteattention_benchmark.serving import Case
from liteattention_benchmark.serving_sizes import SIZES, cache_bytes_per_token, parameters
from liteattention_rocm.cli import needs

CASES = ["--case", "decode,3,40", "--case", "prefill,2,96"]


class Fake:
    """The command on a machine that answers as told."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._log, self._patch = folder / "log", patch
        patch.setattr(benchmark, "MODULE", "tests.benchmark.fake_serving_engine")
        patch.setattr(needs, "installed", lambda name: True)
        patch.setenv("FAKE_LOG", str(self._log))

    def run(self, *options: str, memory: float = 141e9, reasons: tuple[str, ...] = ()) -> Any:
        machine = {
            "platform": "cuda", "memory": int(memory), "whole": int(memory + 1e9),
            "facts": {"device": "Fake H200"},
        }  # fmt: skip
        self._patch.setenv("FAKE_MACHINE", json.dumps(machine | {"reasons": reasons}))
        self._log.write_text("")
        chosen = ["serving", "--framework", "vllm", "--device", "cuda", "--rounds", "3", *options]
        return CliRunner().invoke(app, chosen, env={"COLUMNS": "120"})

    @property
    def log(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    return Fake(tmp_path, monkeypatch)


def test_backends_take_turns_and_ours_is_held_against_the_better_peer(
    fake: Fake, tmp_path: Path
) -> None:
    out = tmp_path / "result.json"
    done = fake.run(*CASES, "--out", str(out), "--json", "--tokens", "9")
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert json.loads(done.stdout) == found
    page = (tmp_path / "result.html").read_text()
    assert ">decode 3 x 40<" in page and f">{3 / 0.002:,.1f}<" in page
    assert found["complete"] and found["in_turns"] and found["sizes"] == "llama-3-8b"
    rows = {(row["kind"], row["backend"]): row for row in found["rows"]}
    assert [name for _, name in rows] == 2 * ["CUSTOM", "FLASH_ATTN", "TRITON_ATTN"]
    # Three requests decode together in steps of 2 ms; their prompts came 20 ms apart.
    ours = rows["decode", "CUSTOM"]
    assert ours["tokens_per_s"] == pytest.approx(3 / 0.002)
    assert ours["first_token_s"] == pytest.approx(0.04)
    assert ours["between_tokens_s"] == pytest.approx(0.002)
    assert ours["prompt_tokens_per_s"] == pytest.approx(3 * 40 / 0.06)
    assert rows["prefill", "TRITON_ATTN"]["tokens_per_s"] == pytest.approx(2 * 96 / 0.08)
    assert rows["prefill", "CUSTOM"]["between_tokens_s"] is None
    for ratio in found["ratios"]:
        assert ratio["peer"] == "FLASH_ATTN"
        assert ratio["tokens_per_s_min"] == pytest.approx(1.5)
        assert ratio["first_token"] == pytest.approx(1.5)
    # All engines were started before the first was asked.
    assert all("started" in each for each in fake.log[:3]) and set(found["start_s"]) == {
        "CUSTOM", "FLASH_ATTN", "TRITON_ATTN",
    }  # fmt: skip
    # One round is not counted, every round brings other prompts, and each backend goes first.
    asked = [each for each in fake.log if each.get("kind")]
    assert len(asked) == 2 * 4 * 3
    assert len({tuple(each["first"]) for each in asked}) == 2 * 4
    assert {each["asked"] for each in asked[::3]} == {"CUSTOM", "FLASH_ATTN", "TRITON_ATTN"}


def test_an_engine_gets_the_published_sizes_and_what_memory_it_needs(fake: Fake) -> None:
    done = fake.run("--case", "decode,16,8192", "--backend", "CUSTOM", "--kv-cache-dtype", "fp8")
    assert done.exit_code == 0, done.output
    assert "decode 16 x 8192 CUSTOM" in " ".join(done.output.split())
    assert "Fake H200" in done.output and "of FLASH_ATTN" not in done.output
    (started,) = [each for each in fake.log if "options" in each]
    options, config = started["options"], started["config"]
    assert config == SIZES["llama-3-8b"] | {"dtype": "bfloat16"}
    tokens = 16 * (8192 + 128 + 128) + 1024
    assert options["kv_cache_memory_bytes"] == tokens * 2 * 8 * 128 * 32  # a byte each
    assert options["max_model_len"] == 8192 + 128 and options["max_num_seqs"] == 16
    assert options["load_format"] == "dummy" and not options["enable_prefix_caching"]
    needed = 2 * 8.03e9 + options["kv_cache_memory_bytes"] + 6 * 2**30
    # vLLM takes it as a share of the whole memory, not of what is free.
    assert options["gpu_memory_utilization"] == pytest.approx(needed / 142e9, abs=5e-4)
    assert options["compilation_config"] == {"cudagraph_capture_sizes": [16]}


def test_sizes_count_the_published_numbers_of_weights() -> None:
    published = {"llama-3-8b": 8.03e9, "qwen2-7b": 7.62e9, "gemma-3-4b": 3.88e9}
    for name, number in published.items():
        assert parameters(SIZES[name]) == pytest.approx(number, rel=0.01), name
    assert cache_bytes_per_token(SIZES["llama-3-8b"], 2) == 128 << 10


def test_engines_that_do_not_fit_together_run_one_after_the_other(fake: Fake) -> None:
    done = fake.run("--case", "decode,3,40", memory=40e9)
    assert done.exit_code == 0, done.output
    assert "one backend after the other" in done.output
    log = [each.get("started") or each["asked"] for each in fake.log]
    assert log == [name for name in benchmark.BACKENDS["cuda"] for _ in range(5)]


def test_all_that_is_missing_is_said_at_once(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = ("PyTorch sees no GPU", "FLASH_ATTN: it cannot be loaded: ImportError: no library")
    done = fake.run(memory=20e9, reasons=reasons)
    assert done.exit_code == 1 and not fake.log
    for text in (*reasons, "llama-3-8b takes about", "20 GB are free"):
        assert text in done.output
    monkeypatch.setattr(needs, "installed", lambda name: name != "vllm")
    done = fake.run()
    assert done.exit_code == 1
    assert "it needs vllm: pip install" in done.output and "PyTorch sees no GPU" in done.output


def test_options_are_checked_together(fake: Fake) -> None:
    done = fake.run(
        "--sizes", "gpt-9", "--head-dim", "64", "--kv-cache-dtype", "fp3", "--case", "decode,0,1"
    )
    assert done.exit_code == 2
    for text in ("--sizes must be one of", "--head-dim is not for", "--kv-cache-dtype", "--case"):
        assert text in done.output


def test_an_engine_that_ends_is_an_error_with_its_last_words(fake: Fake) -> None:
    done = fake.run("--case", "decode,3,40", "--backend", "DIES")
    assert isinstance(done.exception, RuntimeError)
    assert "no kernel for this model" in str(done.exception)


def test_a_decode_in_which_requests_never_meet_is_refused() -> None:
    case = Case("decode", 2, 8)
    assert benchmark.timing(case, [[1.0, 2.0, 3.0], [2.0, 3.0, 4.0]]).rate == 2.0
    with pytest.raises(ValueError, match="--tokens"):
        benchmark.timing(case, [[1.0, 2.0], [3.0, 4.0]])
