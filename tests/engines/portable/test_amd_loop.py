"""The portable kernels' loops on AMD GPUs: how they are counted, and that nothing in them grows."""

import pytest
import torch

from liteattention_tools import amdgcn

_METADATA = "\n".join(f"    .{name}: {i}" for i, name in enumerate(amdgcn._FIELDS))
_SAMPLE = f"""
kernel:
\ts_load_dword s0, s[4:5], 0x0
.LBB0_1:
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
.LBB0_2:                                ; %inner
\tds_read_b128 v[0:3], v4
\ts_waitcnt lgkmcnt(0)
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\tv_mfma_f32_32x32x8_bf16 a[0:15], v[0:1], v[2:3], a[0:15]
\tv_exp_f32_e32 v5, v5
\tv_max3_f32 v5, v5, v6, v7
\ts_cbranch_scc1 .LBB0_2
\ts_cbranch_vccnz .LBB0_1
.LBB0_3:
\tscratch_store_dword off, v5, off
\ts_cbranch_scc0 .LBB0_3
\ts_endpgm
{_METADATA}
"""


def test_the_loop_with_most_products_and_none_around_it_is_counted() -> None:
    code = amdgcn.read(_SAMPLE, lds=64)
    counted = {name: n for name, n in code.loop.items() if n}
    assert counted == {"MFMA": 2, "exp2": 1, "max": 1, "SALU": 2, "LDS": 1}
    assert code.lds == 64 and code.fields["agpr_count"] == 1
    with pytest.raises(ValueError, match="no loop has matrix instructions"):
        amdgcn.read(_SAMPLE.replace("v_mfma", "v_fma"), lds=0)
    with pytest.raises(ValueError, match=r"no \.sgpr_count"):
        amdgcn.read(_SAMPLE.replace(".sgpr_count", ".count"), lds=0)


#: Bytes of local memory that a workgroup may have.
LDS = {"gfx942": 64 << 10, "gfx950": 160 << 10}
#: Matrix instructions of a round, and all, by kernel: the most that Triton 3.6 or 3.9 makes of the
#: shipped tiles.
ROUND = {
    "gfx942": {"dense 128": (48, 537), "lite 128, votes": (48, 932), "decode 128": (48, 804)},
    "gfx950": {"dense 128": (24, 340), "lite 128, votes": (24, 570), "decode 128": (24, 554)},
}
for most in ROUND.values():
    most["mixed 128"] = most["decode 128"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "triton"))


@pytest.mark.parametrize("target", ROUND)
@pytest.mark.parametrize("name", ["dense 128", "lite 128, votes", "decode 128", "mixed 128"])
def test_no_loop_grows_or_spills(name: str, target: str) -> None:
    code = amdgcn.count(*amdgcn.shipped()[name], target)
    products, most = ROUND[target][name]
    assert code.loop["MFMA"] == products and sum(code.loop.values()) <= 1.05 * most
    assert code.fields["vgpr_spill_count"] == 0 and code.loop["scratch"] == 0
    assert code.lds <= LDS[target]


def test_blocks_of_128_keys_fit_into_the_local_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stages of an H200 they take 96 KB, and the launch would fail."""
    monkeypatch.setattr(torch.version, "hip", "as on an AMD GPU")
    bound = amdgcn.lite(128, 0.0, keys=128)
    assert amdgcn.count(amdgcn.kernels.attention, bound, "gfx942").lds <= 64 << 10


@pytest.mark.parametrize("budget", [0.0, 0.1])
@pytest.mark.parametrize("keys", [64, 128])
def test_q_blocks_of_192_rows_fit_and_spill_nothing_in_their_loop(
    keys: int, budget: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the 16 warps of an NVIDIA GPU they take 96 KB for 128 keys.

    Two registers may wait in memory while a walk's loop runs, which they are no part of.
    """
    monkeypatch.setattr(torch.version, "hip", "as on an AMD GPU")
    code = amdgcn.count(amdgcn.kernels.attention, amdgcn.lite(64, budget, keys, 192), "gfx942")
    assert code.lds <= 64 << 10
    assert code.fields["vgpr_spill_count"] <= 2 and code.loop["scratch"] == 0
