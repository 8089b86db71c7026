"""Tables of tiles: what is measured, what is kept, and that nothing else is ever used."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from liteattention_benchmark import tune
from liteattention_benchmark.cli import app
from liteattention_rocm.cli import needs
from liteattention_rocm.contract import DenseRequest, LiteRequest, RaggedRequest
from liteattention_rocm.dense import default_geometry
from liteattention_rocm.engines.triton import launch, tiles, tuning
from liteattention_rocm.engines.triton.compiled_tiles import HopperTile, PlainTile
from liteattention_rocm.engines.triton.engine import PortableEngine


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(tuning.DIRECTORY_VARIABLE, str(tmp_path))
    tuning._table.cache_clear()
    return tmp_path


def request(
    length: int = 8192, head_dim: int = 128, causal: bool = False, heads: int = 4
) -> DenseRequest:
    return DenseRequest(
        1, heads, heads, length, length, head_dim, torch.bfloat16, torch.device("cpu"), "bhsd",
        0.1, causal, "rtne", False,
    )  # fmt: skip


def test_the_fastest_is_kept_for_its_class_alone() -> None:
    shipped = tiles.plain(request())
    best = PlainTile(64, 64, 8, 4)
    assert best != shipped

    def measure(tile: object) -> float:
        return 1.0 if tile == best else 2.0

    ranked = tuning.tune("plain", request(), measure)
    assert next(iter(ranked)) == best and len(ranked) == len(tuning.space("plain", 128))
    assert tiles.plain(request()) == best
    assert tiles.plain(request(5000)) == best  # the same power of two
    others = (request(8193), request(causal=True), request(head_dim=64), request(heads=5))
    assert all(tuning.tuned("plain", other) is None for other in others)
    assert tiles.hopper(request()) == tiles._HOPPER[128, False]


def test_candidates_that_cannot_run_are_left_out() -> None:
    def measure(tile: object) -> float:
        assert isinstance(tile, HopperTile)
        if tile.groups == 3:
            raise RuntimeError("out of resources")
        return float(tile.stages)

    ranked = tuning.tune("hopper", request(head_dim=64), measure, rounds=3)
    assert all(isinstance(tile, HopperTile) and tile.groups == 2 for tile in ranked)

    def never(_: object) -> float:
        raise RuntimeError("out of resources")

    with pytest.raises(RuntimeError, match="no tile of the plain kernel runs here: out of res"):
        tuning.tune("plain", request(), never)


def test_entries_of_other_classes_stay(folder: Path) -> None:
    tuning.tune("plain", request(), lambda _: 1.0, [PlainTile(64, 64, 4, 2)])
    tuning.tune("plain", request(causal=True), lambda _: 1.0, [PlainTile(64, 64, 8, 2)])
    (path,) = folder.iterdir()
    assert len(json.loads(path.read_text())) == 2
    assert tiles.plain(request()) == PlainTile(64, 64, 4, 2)


CLASS = "plain bfloat16 d128 full 2^2 heads 2^13"


def entry(**changes: object) -> str:
    return json.dumps({CLASS: {"tile": dataclasses.asdict(PlainTile(64, 64, 4, 2)) | changes}})


@pytest.mark.parametrize(
    "text",
    [
        "{", '{"plain x": {"tile": {"rows": 1}}}', '{"other x": {}}', '{"": {}}', "null", "[1]",
        '[["plain x", {}]]', '{"plain x": 3}', entry(block_m="64"), entry(warps=0),
        entry(stages=True),
    ],
)  # fmt: skip
def test_a_damaged_table_is_reported_and_ignored(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    tuning.table_path(torch.device("cpu")).write_text(text)
    assert tiles.plain(request()) == tiles._PLAIN[128]
    assert "unusable" in caplog.text


@pytest.mark.parametrize("text", ["{", "null", "[1]", '[["plain x", {}]]'])
def test_what_is_no_table_is_replaced(text: str, caplog: pytest.LogCaptureFixture) -> None:
    best = PlainTile(64, 64, 4, 2)
    tuning.table_path(torch.device("cpu")).write_text(text)
    tuning.tune("plain", request(), lambda _: 1.0, [best], rounds=1)
    assert "replacing" in caplog.text and tiles.plain(request()) == best


def test_entries_of_an_older_version_are_read_as_far_as_they_go() -> None:
    """Fields that came later have their defaults; classes that nothing asks for do no harm."""
    tile = {"groups": 2, "block_n": 128, "stages": 2, "registers": 232, "loader_registers": 40}
    older = {"hopper bfloat16 d128 full 2^13": {"tile": tile, "ms": 1.0}}
    older["hopper bfloat16 d128 full 2^2 heads 2^13"] = {"tile": tile | {"turns": False}}
    tuning.table_path(torch.device("cpu")).write_text(json.dumps(older))
    assert tiles.hopper(request()) == HopperTile(2, 128, 2, 232, 40, turns=False)
    assert tiles.hopper(request(heads=9)) == tiles._HOPPER[128, False]


def test_no_candidate_has_other_blocks_of_keys() -> None:
    """Their width is part of the result: LiteAttention at -inf equals dense bit for bit."""
    for head_dim, causal in itertools.product((64, 128), (False, True)):
        lists = tiles._HOPPER_LITE[head_dim, 128]
        for kind, shipped in (("plain", tiles._PLAIN[head_dim]), ("hopper", lists)):
            found = tuning.space(kind, head_dim, causal)
            assert {tile.block_n for tile in found} == {shipped.block_n}
            assert len(set(found)) == len(found)
        shipped = tiles._HOPPER[head_dim, causal], tiles._HOPPER_LOW.get((head_dim, causal))
        found = tuning.space("hopper", head_dim, causal)
        assert all(tile is None or tile in found for tile in shipped)
        plain = tiles._PLAIN[head_dim]
        assert dataclasses.replace(plain) in tuning.space("plain", head_dim)


@pytest.mark.parametrize(
    ("heads", "length", "low"),
    [(8, 2048, True), (2, 6144, True), (3, 8192, False), (12, 4096, False), (48, 8192, False)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_low_tiles_where_tall_ones_leave_the_gpu_half_empty(
    heads: int, length: int, low: bool, causal: bool
) -> None:
    """With 132 multiprocessors; at head dim 128 there are low tiles only."""
    table = tiles._HOPPER_LOW if low else tiles._HOPPER
    found = tiles.hopper(request(length, 64, causal, heads))
    assert found.groups == table[64, causal].groups == (2 if low else 3)
    assert found.counted == causal and found.persistent
    long = tiles.hopper(request(75_600, 128, causal, heads))
    assert long.persistent == causal  # no head's keys stay in the L2 cache
    assert tiles.hopper(request(length, 128, causal, heads)).groups == 2


@pytest.mark.parametrize("hopper", [False, True])
def test_lists_have_the_tiles_of_dense_calls(hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: hopper)
    monkeypatch.setattr(PortableEngine, "_hopper", staticmethod(lambda device: True))
    found = [PortableEngine().geometry(head_dim) for head_dim in (64, 128)]
    size = [(tile.q_block, tile.k_block) for tile in found]
    assert size == ([(192, 128), (128, 128)] if hopper else [(128, 64)] * 2)
    for tile, head_dim in zip(found if hopper else (), (64, 128), strict=False):
        asked = LiteRequest(
            **dataclasses.asdict(request(head_dim=head_dim)),
            geometry=tile,
            threshold=-4.0,
            descending=True,
            soft_skip=False,
        )
        own = tiles.hopper_lite(asked)
        dense = tiles.hopper(request(16384, head_dim, heads=24))
        assert own is not None and own.block_m == dense.block_m == tile.q_block


@pytest.mark.parametrize(("rows", "q_block"), [(1, 128), (81_920, 128), (81_921, 192)])
def test_lists_of_small_grids_have_the_rows_that_can_be_cut(
    rows: int, q_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """640 q blocks of 128 rows at most; the same by a call's tensors, in whatever layout."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(PortableEngine, "_hopper", staticmethod(lambda device: True))
    monkeypatch.setattr(PortableEngine, "unavailable", lambda self, device: [])
    monkeypatch.setattr(launch, "_current_device", lambda: 0)
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 132)
    engine = PortableEngine()
    assert engine.geometry(64, rows).q_block == q_block
    assert engine.geometry(128, rows).q_block == 128
    for shape in ((1, rows, 1, 64), (1, 1, rows, 64)):
        q = torch.empty(64).expand(shape)
        assert default_geometry(q, "portable").q_block == q_block
    tile = engine.geometry(64, rows)
    asked = LiteRequest(
        1, 1, 1, rows, 8192, 64, torch.bfloat16, torch.device("cpu"), "bhsd", 0.1, False, "rtne",
        False, tile, -4.0, True, False,
    )  # fmt: skip
    own = tiles.hopper_lite(asked)
    assert own is not None and own.block_m == q_block
    cut = launch.cut_for(asked, own, tile.q_blocks(rows), tile.k_blocks(8192))
    assert cut == (132 if q_block == 128 else 0)


def prompts(**changes: object) -> RaggedRequest:
    values = dict(
        requests=8, rows=8192, q_heads=32, kv_heads=8, head_dim=80, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cpu"), page_size=16, max_q_len=1024,
        max_kv_len=1024, scale=0.1, lookahead=0, window=0, soft_cap=0.0, sinks=False, k_scale=1.0,
        v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip
    return RaggedRequest(**values | changes)  # type: ignore[arg-type]


def test_prompts_have_tiles_of_their_own() -> None:
    best = dataclasses.replace(tiles.PROMPTS[128], late_wait=True)
    assert best != tiles.PROMPTS[128] and best in tuning.space("prompts", 80)
    assert tiles.prompts(prompts(), 128) == tiles.PROMPTS[128]
    tuning.tune("prompts", prompts(), lambda tile: 1.0 if tile == best else 2.0)
    assert tiles.prompts(prompts(rows=5000), 128) == best  # the same power of two
    others = (
        prompts(page_size=0), prompts(max_kv_len=1025), prompts(head_dim=128),
        prompts(lookahead=None), prompts(lookahead=63, window=64),
    )  # fmt: skip
    for other in others:
        assert tiles.prompts(other, 128) == tiles.shipped_prompts(other, 128)
    for page_size in (0, 256, 16):  # whole K blocks of keys, or pieces
        found = tiles.prompts(prompts(page_size=page_size, rows=100), 128)
        assert found.late_wait == (page_size != 16)
    for head_dim, shipped in tiles.PROMPTS.items():
        found = tuning.space("prompts", head_dim)
        assert shipped in found and len(set(found)) == len(found)
        assert all(tile.counted or not tile.persistent for tile in found)


#: Requests, rows at most, keys at most, all rows; whether a low tile took less time (H100).
LOW = {
    False: [
        (256, 128, 128, 0, True), (170, 192, 192, 0, False), (128, 256, 256, 0, True),
        (64, 512, 512, 0, True), (43, 768, 768, 0, False), (32, 1024, 1024, 0, True),
        (16, 2048, 2048, 0, False), (1, 1024, 1024, 0, True), (1, 2048, 2048, 0, False),
        (124, 512, 512, 35614, True), (32, 2048, 2048, 33024, False),
    ],
    True: [
        (64, 512, 512, 0, True), (16, 2048, 2048, 0, True), (8, 4096, 4096, 0, True),
        (4, 8192, 8192, 0, False), (1, 2048, 2048, 0, True), (1, 512, 8192, 0, True),
        (1, 2048, 8192, 0, False), (32, 2048, 2048, 33024, True),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("causal", "case"), [(causal, case) for causal, cases in LOW.items() for case in cases], ids=str
)
def test_prompts_have_low_tiles_where_those_are_faster(
    causal: bool, case: tuple[int, int, int, int, bool]
) -> None:
    requests, rows, keys, total, low = case
    changes = dict(requests=requests, max_q_len=rows, max_kv_len=keys, q_heads=12, kv_heads=12)
    changes |= dict(rows=total or requests * rows, lookahead=0 if causal else None)
    narrow = tiles.prompts(prompts(head_dim=64, **changes), 64)
    assert narrow.block_m == (128 if low else 192) and narrow.counted and narrow.abreast
    assert tiles.prompts(prompts(**changes), 128) == tiles.PROMPTS[128]


def test_prompts_that_see_no_key_or_have_no_rows_have_tiles() -> None:
    for changes in (dict(max_kv_len=0), dict(rows=0), dict(rows=0, requests=0)):
        assert tiles.prompts(prompts(head_dim=64, **changes), 64).block_n == 128


def test_others_are_timed_in_the_same_turns_and_never_kept() -> None:
    asked: list[object] = []

    def measure(tile: object) -> float:
        asked.append(tile)
        return 2.0

    def peer() -> float:
        asked.append("peer")
        return 1.0

    candidates = [PlainTile(64, 64, 4, 2), PlainTile(64, 64, 8, 2)]
    ranked = tuning.tune("plain", request(), measure, candidates, 5, {"peer": peer})
    assert next(iter(ranked)) == "peer" and set(ranked) == {"peer", *candidates}
    assert tiles.plain(request()) == candidates[0]
    turns = [asked[2 + 3 * i : 5 + 3 * i] for i in range(5)]
    assert all(set(turn) == {"peer", *candidates} for turn in turns)


def test_what_cannot_be_measured_is_refused_with_every_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(tune, "run", lambda *_, **__: pytest.fail("it was measured"))

    def refused(*words: str) -> str:
        result = CliRunner().invoke(app, ["tune", *words], env={"COLUMNS": "2000"})
        assert result.exit_code == 2, result.output
        return " ".join(result.output.replace("│", " ").split())

    huge = str(10**20)
    text = refused(
        "--shape", "1,2,64,96", "--prompts", "1,2,x", "--prompts", "1,512,256,8,8,128,16",
        "--prompts", f"1,512,{huge},8,8,128,16", "--dtype", "fp8",
    )  # fmt: skip
    for part in (
        "D of --shape must be 64 or 128, got 96",
        "--prompts must be seven numbers up to 2^31 - 1, requests, rows, context, q_heads, "
        "kv_heads, head_dim, page_size, got '1,2,x'",
        f"got '1,512,{huge},8,8,128,16'",
        "tiles are measured on a GPU, and PyTorch sees none",
        "--dtype must be bf16 or fp16, got 'fp8'",
    ):
        assert part in text
    text = refused("--prompts", "1,512,256,8,8,128,16")
    assert "--prompts '1,512,256,8,8,128,16': configuration: rows 512 must not exceed" in text
    monkeypatch.setattr(needs, "installed", lambda name: name != "triton")
    text = refused("--shape", "1,2,64,64")
    lacking = "needs triton: pip install 'liteattention-rocm[triton]'"
    assert f"tiles are measured on a GPU, and PyTorch sees none; it {lacking}" in text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    result = CliRunner().invoke(app, ["tune", "--shape", "1,2,64,64"])
    assert (result.exit_code, result.output) == (1, f"liteattention-rocm bench tune {lacking}\n")
