"""What ``liteattention-rocm plan`` says is what a call does."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner

from liteattention_rocm import _core
from liteattention_rocm.cli import plan


def invoke(*arguments: str) -> tuple[int, str, str]:
    app = typer.Typer()
    app.command()(plan.command)
    outcome = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})
    return outcome.exit_code, outcome.stdout, outcome.output


def test_json_says_what_is_planned() -> None:
    code, text, _ = invoke("--shape", "4,16,16384,128", "--kv-heads", "4", "--json")
    assert code == 0
    found = json.loads(text)
    made = _core.plan_dense(_core.DenseShape(4, 16, 4, 16384, 16384, 128), 304, 0)
    assert found["tiles"] == 4 * 16 * 64 and found["rounds"] == 14
    assert found["last_round_occupancy"] == 144 / 304
    assert (found["splits"], found["split_tiles"]) == (made.splits, made.tail_tiles) == (2, 144)
    assert found["workspace_bytes"] == made.workspace_bytes and found["declined"] is None
    assert 1.02 < found["modelled_speedup"] < 1.05
    assert found["shape"]["kv_heads"] == 4 and found["shape"]["kv_len"] == 16384
    assert found["mapping"] == "swizzled_head_first"


def test_times_name_the_clock_that_they_assume() -> None:
    one_round = plan.describe(1, 304, 256, 128)  # 4 K blocks, and as long as 2.6 around them
    clocks = one_round["modelled_ms"] * 1e6 * one_round["modelled_clock_ghz"]
    assert clocks == pytest.approx(6.6 * 4230)
    for arguments, clock in (
        (("--shape", "1,24,4096,128"), " at 1.1 GHz"),
        (("--ragged", "2,8,512,128"), " at 1.1 GHz"),
        (("--ragged", "2,8,1,128"), ""),  # by the rate of HBM
    ):
        rows = invoke(*arguments)[1].splitlines()
        (time,) = (row.rstrip() for row in rows if row.split()[0] == "time")
        assert time.endswith(f"s (modelled{clock})")


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("1,304,256,128", "the tiles fill every round"),
        ("1,290,256,128", "the last round is at least 95% full"),
        ("1,1,256,64", "the merge would cost more"),
    ],
)
def test_text_says_why_a_split_is_declined(shape: str, why: str) -> None:
    extra = ("--kv-len", "128") if "merge" in why else ()
    code, text, _ = invoke("--shape", shape, *extra)
    assert code == 0 and why in text and "1.00x (modelled)" in text


def test_a_partition_of_the_gpu_and_long_keys() -> None:
    code, text, _ = invoke("--shape", "1,40,256,128", "--compute-units", "38", "--kv-len", "65536")
    assert code == 0 and "2 of 38 workgroups" in text and "5.3% of the compute units" in text
    assert "for each of 2 tiles" in text
    code, text, _ = invoke("--shape", "1,1,8,128", "--kv-len", str(2**22 + 1), "--json")
    assert code == 0 and json.loads(text)["lite_workspace_bytes"] > 2**22 * 128 * 2


@pytest.mark.parametrize(
    ("arguments", "reasons"),
    [
        (["1,2,3"], ["--shape must be four whole numbers B,Hq,Sq,D, none negative, got '1,2,3'"]),
        (["1,2,3,x", "--fp8"], ["got '1,2,3,x'; a window and an fp8 cache are for ragged calls"]),
        (
            ["-1,16,0,127", "--window", "3"],
            [
                "an fp8 cache are for ragged calls; ",
                "batch must be from 1 to 2^31 - 1, got -1; ",
                "q_len must be from 1 to 2^31 - 1, got 0; ",
                "head dim must be 64 or 128, got 127",
            ],
        ),
        (["-" + "9" * 5000 + ",1,1,64"], ["four whole numbers B,Hq,Sq,D, none negative"]),
        (["1,3,4,96", "--kv-heads", "2"], ["head dim must be 64 or 128, got 96"]),
        (["0,3,4,64", "--compute-units", "0"], ["batch must be from 1", "compute units must be"]),
        (["1,24,99999999999999999999,128"], ["at most 2^31 - 1, got 99999999999999999999"]),
        (["1,1," + "9" * 5000 + ",64"], ["numbers must be at most 2^31 - 1"]),
        (
            [
                "1,24,64,128",
                "--kv-len",
                str(10**20),
                "--kv-heads",
                str(-(10**20)),
                "--fp8",
                "--compute-units",
                str(10**20),
            ],
            [
                f"kv_len must be from 0 to 2^31 - 1, got {10**20}",
                f"got {-(10**20)}",
                "compute_units must be",
                "an fp8 cache are for ragged calls",
            ],
        ),
    ],
)
def test_bad_options_are_refused(arguments: list[str], reasons: list[str]) -> None:
    code, _, output = invoke("--shape", *arguments)
    text = " ".join(output.replace("│", " ").split())
    assert code == 2 and all(reason in text for reason in reasons)


def test_a_ragged_call_is_planned_as_the_engine_does() -> None:
    code, text, _ = invoke(
        "--ragged", "1,32,1,128", "--kv-heads", "8", "--kv-len", "131072", "--json"
    )
    assert code == 0
    found = json.loads(text)
    made = _core.plan_ragged(_core.RaggedShape(1, 1, 32, 8, 128, 16, 1, 131072), 304, 0)
    decode = found["decode"]
    assert decode["splits"] == made.decode.splits > 8 and decode["declined"] is None
    assert decode["workgroups"] == 8 * made.decode.splits and decode["merge_workgroups"] == 8
    assert found["prefill"] is None
    assert decode["kv_bytes"] == 2 * 131072 * 8 * 128 * 2
    assert found["workspace_bytes"] == made.workspace_bytes
    assert decode["modelled_speedup"] > 5 and 0.5 < decode["modelled_tb_per_s"] < 5.3


def test_a_chunk_behind_a_long_prefix_is_planned_as_the_engine_does() -> None:
    # one of eight ranks of a model with 64 heads on 8: 64 tiles on 304 compute units
    code, text, _ = invoke(
        "--ragged", "1,8,2048,128", "--kv-heads", "1", "--kv-len", "34816", "--json"
    )
    assert code == 0
    found = json.loads(text)
    made = _core.plan_ragged(_core.RaggedShape(1, 2048, 8, 1, 128, 16, 2048, 34816, 2048), 304, 0)
    prefill = found["prefill"]
    assert prefill["splits"] == made.prefill.splits > 4 and prefill["declined"] is None
    assert prefill["workgroups"] == 64 * made.prefill.splits
    assert found["decode"] is None and found["workspace_bytes"] == made.workspace_bytes
    assert prefill["modelled_us"] == made.prefill.modelled_us
    assert 3.5 < prefill["modelled_speedup"] < 304 / 64


def test_an_fp8_cache_has_half_the_bytes() -> None:
    options = ("--ragged", "8,32,1,128", "--kv-heads", "8", "--kv-len", "8192", "--json")
    plain, fp8 = (json.loads(invoke(*options, *more)[1]) for more in ((), ("--fp8",)))
    plain, fp8 = plain["decode"], fp8["decode"]
    assert fp8["kv_bytes"] * 2 == plain["kv_bytes"]
    made = _core.plan_ragged(_core.RaggedShape(8, 8, 32, 8, 128, 16, 1, 8192, fp8=True), 304, 0)
    assert fp8["splits"] == made.decode.splits
    assert fp8["modelled_us"] == made.decode.modelled_us
    assert 0.4 < fp8["modelled_us"] / plain["modelled_us"] <= 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["64,128,1,64", "--kv-heads", "16", "--kv-len", "9999"], "requests and key heads fill"),
        (["1,8,1,64", "--kv-len", "300"], "no number of parts would save 5 %"),
        (["2,8,100,256", "--kv-heads", "2"], "prefill 16 workgroups at most"),
        (["9,32,9999,64", "--kv-heads", "8"], "its tiles fill the GPU"),
        (["1,8,512,128", "--kv-len", "99999"], "parts of each tile"),
        (["1,8,2,64", "--kv-heads", "1", "--kv-len", "9999999"], "parts of each request"),
        (["1,8,1,64", "--kv-len", "9999999", "--window", "64"], "4,194,304 bytes"),
    ],
)
def test_text_of_a_ragged_call(arguments: list[str], said: str) -> None:
    code, text, _ = invoke("--ragged", *arguments)
    assert code == 0
    if "--window" in arguments:
        said = f"{8 * 64 * 64 * 4:,} bytes"
    assert said in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--ragged", "1,2,3"], "four whole numbers R,Hq,Sq,D, none negative, got '1,2,3'"),
        (
            ["--ragged", "1,3,4,72", "--kv-heads", "2"],
            "head dim must be 32, 64, 80, 96, 112, 128, 192 or 256, got 72",
        ),
        (["--ragged", "1,1,1,64", "--shape", "1,1,1,64"], "give one of --shape and --ragged"),
        ([], "give one of --shape and --ragged"),
        (
            ["--shape", "1,1,1,64", "--window", "3"],
            "a window and an fp8 cache are for ragged calls",
        ),
        (["--shape", "1,1,1,64", "--fp8"], "a window and an fp8 cache are for ragged calls"),
        (["--ragged", f"{2**31},1,1,64"], "at most 2^31 - 1, got 2147483648"),
        (
            ["--ragged", "1,1,1,64", "--kv-len", str(10**20)],
            f"kv_len must be from 0 to 2^31 - 1, got {10**20}",
        ),
        (["--ragged", "1,1,1,64", "--window", str(-(10**20))], "window must be from 0"),
        (["--ragged", "1,-1,1,64"], "q_heads must be from 1 to 2^31 - 1, got -1"),
        (
            ["--shape", "1,1,1,64", "--compute-units", "0"],
            "Invalid value: no plan for this call: compute units must be >= 1, got 0",
        ),
    ],
)
def test_bad_ragged_options_are_refused(arguments: list[str], reason: str) -> None:
    code, _, output = invoke(*arguments)
    assert code == 2 and reason in " ".join(output.replace("│", " ").split())
