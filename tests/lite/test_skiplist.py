"""Bitmaps, run-length import and export, statistics and the picture."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from liteattention_rocm import skiplist
from liteattention_rocm.skiplist import SkipStatistics

patterns = st.lists(st.booleans(), min_size=1, max_size=140)


def naive_words(bits: list[bool]) -> list[int]:
    number = sum(1 << j for j, bit in enumerate(bits) if bit)
    words = []
    for i in range(-(-len(bits) // 32)):
        word = number >> (32 * i) & 0xFFFFFFFF
        words.append(word - (1 << 32) if word >> 31 else word)
    return words


def naive_row(bits: list[bool], descending: bool) -> list[int]:
    """A LiteAttention row, walked block by block as its kernel does."""
    order = list(range(len(bits)))
    step = 1
    if descending:
        order, step = order[::-1], -1
    row, inside = [], False
    for j in order:
        if bits[j] != inside:
            row.append(j)
        inside = bits[j]
    if inside:
        row.append(order[-1] + step)
    return [len(row), *row, *[0] * (len(bits) + 1 - len(row))]


def read_opposite(row: list[int], reader_descending: bool) -> list[int]:
    """Blocks in the order in which a reader walks the row of a writer of the other direction."""
    step = -1 if reader_descending else 1
    walked = []
    for i in range(row[0], 1, -2):
        walked += list(range(row[i] + step, row[i - 1] + step, step))
    return walked


@given(patterns)
def test_pack_and_unpack(bits: list[bool]) -> None:
    mask = torch.tensor(bits)
    packed = skiplist.pack(mask)
    assert packed.dtype == torch.int32 and packed.tolist() == naive_words(bits)
    assert skiplist.unpack(packed, len(bits)).tolist() == bits
    assert int(skiplist.count(packed)) == sum(bits)
    assert skiplist.sparsity(packed, len(bits)) == 1 - sum(bits) / len(bits)


def test_pack_many_rows() -> None:
    mask = torch.rand(2, 3, 4, 70, generator=torch.manual_seed(0)) < 0.5
    packed = skiplist.pack(mask)
    assert packed.shape == (2, 3, 4, 3)
    assert torch.equal(skiplist.unpack(packed, 70), mask)
    assert int(skiplist.count(packed)) == int(mask.sum())
    assert int(skiplist.count(packed.transpose(0, 1))) == int(mask.sum())


@pytest.mark.parametrize("k_blocks", [1, 31, 32, 33, 64, 100])
def test_full_keeps_everything_and_nothing_beyond(k_blocks: int) -> None:
    bitmap = skiplist.full(2, 3, 4, k_blocks)
    assert torch.equal(bitmap, skiplist.pack(torch.ones(2, 3, 4, k_blocks, dtype=torch.bool)))
    assert int(skiplist.count(bitmap)) == 24 * k_blocks
    assert skiplist.sparsity(bitmap, k_blocks) == 0.0


def test_raises_of_the_bitmap_functions() -> None:
    with pytest.raises(TypeError, match=r"bool mask over K blocks, got torch.int32: use mask"):
        skiplist.pack(torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="got a scalar"):
        skiplist.pack(torch.tensor(True))
    with pytest.raises(TypeError, match=r"int32 tensor of uint32 words, got torch.int64"):
        skiplist.unpack(torch.ones(1, dtype=torch.int64), 3)
    with pytest.raises(TypeError, match="int32 tensor of uint32 words"):
        skiplist.count(torch.ones(1))
    with pytest.raises(ValueError, match="33 K blocks need 2 words in the last dimension"):
        skiplist.unpack(torch.ones(1, dtype=torch.int32), 33)
    with pytest.raises(ValueError, match="batch must be >= 0, got -1; k_blocks must be >= 0"):
        skiplist.full(-1, 1, 1, -2)


def test_token_ranges() -> None:
    outward = skiplist.token_ranges_to_blocks([(3, 5), (9, 10)], 11, 4, outward=True)
    assert outward.tolist() == [True, True, True]
    inward = skiplist.token_ranges_to_blocks([(3, 9), (9, 11)], 11, 4, outward=False)
    assert inward.tolist() == [False, True, True]
    with pytest.raises(ValueError, match=r"range 0 \[5, 3\) is descending.*\[9, 12\) ends past"):
        skiplist.token_ranges_to_blocks([(5, 3), (9, 12)], 11, 4, outward=True)


# --- run-length rows ------------------------------------------------------------------------


@given(patterns, st.booleans())
def test_run_length_round_trip(bits: list[bool], descending: bool) -> None:
    packed = skiplist.pack(torch.tensor(bits))
    rows = skiplist.to_run_length(packed, len(bits), writer_descending=descending)
    assert rows.dtype == torch.int16 and rows.tolist() == naive_row(bits, descending)
    back = skiplist.from_run_length(rows, len(bits), writer_descending=descending)
    assert torch.equal(back, packed)
    # the kernel that reads the row walks the other way and meets the same blocks
    walked = read_opposite(rows.tolist(), reader_descending=not descending)
    expected = [j for j, bit in enumerate(bits) if bit]
    assert walked == (expected if descending else expected[::-1])


def test_compute_all_seed_for_an_ascending_reader() -> None:
    rows = skiplist.to_run_length(skiplist.full(1, 2, 3, 40), 40, writer_descending=True)
    assert rows.shape == (1, 2, 3, 42)
    assert rows[0, 1, 2, :3].tolist() == [2, 39, -1]


def test_import_ignores_what_lies_behind_the_length() -> None:
    row = torch.tensor([[2, 1, 3, 77, -5, 9]], dtype=torch.int16)
    assert skiplist.unpack(skiplist.from_run_length(row, 4), 4).tolist() == [
        [False, True, True, False]
    ]


@pytest.mark.parametrize(
    ("row", "descending", "message"),
    [
        ([3, 0, 1, 2], False, "length 3 must be even"),
        ([-2, 0, 1, 2], False, "length -2 must be even, >= 0"),
        ([8, 0, 1, 2, 3], False, "leave room in a row of 5 numbers"),
        ([2, 3, 0, 0], False, "run 3, 0 does not walk up: is writer_descending=True meant?"),
        ([2, 0, 3, 0], True, "run 0, 3 does not walk down: is writer_descending=False meant?"),
        ([2, 1, 1, 0], False, "run 1, 1 does not walk up"),
        ([2, 3, 9, 0], False, "run 3, 9 leaves the 6 K blocks"),
        ([2, 3, -2, 0], True, "run 3, -2 leaves the 6 K blocks"),
        ([4, 0, 3, 2, 4], False, "run 2, 4 overlaps or precedes the run before it"),
        ([4, 3, 5, 0, 2], False, "run 0, 2 overlaps or precedes"),
    ],
)
def test_import_refuses_broken_rows(row: list[int], descending: bool, message: str) -> None:
    good = naive_row([True] * 3, descending)[: len(row)]
    good += [0] * (len(row) - len(good))
    rows = torch.tensor([good, row], dtype=torch.int16)
    with pytest.raises(ValueError, match="row 1: ") as caught:
        skiplist.from_run_length(rows, 6, writer_descending=descending)
    assert message in str(caught.value) and "row 0" not in str(caught.value)


def test_import_lists_eight_rows_and_counts_the_rest() -> None:
    rows = torch.tensor([[1, 0, 0]] * 11, dtype=torch.int16)
    with pytest.raises(ValueError, match=r"row 7: .*; and 3 more rows"):
        skiplist.from_run_length(rows, 4)


def test_run_length_limits_and_types() -> None:
    largest = skiplist.to_run_length(skiplist.full(1, 1, 1, 32767), 32767)
    assert largest[0, 0, 0, :3].tolist() == [2, 0, 32767]
    assert torch.equal(skiplist.from_run_length(largest, 32767), skiplist.full(1, 1, 1, 32767))
    with pytest.raises(ValueError, match="32768 K blocks do not fit int16"):
        skiplist.to_run_length(skiplist.full(1, 1, 1, 32768), 32768)
    with pytest.raises(ValueError, match="32768 K blocks do not fit int16"):
        skiplist.from_run_length(torch.zeros(1, 3, dtype=torch.int16), 32768)
    with pytest.raises(TypeError, match=r"rows are int16, got torch.int32"):
        skiplist.from_run_length(torch.zeros(1, 3, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="got none"):
        skiplist.from_run_length(torch.zeros((), dtype=torch.int16), 4)


# --- statistics -----------------------------------------------------------------------------


def sample() -> SkipStatistics:
    statistics = SkipStatistics()
    for step in (0, 1):
        for layer in ("a", "b"):
            for branch in ("cond", "uncond"):
                statistics.record(
                    "clip",
                    step,
                    layer,
                    branch,
                    tiles_total=100,
                    tiles_computed=100 - 10 * step - (5 if layer == "b" else 0),
                    tiles_kept=80,
                    threshold=float("-inf") if step else -6.0,
                    descending=bool(step),
                )
    return statistics


def test_sums_by_step_layer_and_branch() -> None:
    statistics = sample()
    assert len(statistics) == 8
    steps = statistics.by_step()
    assert [row["step"] for row in steps] == [0, 1]
    assert steps[1]["tiles_computed"] == 350 and steps[1]["tiles_total"] == 400
    assert steps[1]["calls"] == 4 and steps[1]["sparsity"] == 1 - 350 / 400
    assert [(r["layer"], r["tiles_computed"]) for r in statistics.by_layer()] == [
        ("a", 380),
        ("b", 360),
    ]
    assert [r["branch"] for r in statistics.by_branch()] == ["cond", "uncond"]
    assert statistics.by_generation()[0]["generation"] == "clip"
    assert statistics.sparsity == 1 - 740 / 800


def test_records_survive_json() -> None:
    statistics = sample()
    records = statistics.to_records()
    assert records[0] == {
        "generation": "clip",
        "step": 0,
        "layer": "a",
        "branch": "cond",
        "tiles_total": 100,
        "tiles_computed": 100,
        "tiles_kept": 80,
        "sparsity": 0.0,
        "dense": False,
        "threshold": -6.0,
        "descending": False,
    }
    assert records[4]["step"] == 1 and records[4]["threshold"] == "-inf"
    text = json.dumps(records, allow_nan=False)
    assert SkipStatistics.from_records(json.loads(text)).to_records() == records
    with pytest.raises(ValueError, match="record 1 lacks layer, tiles_kept"):
        broken = {k: v for k, v in records[1].items() if k not in ("layer", "tiles_kept")}
        SkipStatistics.from_records([records[0], broken])


def test_recording_again_replaces() -> None:
    statistics = sample()
    statistics.record("clip", 0, "a", "cond", tiles_total=10, tiles_computed=1, tiles_kept=1)
    assert len(statistics) == 8 and statistics.to_records()[0]["tiles_total"] == 10


def test_merge_adds_ranks() -> None:
    merged = sample().merge(sample(), sample())
    assert len(merged) == 8 and merged.sparsity == sample().sparsity
    assert merged.to_records()[0]["tiles_total"] == 300
    other = SkipStatistics()
    other.record(("a", 1), 0, "a", "", tiles_total=1, tiles_computed=1, tiles_kept=1, dense=True)
    both = sample().merge(other)
    assert len(both) == 9 and both.by_generation()[1]["generation"] == "('a', 1)"


def test_clear_and_discard() -> None:
    statistics = sample()
    statistics.discard("clip", "a", "cond")
    assert len(statistics) == 6
    statistics.discard("clip", "b")
    assert {row["layer"] for row in statistics.to_records()} == {"a"}
    statistics.clear("clip")
    assert len(statistics) == 0 and statistics.sparsity == 0.0


def test_old_generations_are_dropped_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    statistics = SkipStatistics(max_generations=2)
    for generation in range(4):
        statistics.record(generation, 0, "a", "", tiles_total=1, tiles_computed=1, tiles_kept=1)
    assert [row["generation"] for row in statistics.by_generation()] == [2, 3]
    warnings = [r for r in caplog.records if "skip statistics hold 2 generations" in r.message]
    assert len(warnings) == 1
    with pytest.raises(ValueError, match="max_generations must be >= 1"):
        SkipStatistics(max_generations=0)


@settings(deadline=None, max_examples=30)
@given(st.lists(patterns, min_size=1, max_size=8))
def test_counters_are_read_late_and_count_right(rows: list[list[bool]]) -> None:
    statistics = SkipStatistics()
    for step, bits in enumerate(rows):
        counter = statistics.counter(torch.device("cpu"))
        bitmap = skiplist.pack(torch.tensor([bits, bits]))
        statistics.count_tiles(bitmap, counter)
        statistics.record(
            0, step, "a", "", tiles_total=2 * len(bits), tiles_computed=counter, tiles_kept=counter
        )
        bitmap.zero_()  # the list moves on; its count must not
    assert [row["tiles_kept"] for row in statistics.to_records()] == [2 * sum(b) for b in rows]


def test_more_counters_than_one_chunk_holds() -> None:
    statistics = SkipStatistics()
    for step in range(1100):
        counter = statistics.counter(torch.device("cpu"))
        counter.slot.fill_(step)
        statistics.record(0, step, "a", "", tiles_total=2000, tiles_computed=counter, tiles_kept=0)
    assert [row["tiles_computed"] for row in statistics.to_records()] == list(range(1100))


# --- picture --------------------------------------------------------------------------------


def test_picture_draws_every_head(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    kept = torch.rand(1, 3, 6, 40, generator=torch.manual_seed(0)) < 0.6
    all_heads = skiplist.picture(kept, tmp_path / "all.png", title="step 3")
    one = skiplist.picture(skiplist.pack(kept), tmp_path / "one.png", k_blocks=40, heads=[1])
    wide, narrow = imread(all_heads), imread(one)
    assert wide.shape[1] == 3 * narrow.shape[1]
    dark = (abs(narrow[..., :3] - torch.tensor([0x1F, 0x4E, 0x9C]).numpy() / 255) < 0.01).all(-1)
    light = (abs(narrow[..., :3] - torch.tensor([0xE9, 0xEC, 0xF2]).numpy() / 255) < 0.01).all(-1)
    share = light.sum() / (dark.sum() + light.sum())
    assert abs(share - float((~kept[0, 1]).float().mean())) < 0.02


def _recorded() -> SkipStatistics:
    """Layer b skips 1/4 in step 0 and 3/4 in step 2, over two branches; layer a runs in step 2."""
    made = SkipStatistics()
    for step, layer, computed in ((0, "b", (4, 2)), (2, "b", (1, 1)), (2, "a", (4, 4))):
        for branch, tiles in zip(("cond", "uncond"), computed, strict=True):
            made.record(
                0, step, layer, branch, tiles_total=4, tiles_computed=tiles, tiles_kept=tiles
            )
    return made


def test_grid_is_layers_by_steps() -> None:
    assert _recorded().grid() == (["b", "a"], [0, 2], [[0.25, 0.75], [None, 0.0]])
    assert SkipStatistics().grid() == ([], [], [])


def test_picture_by_step_shows_the_grid(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.image import imread

    path = skiplist.picture_by_step(_recorded(), tmp_path / "steps.png", title="two layers")
    image = torch.from_numpy(imread(path)[..., :3].copy())
    # viridis: yellow is the most, dark violet nothing
    yellow = (image - torch.tensor([0.993, 0.906, 0.144])).abs().sum(-1) < 0.05
    violet = (image - torch.tensor([0.267, 0.005, 0.329])).abs().sum(-1) < 0.05
    left_of_bar = int(0.75 * image.shape[1])
    rows = lambda mask: mask[:, :left_of_bar].nonzero()[:, 0].float().mean()  # noqa: E731
    assert yellow[:, :left_of_bar].float().mean() > 0.05
    assert rows(yellow) < rows(violet), "layer b, which skips, is drawn above layer a"


def test_picture_by_step_needs_calls(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no calls are recorded"):
        skiplist.picture_by_step(SkipStatistics(), tmp_path / "none.png")


def test_picture_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    bitmap = skiplist.full(1, 2, 3, 40)
    with pytest.raises(ValueError, match="give k_blocks, or a bool mask"):
        skiplist.picture(bitmap, path)
    with pytest.raises(TypeError, match=r"int32 bitmap or a bool mask, got torch.float32"):
        skiplist.picture(torch.ones(3, 4), path)
    with pytest.raises(ValueError, match=r"takes .B, H, q_blocks, K_blocks."):
        skiplist.picture(torch.ones(4, dtype=torch.bool), path)
    with pytest.raises(ValueError, match=r"nothing to draw: 1 x 2 heads .* asked for \[2\]"):
        skiplist.picture(bitmap, path, k_blocks=40, heads=[2])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "liteattention-rocm\[bench\]"'):
        skiplist.picture(bitmap, path, k_blocks=40)


def test_bits_past_the_last_k_block_do_not_count() -> None:
    bitmap = torch.full((1, 2, 3, 2), -1, dtype=torch.int32)
    assert int(skiplist.count(bitmap, 39)) == 6 * 39
    assert skiplist.sparsity(bitmap, 39) == 0.0
    assert int(skiplist.count(bitmap)) == 6 * 64
    with pytest.raises(ValueError, match="need 1 words"):
        skiplist.count(bitmap, 32)
