"""The Hopper kernels without a GPU: their source on :mod:`.gluon_machine`, launched by the engine.

Results against float64 and the reference engine under drawn schedules, and what is noticed if a
kernel is broken. The kernel that plans a LiteAttention step runs in Triton's interpreter.
"""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from liteattention_rocm import (
    PagedBatch,
    TileGeometry,
    attention,
    attention_paged,
    attention_varlen,
    lite_attention,
)
from liteattention_rocm.contract import RaggedRequest
from liteattention_rocm.lite import bitmap, budget
from tests.oracle.attention import HALF_ULP, bound, exact, expect_lse, expect_out
from tests.oracle.tensors import normal

from . import gluon_machine, ptx

triton = pytest.importorskip("triton")
from liteattention_rocm import remembered  # noqa: E402
from liteattention_rocm.engines.triton import (  # noqa: E402
    hopper_settle,
    hopper_softmax,
    kernels,
    launch,
    ragged_cut,
    ragged_launch,
    tiles,
)
from liteattention_rocm.engines.triton.engine import PortableEngine  # noqa: E402

from . import test_interpreter, test_ragged_interpreter, test_weighing  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
TILE = TileGeometry(128, 128, 64)
#: Of three warpgroups, at head dim 64.
WIDE_TILE = TileGeometry(192, 128, 64)


def run_on_machine(monkeypatch: pytest.MonkeyPatch, name: str, module: ModuleType) -> None:
    """Have launches of kernel module ``name`` run ``module`` instead."""
    owner, kernel = {"hopper": (launch, "_HOPPER"), "hopper_ragged": (ragged_launch, "_PROMPTS")}[
        name
    ]
    monkeypatch.setattr(owner, kernel, launch.Kernel(module.attention))
    # As on such a GPU. The launch before is through all the same, and the machine checks the rest.
    monkeypatch.setattr(launch, "chains", lambda device: True)
    monkeypatch.setattr(kernels, "gdc_launch_dependents", lambda: None)  # the interpreter has none
    remembered.forget()


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors lie on a Hopper GPU of three multiprocessors."""
    monkeypatch.setattr(PortableEngine, "_hopper", staticmethod(lambda device: True))
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(ragged_launch, "architecture", lambda device: "sm_90")
    compiled = SimpleNamespace(runtime=SimpleNamespace(interpret=False))
    monkeypatch.setattr(ragged_launch, "knobs", compiled)
    monkeypatch.setattr(test_weighing, "GPU", True)
    monkeypatch.setattr(launch, "cut_for", lambda *_: 0)  # test_pieces.py cuts lists
    for name in ("hopper", "hopper_ragged"):
        run_on_machine(monkeypatch, name, gluon_machine.load(name))


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """No call is bound to the machine once it is gone."""
    yield
    remembered.forget()


def raise_scores(q: torch.Tensor, k: torch.Tensor, rising: float) -> None:
    """Let scores rise along the walk, which is from the last block of 128 keys to the first."""
    if rising:
        q[..., 0] = 1.0
        walked = torch.arange(-(-k.shape[-2] // 128)).flip(0)
        heights = rising * walked * walked / 2 * math.sqrt(k.shape[-1]) * math.log(2)
        k[..., 0] = heights.repeat_interleave(128)[: k.shape[-2]].to(k.dtype)


def check(
    q_len: int, kv_len: int, heads: tuple[int, int], dim: int, rising: float = 0.0, **options: Any
) -> None:
    """One dense call, [B, S, H, D] without copies, against float64.

    Scores rise by ``rising`` more, log2 units, from each block of 128 keys to the next one walked.
    """
    dtype = options.pop("dtype", torch.bfloat16)
    q = normal(2, heads[0], q_len, dim, dtype=dtype)
    k, v = (normal(2, heads[1], kv_len, dim, dtype=dtype, seed=i) for i in (1, 2))
    raise_scores(q, k, rising)
    expected = exact(q, k, v, causal=options.get("causal", False), scale=options.get("scale"))
    allowed = bound(expected, dtype, "rtz") + HALF_ULP[dtype] * 2 * expected.weight
    target = torch.full((2, q_len, heads[0], dim), math.nan, dtype=dtype)
    turned = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    _, lse = attention(*turned, return_lse=True, out=target, engine="portable", **options)
    expect_out(target.transpose(1, 2), expected, allowed)
    expect_lse(lse, expected.lse, rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("dim", "low"), [(64, False), (64, True), (128, False)])
@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (192, 128), (300, 517), (400, 130), (130, 769)]
)
def test_dense(
    q_len: int, kv_len: int, dim: int, low: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths around the edges of tiles; more tiles than workgroups; causal rows without a key."""
    monkeypatch.setattr(tiles, "_COST_OF_LOW", 0.0 if low else math.inf)
    check(q_len, kv_len, (2, 1), dim, causal=causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("rising", [1.0, 2.5, 12.0])
def test_rows_whose_scores_rise(rising: float, dim: int, dtype: torch.dtype) -> None:
    """Levels that stay, as the rise is below 2^8, that follow now and then, and in every step."""
    check(200, 5 * 128 + 70, (2, 1), dim, rising, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_late_waits_change_no_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (normal(1, n, 300, 128, dtype=dtype, seed=n) for n in (2, 1, 1))
    found = []
    for late in (False, True):
        tile = replace(tiles._HOPPER[128, True], late_wait=late)
        monkeypatch.setitem(tiles._HOPPER, (128, True), tile)
        prompts = replace(tiles.PROMPTS[128], late_wait=late)
        monkeypatch.setattr(tiles, "shipped_prompts", lambda *_, tile=prompts: tile)
        remembered.forget()
        found.append(attention(q, k, v, layout="bhsd", causal=True, engine="portable")[0])
        packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        bounds = dict(max_seqlen_q=300, max_seqlen_k=300, causal=True, engine="portable")
        starts = torch.tensor([0, 100, 300], dtype=torch.int32)
        found.append(attention_varlen(*packed, starts, starts, **bounds).transpose(0, 1))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def test_longer_rings_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists and prompts whose keys and values have three stages, as a tuned tile may."""
    q, k, v = (normal(1, n, 900, 64, seed=n) for n in (2, 1, 1))
    read = bitmap.full(1, 2, 5, 8)
    starts = torch.tensor([0, 500, 900], dtype=torch.int32)
    packed = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
    found = []
    for stages in (2, 3):
        lists = replace(tiles._HOPPER_LITE[64, 192], stages=stages)
        monkeypatch.setitem(tiles._HOPPER_LITE, (64, 192), lists)
        prompts = replace(tiles.PROMPTS[64], stages=stages)
        monkeypatch.setattr(tiles, "shipped_prompts", lambda *_, tile=prompts: tile)
        remembered.forget()
        write = torch.empty_like(read)
        out = lite_attention(
            q, k, v, read, write, geometry=TileGeometry(192, 128, 64), threshold=-2.0,
            layout="bhsd", engine="portable",
        )  # fmt: skip
        found.append((out, write))
        bounds = dict(max_seqlen_q=500, max_seqlen_k=500, causal=True, engine="portable")
        found.append((attention_varlen(*packed, starts, starts, **bounds),))
    for two, three in ((found[0], found[2]), (found[1], found[3])):
        assert all(torch.equal(x, y) for x, y in zip(two, three, strict=True))


@pytest.mark.parametrize("slots", [False, True], ids=["whole", "cut"])
def test_budgets_by_head(slots: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every head of two videos is chosen from by its own; a budget of 0 keeps every tile."""
    if not slots:
        monkeypatch.setattr(launch, "MOST_CUT", 0)
    q, k, v = (normal(2, n, s, 64, seed=n + s) for n, s in ((4, 300), (2, 4500), (2, 4500)))
    # Scores so flat that rows guard few tiles, and lighter tiles, which weigh next to nothing.
    q[..., 0], k[..., 0], k[:, :, 3000:, 0] = 1.0, 0.0, -100.0
    budgets = (0.3, 0.0, 0.02, 0.15)
    read = bitmap.full(2, 4, 3, 36)
    write, mass = torch.empty_like(read), torch.empty(2, 4, 3, 36)
    options: dict[str, Any] = dict(
        budget=max(budgets), limits=budget.limits(budgets), layout="bhsd", geometry=TILE, scale=0.2
    )
    lite_attention(q, k, v, read, write, mass=mass, engine="portable", **options)
    walked, do = torch.ones(2, 4, 3, 36, dtype=torch.bool), torch.zeros(36, dtype=torch.bool)
    chosen = budget.select(mass, walked, do, budgets)
    assert torch.equal(write, bitmap.pack(chosen))
    assert bool((mass[:, 1] < 1e-5).any())  # kept, too
    kept = chosen.float().mean((0, 2, 3)).tolist()
    assert kept[1] == 1 and kept[0] < kept[3] < kept[2] < 1


@pytest.mark.parametrize("limit", [{"threshold": -4.0}, {"budget": 0.1}])
@pytest.mark.parametrize("descending", [False, True])
def test_where_the_exponentials_stand_changes_no_bit(
    limit: dict[str, float], descending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of more than a word, the tail among their tiles or not, and an empty one."""
    q, k, v = (normal(1, n, s, 64, seed=n + s) for n, s in ((2, 300), (1, 4500), (1, 4500)))
    kept = torch.rand(1, 2, 3, 36, generator=torch.Generator().manual_seed(1)) < 0.95
    kept[0, 0, :, -1], kept[0, 1, 0], kept[0, 1, 1, -1] = True, False, False
    read, found = bitmap.pack(kept), []
    for late in (False, True):
        tile = replace(tiles._HOPPER_LITE[64, 128], late_wait=True, late_exp=late)
        monkeypatch.setitem(tiles._HOPPER_LITE, (64, 128), tile)
        remembered.forget()
        write = torch.empty_like(read)
        out = lite_attention(
            q, k, v, read, write, layout="bhsd", geometry=TILE, descending=descending,
            engine="portable", **limit,
        )  # fmt: skip
        found.append((out, write))
    assert 0 < bitmap.sparsity(found[0][1], 36) < 1
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("rounding", ["rtne", "rtna", "rtz"])
def test_scales_and_roundings(scale: float, rounding: str) -> None:
    check(70, 200, (1, 1), 64, scale=scale, rounding=rounding)


def test_fp16() -> None:
    check(200, 260, (3, 3), 128, dtype=torch.float16)


@pytest.mark.parametrize(("masks", "soft_skip"), [(True, False), (False, True)])
def test_votes_equal_the_oracle_bit_for_bit(masks: bool, soft_skip: bool) -> None:
    """36 K blocks: votes of more than one word."""
    test_interpreter.test_lists_equal_the_oracle_bit_for_bit(TILE, 150, 4500, masks, soft_skip)


@pytest.mark.parametrize(("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)])
def test_votes_keep_tiles_that_scored_a_nan(dim: int, tile: TileGeometry) -> None:
    """It and all after it stay. Tiles before it have the votes of a run without the NaN."""
    case = test_weighing.Case(150, 1500, (1, 1), dim, tile)
    q, k, v = test_weighing.tensors(case, 0)
    k[..., 0] *= 4  # tiles lie further apart
    read = bitmap.full(*case.shape)
    sound = test_weighing.step(q, k, v, case, read, threshold=-1.0)["write"]
    k[0, 0, 7 * 128 + 9, 3] = math.nan
    found = test_weighing.step(q, k, v, case, read, threshold=-1.0)["write"]
    assert bool(bitmap.unpack(found, 12)[..., 7:].all())
    assert torch.equal(bitmap.unpack(found, 12)[..., :7], bitmap.unpack(sound, 12)[..., :7])
    assert not bool(bitmap.unpack(sound, 12)[..., 7:].all())
    assert not bool(bitmap.unpack(sound, 12)[..., :7].all())


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    ("q_len", "kv_len", "heads", "masks"),
    [
        (200, 1000, (4, 2), True),
        (130, 33 * 128 + 5, (1, 1), False),
        (70, 32 * 128, (2, 1), False),  # a whole word
        (70, 33 * 128, (2, 1), False),  # and one tile more
    ],
)
def test_weights_and_choices(
    q_len: int, kv_len: int, heads: tuple[int, int], masks: bool, dim: int
) -> None:
    """Masses near float64, the choice given them exact, outputs those of a step at -inf."""
    case = test_weighing.Case(q_len, kv_len, heads, dim, TILE, masks)
    test_weighing.test_masses_are_near_choices_exact_and_outputs_unchanged(case)


def test_votes_at_head_dim_128() -> None:
    case = test_weighing.Case(200, 1000, (4, 2), 128, TILE, masks=True)
    test_weighing.test_votes_equal_the_oracle_bit_for_bit(case, False)


@pytest.mark.parametrize("soft_skip", [False, True])
def test_votes_of_three_warpgroups(soft_skip: bool) -> None:
    case = test_weighing.Case(400, 1000, (4, 2), 64, WIDE_TILE, masks=True)
    test_weighing.test_votes_equal_the_oracle_bit_for_bit(case, soft_skip)


@pytest.mark.parametrize(("q_len", "masks"), [(200, True), (330, False)])
def test_weights_of_three_warpgroups(q_len: int, masks: bool) -> None:
    case = test_weighing.Case(q_len, 33 * 128 + 5, (2, 1), 64, WIDE_TILE, masks)
    test_weighing.test_masses_are_near_choices_exact_and_outputs_unchanged(case)


def test_shares_are_counted_so_that_a_warp_can_add_them_up() -> None:
    """Never below what they are, by two counts at most above it; 4 for what is more, and a NaN."""
    draw = torch.Generator().manual_seed(0)
    here = torch.rand(64, 4, generator=draw) ** 8  # down to far below a unit
    sums = here.sum(1, keepdim=True) * torch.rand(64, 1, generator=draw) + 1e-3  # older ones
    inverse = (hopper_softmax.ROW_SHARE / sums).repeat(1, 4)
    inverse[13] = 0.0  # a row past the end
    here[37, 2], here[54, 0] = math.nan, math.inf
    slack = torch.full((64, 4), math.inf)  # no row is guarded
    text, kinds = hopper_settle._PAIR.value, "=r,=r,f,f,f,f,f,f,f,f"
    found = ptx.run(text, kinds, [here, inverse, here, slack], [torch.int32])[0]
    units = (here.double() * inverse.double() / hopper_softmax.ROW_SHARE * 2**21).view(4, 2, 8, 4)
    pairs = units.sum(1).nan_to_num(math.inf).clamp(max=2.0**23 - 2)
    bits = found.view(4, 2, 8, 4)[:, 0].long()
    counts = bits - 0x48000000  # of 2^17
    assert bool((counts >= pairs).all()) and bool((counts <= pairs + 2).all())
    assert torch.equal(bits.sum((1, 2)) % 2**32, counts.sum((1, 2)))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("q_len", [129, 136])
def test_rows_past_the_end_take_nothing_from_a_weight(q_len: int, dim: int) -> None:
    """They are 0 times a key, NaN where that is infinite; the others' scores are only low."""
    case = test_weighing.Case(q_len, 6 * 128, (1, 1), dim, TILE)
    q, k, v = test_weighing.tensors(case, 0)
    k[0, 0, 3 * 128 + 5, 0] = -math.inf
    read = bitmap.full(*case.shape)
    found = test_weighing.step(q, k, v, case, read, budget=0.3)
    wanted = torch.empty_like(found["mass"])
    lite_attention(
        q, k, v, read, torch.empty_like(read), budget=0.3, mass=wanted, geometry=TILE,
        layout="bhsd", scale=0.25, engine="reference",
    )  # fmt: skip
    assert bool(wanted.isfinite().all())
    if dim == 128:
        wanted, _ = test_weighing.limits_of(case, q, k, torch.ones(1, 1, 2, 6), False)
    k[0, 0, 3 * 128 + 5, 0] = 0.0  # what roundings may be
    assert bool((found["mass"] >= wanted - test_weighing.rounding(case, q, k)).all())


@pytest.mark.parametrize("rising", [0.7, 3.0, 12.0])
def test_weights_of_rows_whose_scores_rise(rising: float) -> None:
    """Sums that outgrow those by which shares are divided now and then, and in every step.

    Scores rise by so much from tile to tile, log2 units. One row of each warp has seen nearly all
    of its mass at first.
    """
    case = test_weighing.Case(200, 40 * 128 - 9, (1, 1), 128, TILE)
    q, k, v = (x * 0.05 for x in test_weighing.tensors(case, 0))
    q[..., 0] = 4.0
    heights = rising * math.log(2) * (torch.arange(case.kv_len) // 128)
    for early in (False, True):
        k[0, 0, :, 0] = heights - heights.amax() * 0.9
        if early:
            q[0, 0, 5::16, 0] *= -1.0
        found = test_weighing.step(q, k, v, case, bitmap.full(*case.shape), budget=0.1)
        walked = torch.ones(case.shape)
        least, most = test_weighing.limits_of(case, q, k, walked, False)
        test_weighing.expect_masses(case, q, k, walked, False, found["mass"], (least, most))


@pytest.mark.parametrize(("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)])
def test_a_row_keeps_the_tile_that_it_looks_at(dim: int, tile: TileGeometry) -> None:
    test_weighing.check_guard(dim, tile)


def test_few_rows_keep_what_they_look_at() -> None:
    test_weighing.check_few_rows(TILE)


@pytest.mark.parametrize("dim", [64, 128])
def test_rows_past_the_end_guard_no_tile(dim: int) -> None:
    test_weighing.check_guard_past_the_end(dim, TILE)


@pytest.mark.parametrize("light", ["none", "all", "first", "second"])
def test_tiles_are_weighed_by_what_rows_have_seen_by_the_end_of_their_word(light: str) -> None:
    """As long as all rows of a warp have, which they do where all keys of a tile score the same.

    ``light``: rows that have little in the first tile, so that sums outgrow their divisors. The
    tiles with which they do weigh more, as a third of what was counted is kept of them. ``first``
    and ``second`` are one of a lane's two rows, so the warp is renewed for this row alone.
    """
    case = test_weighing.Case(128, 40 * 128, (1, 1), 128, TILE)
    q, k, v = (x * 0 for x in test_weighing.tensors(case, 0))
    half = torch.arange(128) % 16 // 8
    rows = {"none": half < 0, "all": half >= 0, "first": half == 0, "second": half == 1}[light]
    q[0, 0, rows, 0], k[..., :128, 0] = (
        4.0,
        -4.75,
    )  # times a scale of 0.25; so little that levels stay
    # One tile that weighs more than its neighbours and is not guarded.
    heavy = 0.65625 if light == "all" else 0.0
    k[..., 7 * 128 : 8 * 128, 0] = heavy
    found = test_weighing.step(q, k, v, case, bitmap.full(*case.shape), budget=0.1)["mass"]
    parts = torch.ones(128, 40)
    parts[rows, 0], parts[rows, 7] = math.exp(-4.75), math.exp(heavy)
    sums = parts.cumsum(1)
    guarded = (parts / sums > budget.ROW_GUARD).any(0)
    assert not bool(guarded[7:].any())
    least = (
        parts / torch.cat([sums[:, 31:32].expand(-1, 32), sums[:, 39:].expand(-1, 8)], 1)
    ).mean(0)
    most = (1 + 2.0**-18) * least + 2.0**-17
    if light == "all":
        # Past 64 times the first tile's with tile 1, which is guarded; renewed with tile 2. Then
        # past three times that with tiles 7 and 26, each renewed with the next one.
        most[7] *= 8.93 / 2 / 3 * 1.01
        most[26] *= 27.93 / 8.93 / 3 * 1.01
    elif light != "none":  # the same tiles; of counts as much is left as of rows that grew less
        most[:8] *= 1.25
        most[8:26] *= 1.07
        most[26:] *= 1.02
    least[guarded] = most[guarded] = 1.0
    assert bool((found >= least - 2.0**-24).all()) and bool((found <= most).all())


@pytest.mark.parametrize(("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)])
def test_tiles_of_rows_that_saw_a_nan_weigh_one(dim: int, tile: TileGeometry) -> None:
    """Tiles before them keep their weights, but for those of the same word of 32."""
    case = test_weighing.Case(2 * tile.q_block, 40 * 128, (1, 1), dim, tile)
    q, k, v = test_weighing.tensors(case, 0)
    q[..., 1:] *= 0.25
    read = bitmap.full(*case.shape)
    sound = test_weighing.step(q, k, v, case, read, budget=0.5)
    k[0, 0, 35 * 128 + 7, 3] = math.nan
    found = test_weighing.step(q, k, v, case, read, budget=0.5)
    assert bool(bitmap.unpack(found["write"], 40)[..., 35:].all())
    assert bool((found["mass"][..., 35:] == 1).all())
    assert torch.equal(found["mass"][..., :32], sound["mass"][..., :32])
    assert bool((sound["mass"][..., 35:] < 1).all())


@pytest.mark.parametrize(("dim", "tile"), [(64, TILE), (64, WIDE_TILE), (128, TILE)])
def test_a_step_that_keeps_every_tile_is_dense_bit_for_bit(dim: int, tile: TileGeometry) -> None:
    q, k, v = (normal(1, 3, 700, dim, seed=i) for i in range(3))
    read = bitmap.full(1, 3, tile.q_blocks(700), tile.k_blocks(700))
    write = torch.zeros_like(read)
    out, lse = lite_attention(
        q, k, v, read, write, threshold=-math.inf, geometry=tile, layout="bhsd", return_lse=True,
        engine="portable",
    )  # fmt: skip
    dense, dense_lse = attention(q, k, v, layout="bhsd", return_lse=True, engine="portable")
    assert torch.equal(out, dense) and torch.equal(lse, dense_lse) and torch.equal(write, read)


@pytest.mark.parametrize("page_size", [0, 8, 48])
def test_prompts_beside_shorter_requests(page_size: int) -> None:
    test_ragged_interpreter.test_prompts_beside_shorter_requests(page_size)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Kernels, as they are launched."""
    found: list[Any] = []
    call = launch.Kernel.__call__

    def noting(kernel: launch.Kernel, *given: Any) -> None:
        found.append(kernel)
        call(kernel, *given)

    monkeypatch.setattr(launch.Kernel, "__call__", noting)
    return found


@pytest.mark.parametrize("page_size", [0, 16])
def test_prompts_beside_decodes(
    page_size: int, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three kernels share the step, and a fourth merges."""
    monkeypatch.setattr(ragged_cut, "_SHORT_KEYS", 1)
    lengths = test_ragged_interpreter.BESIDE
    test_ragged_interpreter.check(lengths, (4, 1), page_size, causal=page_size > 0)
    others = [ragged_launch._ATTENTION] * 2 + [ragged_launch._MERGE]
    assert ran[-4:] == [ragged_launch._PROMPTS, *others]


@pytest.mark.parametrize(("page_size", "parts"), [(0, 1), (16, 2)])
def test_prompts_none_of_which_is_short(
    page_size: int, parts: int, in_parts: Any, ran: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one launch, which computes short ones, too, should there be any."""
    in_parts(parts)
    test_ragged_interpreter.check([(80, 290)] * 3, (4, 2), page_size)
    merge = [ragged_launch._MERGE] * (parts - 1)
    assert [kernel for kernel in ran if kernel is not ragged_launch._WRITE] == [
        ragged_launch._PROMPTS,
        *merge,
    ]
    monkeypatch.setattr(tiles, "none_below", lambda *_: True)
    remembered.forget()
    ran.clear()
    test_ragged_interpreter.check(test_ragged_interpreter.BESIDE, (4, 2), page_size)
    assert ragged_launch._PROMPTS in ran and ragged_launch._ATTENTION not in ran


#: More tiles than programs, none full, of requests with as many numbers each.
SHORT_PROMPTS = [(100, 110), (128, 200), (64, 64), (90, 129), (70, 70), (128, 128), (0, 5)]


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_short_prompts_one_after_the_other(dim: int) -> None:
    """Queries come into one buffer or two in turn."""
    test_ragged_interpreter.check(SHORT_PROMPTS, (4, 2), 16, dim)


@pytest.mark.parametrize("dim", [80, 128, 256])
def test_prompts_of_all_widths(dim: int) -> None:
    test_ragged_interpreter.test_prompts_of_all_widths(dim)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 40},
        {"window": 150, "causal": False},
        {"window": 20, "lookahead": 19, "causal": False},
        {"lookahead": 30, "causal": False},
        {"window": 70, "soft_cap": 5.0, "scale": 0.7},
        {"soft_cap": 5.0},
        {"sinks": torch.tensor([0.5, -2.0]), "scale": 0.0},
        {"sinks": torch.tensor([0.5, 9.0])},
    ],
    ids=[
        "window",
        "window-of-the-past",
        "window-on-both-sides",
        "lookahead",
        "window-soft-cap",
        "soft-cap",
        "sinks-alone",
        "sinks",
    ],
)
def test_prompts_of_what_models_ask_for(options: dict[str, Any]) -> None:
    test_ragged_interpreter.test_prompts_of_what_models_ask_for(options)


@pytest.mark.parametrize("bounds", [{"lookahead": 100}, {"window": 90, "lookahead": 40}], ids=str)
def test_prompts_see_keys_of_the_next_tiles(bounds: dict[str, int]) -> None:
    """First tiles end, and last ones begin, within the request."""
    test_ragged_interpreter.check([(270, 270), (129, 400)], (1, 1), 16, 128, **bounds)


def test_tiles_of_prompts_read_no_keys_that_none_of_their_rows_sees() -> None:
    test_ragged_interpreter.test_tiles_read_no_keys_that_none_of_their_rows_sees()


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("rising", [0.0, 2.5, 12.0])
def test_prompts_longer_than_the_diagonal(rising: float, dim: int) -> None:
    """Steps at the diagonal and before it, in three requests; levels that stay or follow."""
    lengths = [(200, 5 * 128 + 70), (130, 3 * 128), (129, 2 * 128)]  # the last tile has one row
    q, k, v, expected = [], [], [], []
    for i, (rows, keys) in enumerate(lengths):
        one = normal(1, 2, rows, dim, seed=i)
        other, values = (normal(1, 1, keys, dim, seed=10 * i + n) for n in (3, 4))
        raise_scores(one, other, rising)
        expected.append(exact(one, other, values, causal=True))
        for found, x in zip((q, k, v), (one, other, values), strict=True):
            found.append(x[0].transpose(0, 1))
    q_start, k_start = (torch.tensor([0, *n]).cumsum(0).int() for n in zip(*lengths, strict=True))
    queries = torch.cat(q)
    out = torch.full_like(queries, math.nan)
    longest = dict(zip(("max_seqlen_q", "max_seqlen_k"), lengths[0], strict=True))
    _, lse = attention_varlen(
        queries, torch.cat(k), torch.cat(v), q_start, k_start, causal=True, return_lse=True,
        out=out, engine="portable", **longest,
    )  # fmt: skip
    for r, one in enumerate(expected):
        rows = slice(int(q_start[r]), int(q_start[r + 1]))
        allowed = bound(one, torch.bfloat16, "rtz") + HALF_ULP[torch.bfloat16] * 2 * one.weight
        expect_out(out[rows].transpose(0, 1)[None], one, allowed)
        expect_lse(lse[:, rows][None], one.lse, rtol=1e-5)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets in how many parts at most tiles of prompts are computed."""

    def choose(parts: int) -> None:
        monkeypatch.setattr(ragged_cut, "prompt_parts", lambda *_: parts)
        monkeypatch.setattr(ragged_cut, "PROMPT_PART_BLOCKS", 1)
        remembered.forget()

    return choose


@pytest.mark.parametrize(
    ("dim", "parts", "rising"),
    [
        (64, 2, 12.0), (64, 3, 0.0), (64, 32, 12.0),
        (128, 2, 0.0), (128, 3, 12.0), (128, 32, 0.0),
        (256, 2, 12.0), (256, 3, 0.0), (256, 32, 12.0),
    ],
)  # fmt: skip
def test_prompts_in_parts(dim: int, parts: int, rising: float, in_parts: Any) -> None:
    """Of several blocks, of one, at the diagonal alone; tiles of fewer parts than others."""
    in_parts(parts)
    test_prompts_longer_than_the_diagonal(rising, dim)


@pytest.mark.parametrize("page_size", [0, 8, 48])
def test_prompts_in_parts_beside_shorter_requests(page_size: int, in_parts: Any) -> None:
    in_parts(2)
    test_ragged_interpreter.test_prompts_beside_shorter_requests(page_size)


@pytest.mark.parametrize("page_size", [0, 16])
def test_prompts_in_parts_beside_decodes(
    page_size: int, monkeypatch: pytest.MonkeyPatch, in_parts: Any
) -> None:
    """Each of two merges has its own rows."""
    in_parts(3)
    monkeypatch.setattr(ragged_cut, "_SHORT_KEYS", 1)
    lengths = [(1, 300), (130, 700), (5, 200), (0, 3), (1, 30), (64, 64), (70, 300)]
    test_ragged_interpreter.check(lengths, (4, 1), page_size, causal=page_size > 0)


@pytest.mark.parametrize("dim", [80, 256])
def test_prompts_of_all_widths_in_parts(dim: int, in_parts: Any) -> None:
    in_parts(2)
    test_ragged_interpreter.test_prompts_of_all_widths(dim)


@pytest.mark.parametrize(
    "options",
    [
        {"window": 40},
        {"window": 150, "causal": False},
        {"window": 150, "lookahead": 40, "causal": False},
        {"window": 170, "soft_cap": 5.0, "scale": 0.7},
        {"sinks": torch.tensor([0.5, -2.0]), "scale": 0.0},
        {"sinks": torch.tensor([0.5, 9.0])},
    ],
    ids=[
        "window",
        "window-of-the-past",
        "window-on-both-sides",
        "window-soft-cap",
        "sinks-alone",
        "sinks",
    ],
)
def test_prompts_in_parts_of_what_models_ask_for(options: dict[str, Any], in_parts: Any) -> None:
    in_parts(3)
    test_ragged_interpreter.test_prompts_of_what_models_ask_for(options)


def test_prompts_have_parts_where_that_is_modelled_to_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ragged_cut, "units_of", lambda device: 132)
    request = RaggedRequest(
        requests=1, rows=512, q_heads=8, kv_heads=1, head_dim=128, dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16, device=torch.device("cpu"), page_size=16, max_q_len=512,
        max_kv_len=33280, scale=1.0, lookahead=0, window=0, soft_cap=0.0, sinks=False,
        k_scale=1.0, v_scale=1.0, rounding="rtne", return_lse=False,
    )  # fmt: skip

    def parts(**changes: Any) -> int:
        asked = replace(request, **changes)
        return ragged_cut.prompt_parts(asked, tiles.PROMPTS[128])

    assert parts() == 4  # 32 tiles: one round of 128 programs
    assert parts(rows=768, max_q_len=768) == 5  # 48 tiles: two rounds, of 240
    # Beside many requests that are decoded, whose numbers have programs, too, as many or fewer.
    assert 1 < parts(requests=65, rows=576) <= 4
    assert parts(max_kv_len=512) == 1  # the merge would cost more
    assert parts(rows=4096, max_q_len=4096, max_kv_len=4096) == 1  # tiles fill the GPU
    assert parts(window=256) == 1
    assert parts(max_q_len=1 << 20) == 4  # a bound may be larger than what there is


def test_a_scale_of_zero_in_a_tensor() -> None:
    """All keys that a row sees weigh the same then, and hidden ones nothing: one prompt alone."""
    rows = 260
    cache = normal(2, -(-rows // 16), 16, 128, dtype=torch.float32).unsqueeze(3)
    k_cache, v_cache = cache.to(torch.float8_e4m3fn)
    start, length = torch.tensor([0, rows]).int(), torch.tensor([rows]).int()
    table = torch.arange(len(k_cache)).int()[None]
    zero, one = torch.zeros(1), torch.ones(1)
    out, lse = attention_paged(
        normal(1, 1, rows, 128)[0].transpose(0, 1), k_cache, v_cache,
        PagedBatch(start, length, table), causal=True, return_lse=True, engine="portable",
        k_scale=zero, v_scale=one,
    )  # fmt: skip
    seen = torch.arange(1, rows + 1)
    mean = v_cache.double().view(-1, 128)[:rows].cumsum(0) / seen[:, None]
    assert torch.allclose(out[:, 0].double(), mean, atol=2e-2, rtol=2e-2)
    assert torch.allclose(lse[0].double(), seen.double().log(), atol=1e-4)


#: What the kernel of prompts may lack; each is noticed.
BROKEN_PROMPTS = [
    ("outputs whose level moved", "out = scaled(out, fade, True)\n                else",
     "pass\n                else"),
    ("keys past the diagonal, hidden", "DIAGONAL or (not SPLIT", "(not SPLIT"),
    ("steps before the diagonal, once", "begin = hiding", "begin = 1"),
    ("a step that is done before both loops", "gl.maximum(low_block + count - mask_from, 1)",
     "(low_block + count - mask_from)"),
    ("steps before the diagonal, all", "stop = hiding", "stop = gl.minimum(hiding + 1, count)"),
]  # fmt: skip


#: The same of parts.
BROKEN_PARTS = [
    ("steps of the part alone", "hiding = gl.minimum(hiding, count)", "pass"),
    ("blocks before the part", "low_block += begin", "pass"),
    ("the log-sum-exp of a part", "level + gl.log2(sums))", "level)"),
    ("the part's own place", "(part * all_rows + row_start) * q_heads + head",
     "row_start * q_heads + head"),
    ("how many parts a row has", "gl.store(part_count + row_start + rows, parts",
     "gl.store(part_count + row_start + rows, parts - 1"),
]  # fmt: skip


#: The same of short prompts.
BROKEN_SHORT = [
    ("a wait for a free buffer of queries",
     "mbarrier.wait(q_empty.index(buffer), ((done // BUFFERS) & 1) ^ 1)", "pass"),
    ("a wait for queries", "mbarrier.wait(q_full.index(buffer), (done // BUFFERS) & 1)", "pass"),
    ("a buffer of its own", "buffer = done % BUFFERS * GROUPS + GROUP\n", "buffer = GROUP + 0\n"),
    ("a buffer that is freed", "mbarrier.arrive(q_empty.index(buffer))", "pass"),
    ("a wait for what others cleared", "BLOCK_N)\n            mbarrier.wait(clean",
     "BLOCK_N)\n            (clean"),
    ("a request's first number", "gl.where(each > 0, request * each,", "gl.where(each > 0, 0,"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after"), [x[1:] for x in BROKEN_SHORT], ids=[x[0] for x in BROKEN_SHORT]
)
def test_broken_turns_of_short_prompts_are_noticed(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_machine(
        monkeypatch, "hopper_ragged", gluon_machine.load("hopper_ragged", 0, (before, after))
    )
    with pytest.raises((AssertionError, gluon_machine.KernelError)):
        for dim in (64, 128):
            test_short_prompts_one_after_the_other(dim)


@pytest.mark.parametrize(
    ("before", "after"), [x[1:] for x in BROKEN_PARTS], ids=[x[0] for x in BROKEN_PARTS]
)
def test_broken_parts_are_noticed(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch, in_parts: Any
) -> None:
    run_on_machine(
        monkeypatch, "hopper_ragged", gluon_machine.load("hopper_ragged", 0, (before, after))
    )
    in_parts(32)
    with pytest.raises((AssertionError, gluon_machine.KernelError)):
        test_prompts_longer_than_the_diagonal(2.5, 128)


@pytest.mark.parametrize(
    ("before", "after"), [x[1:] for x in BROKEN_PROMPTS], ids=[x[0] for x in BROKEN_PROMPTS]
)
def test_a_broken_kernel_of_prompts_is_noticed(
    before: str, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_machine(
        monkeypatch, "hopper_ragged", gluon_machine.load("hopper_ragged", 0, (before, after))
    )
    with pytest.raises(AssertionError):
        test_prompts_longer_than_the_diagonal(2.5, 128)


#: What a kernel may lack, and what then is noticed: which test, and the machine's message or none.
BROKEN = [
    ("a wait for values", "mbarrier.wait(v_full.index(before), parity)", "pass", "dense", None),
    ("a wait for keys", "mbarrier.wait(k_full.index(stage), phase)\n"
     "                        if", "if", "dense", None),
    ("the next stage of a list", "stage = stage ^ 1", "stage = stage ^ 0", "votes", None),
    ("a phase that turns", "phase = phase ^ stage", "phase = phase ^ 0", "votes", None),
    ("a wait for a free stage", "mbarrier.wait(k_empty.index(stage), free)", "pass", "dense", None),
    ("the other phase", "free = ((step // STAGES) & 1) ^ 1", "free = (step // STAGES) & 1",
     "dense", "deadlock"),
    ("a stage that is never freed",
     "                        mbarrier.arrive(v_empty.index(before))\n", "", "dense", "deadlock"),
    ("a wait for a product", "scores = warpgroup_mma_wait(1, deps=[scores])", "pass", "dense",
     "before it was waited for"),
    ("a fence", "    fence_async_shared()\n", "", "dense", "without a fence"),
    ("a wait for the output's copy", "    tma.store_wait(0)\n    staged",
     "    staged", "dense", None),
    ("the rows of another warpgroup", "row = block_row + GROUP * 64", "row = block_row", "dense",
     None),
    ("a mask", "mask_from = kv_len // BLOCK_N\n    return", "mask_from = k_blocks\n    return",
     "dense", None),
    ("outputs whose level moved", "out = scaled(out, fade, True)", "pass", "rising", None),
    ("sums whose level moved", "faded(total, fade)) + here", "total) + here",
     "rising", None),
    ("the tile that is voted on", "bits, i - 1, c, threshold, PREDICATED",
     "bits, i, c, threshold, PREDICATED", "votes", None),
    ("a tile far below, which gets no bit", "@keep or.b32 $0, $0, $4;", "or.b32 $0, $0, $4;",
     "votes", None),
    ("a NaN, which keeps its tile", "setp.gtu.f32 keep, $2, $3;", "setp.gt.f32 keep, $2, $3;",
     "a NaN", None),
    ("the last tile of a list, masked", "hidden = gl.where(last_block >= mask_from, count - 1, -1)",
     "hidden = -1", "votes", None),
    ("inverses of rows past the end", "@inside mul.f32", "mul.f32", "weights of 128", None),
    ("tiles of other steps", "@mine mov.b32 $0, $4;", "mov.b32 $0, $4;", "weights of 128", None),
    ("sums that have grown, noticed", "setp.gt.or.f32 wanted, ${before}, ${due}, moved;",
     "setp.gt.or.f32 wanted, 0.0, 1.0, moved;", "first rows", None),
    ("sums of other rows that have grown",
     "setp.gt.or.f32 wanted, ${before + 2}, ${due + 2}, wanted;", "", "second rows", None),
    ("rows that are guarded", "setp.gt.f32 guarded, one, $8;", "setp.gt.f32 guarded, 0.0, 1.0;",
     "guard", None),
    ("the other row of a lane", "setp.gt.or.f32 guarded, two, $9, guarded;", "", "guard", None),
    ("tiles that are guarded when inverses are renewed", "@last mov.b32 ${kept}, bits;",
     "mov.b32 ${kept}, bits;", "guard of 128", None),
    ("the same in the last step", "gl.where(kept < _GUARDED, counts, kept)", "counts",
     "guard of 128", None),
    ("rows past the end, which guard nothing", 'gl.where(at < q_len, 0.0, float("inf"))',
     "gl.where(at < q_len, 0.0, 0.0)", "past the end", None),
    ("who was walked", "mbarrier.wait(walked.index(done & 1), (done >> 1) & 1)", "pass",
     "weights", None),
    ("where a row of the bitmap begins", "row_votes = votes + at * words", "row_votes = votes",
     "votes", None),
    ("rows past the end, which have no vote", "gl.where(rows < q_len, bits, 0)", "bits", "votes",
     None),
    ("the end of the launch before", "if LITE or AGAIN:\n            gdc_wait()", "if AGAIN:\n"
     "            gdc_wait()", "votes", "while the launch before may still run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("before", "after", "where", "message"), [x[1:] for x in BROKEN], ids=[x[0] for x in BROKEN]
)
def test_a_broken_kernel_is_noticed(
    before: str, after: str, where: str, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AssertionError, match=message):
        for seed in range(5):
            broken = gluon_machine.load("hopper", 100 * seed, (before, after))
            run_on_machine(monkeypatch, "hopper", broken)
            if where == "dense":
                check(450, 700, (2, 1), 64)
            elif where == "rising":
                test_rows_whose_scores_rise(2.5, 128, torch.bfloat16)
            elif where == "votes":
                test_votes_equal_the_oracle_bit_for_bit(True, False)
            elif where == "a NaN":
                test_votes_keep_tiles_that_scored_a_nan(64, TILE)
            elif where == "weights of 128":
                test_weights_and_choices(130, 33 * 128 + 5, (1, 1), False, 128)
            elif where == "guard":
                test_a_row_keeps_the_tile_that_it_looks_at(64, TILE)
            elif where == "guard of 128":
                test_weights_of_rows_whose_scores_rise(3.0)
            elif where == "past the end":
                test_rows_past_the_end_guard_no_tile(64)
            elif where in ("first rows", "second rows"):
                test_tiles_are_weighed_by_what_rows_have_seen_by_the_end_of_their_word(where[:-5])
            else:
                test_weights_and_choices(200, 1000, (4, 2), True, 64)
