"""Memory instructions against numpy."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from liteattention_emulator import snippet

from .memory_bench import (
    EVERY,
    LOADS,
    SOME,
    STORES,
    U32,
    active,
    checked,
    gather,
    kinds,
    loaded,
    registered,
    run,
    scatter,
    set_address,
    set_buffer,
    span,
    state,
    vmem,
)

__all__ = ["checked"]

MASKS = pytest.mark.parametrize("mask", [EVERY, SOME], ids=["every", "some"])
Array = np.ndarray[Any, Any]


def expect_rows(at: snippet.State, first: int, want: Array, before: Array, mask: int) -> None:
    lanes = active(mask)
    for row, values in enumerate(want):
        register = first + row
        np.testing.assert_array_equal(
            at.v(register), np.where(lanes, values, before[0, register]), err_msg=f"v{register}"
        )


def random_bytes(count: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def distinct(count: int, step: int, seed: int = 5) -> Array:
    """64 different multiples of step below count * step."""
    return np.random.default_rng(seed).permutation(count)[:64].astype(np.uint64) * np.uint64(step)


# ---- LDS


@MASKS
@pytest.mark.parametrize("kind", LOADS)
def test_lds_loads(kind: str, mask: int) -> None:
    at = state(mask, lds_bytes=4096)
    at.lds[:] = random_bytes(4096)
    step = 1 if LOADS[kind] > 4 else LOADS[kind]  # wide ones at any byte
    at.v(0)[:] = distinct(4000 // step - 30, step)
    before = at.vector.copy()
    run(f"ds_read_{kind} {span(4, LOADS[kind])}, v0 offset:{12 * step}", at)
    address = before[0, 0].astype(np.int64) + 12 * step
    expect_rows(at, 4, loaded(gather(at.lds, address, LOADS[kind]), kind), before, mask)


@MASKS
@pytest.mark.parametrize("kind", STORES)
def test_lds_stores(kind: str, mask: int) -> None:
    at = state(mask, lds_bytes=4096)
    at.lds[:] = random_bytes(4096)
    at.v(0)[:] = distinct(4096 // 16 - 2, 16)
    want = at.lds.copy()
    address = at.v(0).astype(np.int64) + 16
    scatter(want, address, at.vector[0, 4 : 4 + max(1, STORES[kind] // 4)], kind, active(mask))
    run(f"ds_write_{kind} v0, {span(4, STORES[kind])} offset:16", at)
    np.testing.assert_array_equal(at.lds, want)


@MASKS
@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("far", ["", "st64"])
def test_lds_pairs(bits: int, far: str, mask: int) -> None:
    size, scale = bits // 8, bits // 8 * (64 if far else 1)
    at = state(mask, lds_bytes=16384)
    at.lds[:] = random_bytes(16384)
    at.v(0)[:] = distinct(200, 16)
    before, lds = at.vector.copy(), at.lds.copy()
    run(f"ds_read2{far}_b{bits} {span(4, 2 * size)}, v0 offset0:3 offset1:1", at)
    raw = [gather(lds, before[0, 0].astype(np.int64) + n * scale, size) for n in (3, 1)]
    expect_rows(at, 4, loaded(np.hstack(raw), "b64"), before, mask)
    # The address register may be the destination.
    again = state(mask, lds_bytes=16384)
    again.lds[:], again.vector[:] = lds, before
    run(f"ds_read2{far}_b{bits} {span(0, 2 * size)}, v0 offset0:3 offset1:1", again)
    expect_rows(again, 0, loaded(np.hstack(raw), "b64"), before, mask)

    run(f"ds_write2{far}_b{bits} v0, {span(8, size)}, {span(12, size)} offset0:2 offset1:5", at)
    for n, first in ((2, 8), (5, 12)):
        rows = before[0, first : first + size // 4]
        address = before[0, 0].astype(np.int64) + n * scale
        scatter(lds, address, rows, f"b{bits}", active(mask))
    if far:  # 64 elements apart nothing overlaps
        np.testing.assert_array_equal(at.lds, lds)
    else:
        second = gather(at.lds, before[0, 0].astype(np.int64) + 5 * scale, size)
        np.testing.assert_array_equal(
            second[active(mask)],
            np.ascontiguousarray(before[0, 12 : 12 + size // 4].T).view(np.uint8)[active(mask)],
        )


def signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >> (bits - 1) else x


def as_float(x: int, bits: int) -> Any:
    return np.array([x], f"u{bits // 8}").view(f"f{bits // 8}")[0]


def of_float(x: Any, bits: int) -> int:
    return int(np.array([x], f"f{bits // 8}").view(f"u{bits // 8}")[0])


def pk_add(a: int, b: int, brain: bool) -> int:
    out = 0
    for shift in (0, 16):
        x, y = a >> shift & 0xFFFF, b >> shift & 0xFFFF
        if brain:
            total = as_float(x << 16, 32) + as_float(y << 16, 32)
            wide = of_float(total, 32)
            half = (wide + 0x7FFF + (wide >> 16 & 1)) >> 16
        else:
            half = of_float(
                np.float16(np.float32(as_float(x, 16)) + np.float32(as_float(y, 16))), 16
            )
        out |= half << shift
    return out


# memory, data, data1, bits -> memory
ATOMICS: dict[str, Callable[[int, int, int, int], int]] = {
    "add_u": lambda m, d, e, b: m + d,
    "sub_u": lambda m, d, e, b: m - d,
    "rsub_u": lambda m, d, e, b: d - m,
    "inc_u": lambda m, d, e, b: 0 if m >= d else m + 1,
    "dec_u": lambda m, d, e, b: d if m == 0 or m > d else m - 1,
    "min_i": lambda m, d, e, b: min(m, d, key=lambda x: signed(x, b)),
    "max_i": lambda m, d, e, b: max(m, d, key=lambda x: signed(x, b)),
    "min_u": lambda m, d, e, b: min(m, d),
    "max_u": lambda m, d, e, b: max(m, d),
    "and_b": lambda m, d, e, b: m & d,
    "or_b": lambda m, d, e, b: m | d,
    "xor_b": lambda m, d, e, b: m ^ d,
    "mskor_b": lambda m, d, e, b: m & ~d | e,
    "cmpst_b": lambda m, d, e, b: e if m == d else m,
    "cmpst_f": lambda m, d, e, b: e if as_float(m, b) == as_float(d, b) else m,
    "add_f": lambda m, d, e, b: of_float(as_float(m, b) + as_float(d, b), b),
    "min_f": lambda m, d, e, b: of_float(min(as_float(m, b), as_float(d, b)), b),
    "max_f": lambda m, d, e, b: of_float(max(as_float(m, b), as_float(d, b)), b),
}
TWO = ("mskor_b", "cmpst_b", "cmpst_f")


def plain_floats(rows: Array, bits: int) -> Array:
    """Registers with ordinary numbers in place of random bits: no NaN, sums exact enough."""
    numbers = np.random.default_rng(11).normal(size=rows.shape).astype("f4")
    out: Array = numbers.view(U32)
    if bits == 64:
        wide = np.random.default_rng(11).normal(size=rows.shape[1])
        out = np.ascontiguousarray(wide).view(U32).reshape(-1, 2).T.copy()
    return out


def apply_atomic(
    name: str,
    memory: Array,
    address: Array,
    data: list[int],
    data1: list[int],
    bits: int,
    mask: int,
) -> list[int]:
    """Change memory lane after lane; the old values."""
    old = [0] * 64
    view = memory.view(f"u{bits // 8}")
    for lane in np.flatnonzero(active(mask)):
        at = int(address[lane]) // (bits // 8)
        old[lane] = int(view[at])
        new = ATOMICS[name](old[lane], data[lane], data1[lane], bits)
        view[at] = new % (1 << bits)
    return old


def numbers(at: snippet.State, register: int, bits: int) -> list[int]:
    low = at.v(register).astype(np.uint64)
    if bits == 64:
        low = low | at.v(register + 1).astype(np.uint64) << np.uint64(32)
    return [int(x) for x in low]


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", ATOMICS)
def test_lds_atomics(name: str, bits: int) -> None:
    for mask, rtn in ((EVERY, "_rtn"), (SOME, "")):
        at = state(mask, lds_bytes=1024)
        at.lds[:] = random_bytes(1024)
        at.v(0)[:] = np.random.default_rng(2).integers(0, 32, 64) * 8  # lanes meet
        if name.endswith("_f"):
            at.vector[0, 4:8] = 0
            for first in (4, 6):
                at.vector[0, first : first + bits // 32] = plain_floats(at.vector[0, 4:5], bits)
            number = "f4" if bits == 32 else "f8"
            at.lds.view(number)[:] = np.random.default_rng(1).normal(size=1024 // (bits // 8))
        if name.startswith("cmpst"):  # half of them find what they expect
            view = at.lds.view(f"u{bits // 8}")
            for lane in range(0, 64, 2):
                value = int(view[int(at.v(0)[lane] + 256) // (bits // 8)])
                at.v(4)[lane] = value & 0xFFFFFFFF
                at.v(5)[lane] = value >> 32
        want = at.lds.copy()
        data = numbers(at, 4, bits)
        old = apply_atomic(
            name, want, at.v(0).astype(np.int64) + 256, data, numbers(at, 6, bits), bits, mask
        )
        before = at.vector.copy()
        stem, _, kind = name.partition("_")
        result = f"{span(10, bits // 8)}, " if rtn else ""
        second = f", {span(6, bits // 8)}" if name in TWO else ""
        code = f"ds_{stem}{rtn}_{kind}{bits} {result}v0, {span(4, bits // 8)}{second} offset:256"
        run(code, at)
        np.testing.assert_array_equal(at.lds, want)
        if rtn:
            rows = np.array(old, np.uint64).view(U32).reshape(64, 2).T[: bits // 32]
            expect_rows(at, 10, rows, before, mask)


def test_lds_rare_atomics() -> None:
    at = state(lds_bytes=2048)
    at.lds[:] = random_bytes(2048)
    at.v(0)[:] = np.arange(64) * 8
    words = at.lds.view(U32).copy()
    data, data1 = at.v(4).copy(), at.v(5).copy()
    before = words[0:128:2].astype(np.int64)
    run("ds_wrap_rtn_b32 v10, v0, v4, v5", at)
    d, e = data.astype(np.int64), data1.astype(np.int64)
    want = np.where(before >= d, before - d, before + e).astype(np.uint64).astype(U32)
    np.testing.assert_array_equal(at.lds.view(U32)[0:128:2], want)
    np.testing.assert_array_equal(at.v(10), before.astype(U32))

    for name, brain in (("f16", False), ("bf16", True)):
        rng = np.random.default_rng(4)
        for target in (at.lds.view(U32)[:128], at.v(4)):
            values = rng.normal(size=(target.size, 2))
            half = values.astype(np.float16).view(np.uint16)
            if brain:
                half = (values.astype("f4").view(U32) >> U32(16)).astype(np.uint16)
            target[:] = half.astype(U32) @ np.array([1, 1 << 16], U32)
        old = at.lds.view(U32)[0:128:2].copy()
        want = np.array(
            [pk_add(int(a), int(b), brain) for a, b in zip(old, at.v(4), strict=True)], U32
        )
        run(f"ds_pk_add_rtn_{name} v10, v0, v4", at)
        np.testing.assert_array_equal(at.lds.view(U32)[0:128:2], want)
        np.testing.assert_array_equal(at.v(10), old)

    old64 = at.lds.view(np.uint64)[:64].copy()
    data64 = numbers(at, 4, 64)
    run("ds_condxchg32_rtn_b64 v[10:11], v0, v[4:5]", at)
    for lane in range(64):
        value = int(old64[lane])
        for shift in (0, 32):
            if data64[lane] >> (shift + 31) & 1:
                low = data64[lane] >> shift & 0x7FFFFFFF
                value = value & ~(0xFFFFFFFF << shift) | low << shift
        assert int(at.lds.view(np.uint64)[lane]) == value


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("far", ["", "st64"])
def test_lds_exchanges(bits: int, far: str) -> None:
    size = bits // 8
    at = state(SOME, lds_bytes=32768)
    at.lds[:] = random_bytes(32768)
    at.v(0)[:] = np.arange(64) * (size if far else 2 * size)  # no lane meets another
    lds, before = at.lds.copy(), at.vector.copy()
    run(f"ds_wrxchg_rtn_b{bits} {span(10, size)}, v0, {span(4, size)} offset:8", at)
    address = before[0, 0].astype(np.int64)
    expect_rows(at, 10, loaded(gather(lds, address + 8, size), "b64"), before, SOME)
    scatter(lds, address + 8, before[0, 4 : 4 + size // 4], f"b{bits}", active(SOME))
    np.testing.assert_array_equal(at.lds, lds)
    # The result may overwrite the data.
    code = f"ds_wrxchg2{far}_rtn_b{bits} {span(4, 2 * size)}, v0, {span(4, size)}, {span(6, size)}"
    run(code + " offset0:1 offset1:0", at)
    scale = size * (64 if far else 1)
    raw = np.hstack([gather(lds, address + scale, size), gather(lds, address, size)])
    expect_rows(at, 4, loaded(raw, "b64"), before, SOME)
    for n, first in ((1, 4), (0, 6)):
        scatter(
            lds, address + n * scale, before[0, first : first + size // 4], f"b{bits}", active(SOME)
        )
    np.testing.assert_array_equal(at.lds, lds)


def swizzled(offset: int, lane: int) -> int:
    """The lane that ds_swizzle_b32 reads, after the manual's pseudo-code."""
    within, group = lane % 32, lane // 32 * 32
    if offset >= 0xE000:
        mask = offset & 31
        reverse = int(f"{within:05b}"[::-1], 2)
        return (reverse >> bin(mask).count("1")) | (within & mask) | group
    if offset >= 0xC000:
        mask, rotate = offset & 31, offset >> 5 & 31
        rotate = -rotate if offset >> 10 & 1 else rotate
        return (within & mask) | ((within + rotate) & ~mask & 31) | group
    if offset >> 15:
        return lane // 4 * 4 + (offset >> 2 * (lane % 4) & 3)
    return (((within & offset & 31) | offset >> 5 & 31) ^ (offset >> 10 & 31)) | group


@MASKS
@pytest.mark.parametrize(
    "offset",
    [0x801F, 0x041F, 0x3C1F, 0x0018, 0x001E, 0x80B1, 0x801B, 0xC020, 0xC4A3, 0xE000, 0xE01C],
)
def test_swizzle(offset: int, mask: int) -> None:
    at = state(mask)
    before = at.vector.copy()
    run(f"ds_swizzle_b32 v4, v5 offset:{offset}", at)
    source = np.array([swizzled(offset, lane) for lane in range(64)])
    want = np.where(active(mask)[source], before[0, 5][source], 0)
    expect_rows(at, 4, want[None], before, mask)


def test_swizzle_by_name() -> None:
    """LLVM's names for the patterns say which lanes meet."""
    lane = np.arange(64)
    for text, source in {
        "swizzle(SWAP,16)": lane ^ 16,
        "swizzle(REVERSE,8)": lane // 8 * 8 + 7 - lane % 8,
        "swizzle(BROADCAST,32,5)": lane // 32 * 32 + 5,
        "swizzle(QUAD_PERM,3,0,1,2)": lane // 4 * 4 + np.array([3, 0, 1, 2])[lane % 4],
    }.items():
        at = state()
        before = at.v(5).copy()
        run(f"ds_swizzle_b32 v4, v5 offset:{text}", at)
        np.testing.assert_array_equal(at.v(4), before[source], err_msg=text)


@MASKS
def test_permutes(mask: int) -> None:
    at = state(mask)
    lanes = active(mask)
    before = at.vector.copy()
    run("ds_bpermute_b32 v4, v0, v5 offset:8", at)
    source = (before[0, 0].astype(np.int64) + 8) // 4 % 64
    expect_rows(at, 4, np.where(lanes[source], before[0, 5][source], 0)[None], before, mask)

    at = state(mask)
    run("ds_permute_b32 v4, v0, v5 offset:8", at)
    want = np.zeros(64, U32)
    for lane in np.flatnonzero(lanes):
        want[source[lane]] = before[0, 5, lane]
    expect_rows(at, 4, want[None], before, mask)


def test_counters_of_lds_and_lane_addresses() -> None:
    at = state(SOME, lds_bytes=1024)
    at.scalar[0, snippet.M0] = 64
    at.lds[:] = random_bytes(1024)
    start = at.lds.view(U32).copy()
    count = bin(SOME).count("1")
    run("ds_append v4 offset:16\nds_consume v5 offset:32", at)
    assert set(at.v(4)[active(SOME)]) == {start[20]}
    assert set(at.v(5)[active(SOME)]) == {start[24]}
    assert at.lds.view(U32)[20] == (int(start[20]) + count) % (1 << 32)
    assert at.lds.view(U32)[24] == (int(start[24]) - count) % (1 << 32)
    before = at.vector.copy()
    run("ds_read_addtid_b32 v6 offset:128\nds_write_addtid_b32 v7 offset:512", at)
    expect_rows(at, 6, start[48:112][None], before, SOME)
    want = start.copy()
    want[20], want[24] = at.lds.view(U32)[20], at.lds.view(U32)[24]
    want[144:208][active(SOME)] = before[0, 7][active(SOME)]
    np.testing.assert_array_equal(at.lds.view(U32), want)


def test_beyond_lds() -> None:
    at = state(lds_bytes=256)
    at.lds[:] = random_bytes(256)
    at.v(0)[:] = np.arange(64) * 8
    before, lds = at.vector.copy(), at.lds.copy()
    assert kinds("ds_read_b64 v[4:5], v0\nds_write_b64 v0, v[8:9]", at) == ["LDS out of bounds"] * 2
    expect_rows(at, 4, loaded(gather(lds, before[0, 0], 8), "b64"), before, EVERY)
    scatter(lds, before[0, 0], before[0, 8:10], "b64", active(EVERY))
    np.testing.assert_array_equal(at.lds, lds)


# ---- global, flat, scratch


def aimed(base: Array, at: snippet.State, form: str, offsets: Array, immediate: int) -> str:
    """Set the address registers; the operands' text around "DATA"."""
    start = base.ctypes.data
    if form == "saddr":
        at.set_s64(8, start - immediate)
        at.v(0)[:] = offsets
        return f"v0, DATA, s[8:9] offset:{immediate}"
    set_address(at, 0, offsets + np.uint64(start - immediate))
    return f"v[0:1], DATA, off offset:{immediate}"


@MASKS
@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("form", ["pair", "saddr", "flat"])
def test_global_loads(kind: str, form: str, mask: int) -> None:
    memory = random_bytes(4096)
    at = state(mask)
    offsets = distinct(4000 // 4, 4) + np.uint64(3)
    immediate = 40 if form == "flat" else -4096
    address, _, rest = aimed(memory, at, form, offsets, immediate).partition(" DATA,")
    if form == "flat":
        rest = rest.replace(" off ", "")
    before = at.vector.copy()
    family = "flat" if form == "flat" else "global"
    code = (
        f"{family}_load_{vmem(kind)} {span(4, LOADS[kind])}, {address.rstrip(',')}"
        + ("" if form == "flat" else ",")
        + rest
    )
    run(code, at, memory)
    expect_rows(at, 4, loaded(gather(memory, offsets, LOADS[kind]), kind), before, mask)


@MASKS
@pytest.mark.parametrize("kind", STORES)
@pytest.mark.parametrize("form", ["pair", "saddr", "flat"])
def test_global_stores(kind: str, form: str, mask: int) -> None:
    memory = random_bytes(4096)
    at = state(mask)
    offsets = distinct(250, 16) + np.uint64(5)
    text = aimed(memory, at, form, offsets, 40 if form == "flat" else 4095)
    text = text.replace("DATA", span(4, STORES[kind]))
    if form == "flat":
        text = text.replace(", off ", " ")
    want = memory.copy()
    scatter(want, offsets, at.vector[0, 4:8], kind, active(mask))
    run(f"{'flat' if form == 'flat' else 'global'}_store_{vmem(kind)} {text}", at, memory)
    np.testing.assert_array_equal(memory, want)


VMEM_ATOMICS = {
    "add": "add_u", "sub": "sub_u", "smin": "min_i", "umin": "min_u", "smax": "max_i",
    "umax": "max_u", "and": "and_b", "or": "or_b", "xor": "xor_b", "inc": "inc_u", "dec": "dec_u",
    "swap": "", "cmpswap": "",
}  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("name", VMEM_ATOMICS)
@pytest.mark.parametrize("family", ["global", "flat", "buffer"])
def test_vmem_atomics(name: str, bits: int, family: str) -> None:
    size = bits // 8
    for mask, returned in ((EVERY, True), (SOME, False)):
        memory = random_bytes(1024)
        at = state(mask)
        offsets = np.random.default_rng(2).integers(0, 64, 64).astype(np.uint64) * np.uint64(8)
        view = memory.view(f"u{size}")
        if name == "cmpswap":
            for lane in range(0, 64, 2):
                value = int(view[int(offsets[lane]) // size])
                at.v(4 + size // 4)[lane] = value & 0xFFFFFFFF
                if bits == 64:
                    at.v(7)[lane] = value >> 32
        want = memory.copy()
        data, other = numbers(at, 4, bits), numbers(at, 4 + size // 4, bits)
        if name in ("swap", "cmpswap"):
            old = [0] * 64
            for lane in np.flatnonzero(active(mask)):
                where = int(offsets[lane]) // size
                old[lane] = int(want.view(f"u{size}")[where])
                if name == "swap" or old[lane] == other[lane]:
                    want.view(f"u{size}")[where] = data[lane]
        else:
            old = apply_atomic(VMEM_ATOMICS[name], want, offsets, data, data, bits, mask)
        values = span(4, size * (2 if name == "cmpswap" else 1))
        suffix = "_x2" if bits == 64 else ""
        sc0 = " sc0" if returned else ""
        first = 10
        if family == "buffer":
            set_buffer(at, 8, memory.ctypes.data, 1024)
            at.v(0)[:] = offsets
            code = f"buffer_atomic_{name}{suffix} {values}, v0, s[8:11], 0 offen{sc0}"
            first = 4
        else:
            set_address(at, 0, offsets + np.uint64(memory.ctypes.data))
            result = f"{span(10, size)}, " if returned else ""
            off = ", off" if family == "global" else ""
            code = f"{family}_atomic_{name}{suffix} {result}v[0:1], {values}{off}{sc0}"
        before = at.vector.copy()
        run(code, at, memory)
        np.testing.assert_array_equal(memory, want)
        rows = np.array(old, np.uint64).view(U32).reshape(64, 2).T[: size // 4]
        expect_rows(at, first, rows if returned else before[0, first : first + 1], before, mask)


FLOAT_ATOMICS = [
    (name, family)
    for name in ("add_f32", "add_f64", "min_f64", "max_f64", "pk_add_f16", "pk_add_bf16")
    for family in ("global", "flat", "buffer")
    if (name, family) != ("pk_add_bf16", "buffer")  # there is no such instruction
]


@pytest.mark.parametrize(("name", "family"), FLOAT_ATOMICS)
def test_vmem_float_atomics(name: str, family: str) -> None:
    bits = 64 if name.endswith("64") else 32
    size = bits // 8
    memory = np.zeros(1024, np.uint8)
    memory.view(f"f{size}")[:] = np.random.default_rng(6).normal(size=1024 // size)
    at = state()
    at.vector[0, 4 : 4 + size // 4] = plain_floats(at.vector[0, 4:5], bits)
    if name.startswith("pk"):
        bias = 0x3C003C00 if name.endswith("_f16") else 0x3F803F80
        at.v(4)[:] = (at.v(4) & U32(0x00FF00FF)) | U32(bias)
        memory.view(U32)[:] = (memory.view(U32) & U32(0x00FF00FF)) | U32(bias)
    offsets = np.random.default_rng(2).integers(0, 32, 64).astype(np.uint64) * np.uint64(8)
    want = memory.copy()
    data = numbers(at, 4, bits)
    if name.startswith("pk"):
        for lane in range(64):
            words = want.view(U32)
            where = int(offsets[lane]) // 4
            words[where] = pk_add(int(words[where]), data[lane], name.endswith("bf16"))
    else:
        apply_atomic(name.rstrip("0123456789"), want, offsets, data, data, bits, EVERY)
    with registered(memory):
        if family == "buffer":
            set_buffer(at, 8, memory.ctypes.data, 1024)
            at.v(0)[:] = offsets
            run(f"buffer_atomic_{name} {span(4, size)}, v0, s[8:11], 0 offen", at)
        else:
            set_address(at, 0, offsets + np.uint64(memory.ctypes.data))
            off = ", off" if family == "global" else ""
            run(f"{family}_atomic_{name} v[0:1], {span(4, size)}{off}", at)
    np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("kind", LOADS)
def test_flat_apertures(kind: str) -> None:
    """Lanes of one flat load in memory, in LDS and in private memory."""
    memory = random_bytes(1024, 1)
    at = state(lds_bytes=1024, scratch_bytes=64)
    at.lds[:] = random_bytes(1024, 2)
    lane = np.arange(64)
    offsets = lane.astype(np.uint64) % np.uint64(48)
    bases = np.array([memory.ctypes.data, 0, 0], np.uint64)
    # The windows' high halves are what the aperture registers say.
    run("s_mov_b64 s[8:9], src_shared_base\ns_mov_b64 s[10:11], src_private_base", at)
    bases[1:] = [at.s64(8), at.s64(10)]
    set_address(at, 0, bases[lane % 3] + offsets)
    words = random_bytes(64, 4).view(U32)
    code = "".join(
        f"v_mov_b32 v20, 0x{word:x}\nscratch_store_dword off, v20, off offset:{4 * n}\n"
        for n, word in enumerate(words)
    )
    before = at.vector.copy()
    code = f"{code}s_waitcnt vmcnt(0)\nflat_load_{vmem(kind)} {span(4, LOADS[kind])}, v[0:1]"
    run(code, at, memory)
    raw = np.stack(
        [gather(m, offsets, LOADS[kind]) for m in (memory, at.lds, words.view(np.uint8))]
    )
    expect_rows(at, 4, loaded(raw[lane % 3, lane], kind), before, EVERY)


def test_flat_stores_and_atomics_by_aperture() -> None:
    memory = random_bytes(1024, 1)
    at = state(SOME, lds_bytes=1024, scratch_bytes=16)
    at.lds[:] = random_bytes(1024, 2)
    lane = np.arange(64)
    run("s_mov_b64 s[8:9], src_shared_base\ns_mov_b64 s[10:11], src_private_base", at)
    bases = np.array([memory.ctypes.data, at.s64(8), at.s64(10)], np.uint64)
    offsets = np.where(lane % 3 == 2, 8, lane * 4).astype(np.uint64)
    set_address(at, 0, bases[lane % 3] + offsets)
    want = [memory.copy().view(U32), at.lds.copy().view(U32)]
    for n in np.flatnonzero(active(SOME)):
        if n % 3 < 2:
            want[n % 3][n] = (int(at.v(4)[n]) + int(at.v(5)[n])) % (1 << 32)
    before = at.vector.copy()
    code = (
        "flat_store_dword v[0:1], v4\nflat_atomic_add v[0:1], v5\n"
        "s_waitcnt vmcnt(0) lgkmcnt(0)\nflat_load_dword v6, v[0:1]"
    )
    run(code, at, memory)
    np.testing.assert_array_equal(memory.view(U32), want[0])
    np.testing.assert_array_equal(at.lds.view(U32), want[1])
    expect_rows(at, 6, (before[0, 4] + before[0, 5])[None], before, SOME)


@MASKS
@pytest.mark.parametrize("form", ["vector", "scalar", "both", "none"])
def test_scratch(form: str, mask: int) -> None:
    """Every width there and back; each lane has memory of its own."""
    at = state(mask, scratch_bytes=256)
    lanes = active(mask)
    at.v(0)[:] = np.arange(64) % 8 * 4 if form in ("vector", "both") else 0
    at.scalar[0, 8] = 32
    address = {"vector": "v0, DATA, off", "scalar": "off, DATA, s8", "both": "v0, DATA, s8"}
    text = address.get(form, "off, DATA, off") + " offset:64"
    back = text.replace("DATA, ", "")
    code = [
        f"scratch_store_dwordx4 {text.replace('DATA', 'v[4:7]')}",
        f"scratch_store_byte {text.replace('DATA', 'v8')}",
        f"scratch_store_short_d16_hi {text.replace('DATA', 'v9')[:-2]}70",
    ]
    before = at.vector.copy()
    raw = np.ascontiguousarray(before[0, 4:8].T).view(np.uint8).copy()
    raw[:, 0] = before[0, 8] & 0xFF
    raw[:, 6:8] = np.ascontiguousarray(before[0, 9]).view(np.uint8).reshape(64, 4)[:, 2:]
    for kind, first in (("b128", 10), ("u8", 14), ("i16", 15), ("b64", 16), ("u16_d16_hi", 18)):
        code.append(f"scratch_load_{vmem(kind)} {span(first, LOADS[kind])}, {back}")
    run("\n".join(code), at)
    for kind, first in (("b128", 10), ("u8", 14), ("i16", 15), ("b64", 16), ("u16_d16_hi", 18)):
        expect_rows(at, first, loaded(raw[:, : LOADS[kind]], kind), before, mask)
    assert lanes.any()


# ---- buffers


def buffer_offsets(at: snippet.State, records: int, immediate: int) -> Array:
    """Offsets in VGPRs that reach to both sides of the end."""
    offsets = (np.random.default_rng(9).integers(0, records // 4 + 8, 64) * 4).astype(np.uint64)
    offsets[5], offsets[6] = 0xFFFFFFFC, 0xFFFFFFF0
    at.v(0)[:] = offsets
    return offsets + np.uint64(immediate)


def by_dword(memory: Array, offsets: Array, size: int, limit: int) -> Array:
    """Bytes of a load whose dwords are checked one by one against limit."""
    raw = gather(memory, offsets, size)
    for at in range(0, size, min(size, 4)):
        end = offsets.astype(object) + at + min(size, 4)
        raw[np.array([e > limit for e in end]), at : at + 4] = 0
    return raw


@MASKS
@pytest.mark.parametrize("kind", LOADS)
def test_raw_buffer_loads(kind: str, mask: int) -> None:
    """soffset takes part in the range check: offset >= num_records - soffset is out."""
    memory = random_bytes(2048)
    at = state(mask)
    set_buffer(at, 8, memory.ctypes.data, 1000)
    at.scalar[0, 12] = 100
    offsets = buffer_offsets(at, 1000, 20)
    before = at.vector.copy()
    code = f"buffer_load_{vmem(kind)} {span(4, LOADS[kind])}, v0, s[8:11], s12 offen offset:20"
    run(code, at, memory)
    raw = by_dword(memory[100:], offsets, LOADS[kind], 900)
    expect_rows(at, 4, loaded(raw, kind), before, mask)
    assert (raw == 0).all(axis=1).any() and raw.any()


@MASKS
@pytest.mark.parametrize("kind", STORES)
def test_raw_buffer_stores(kind: str, mask: int) -> None:
    memory = random_bytes(4096)
    at = state(mask)
    set_buffer(at, 8, memory.ctypes.data + 1024, 1500)
    offsets = distinct(112, 16)
    at.v(0)[:] = offsets
    want = memory.copy()
    inside = want[1024 : 1024 + 1500]
    size = STORES[kind]
    for part in range(0, size, 4):  # a store may be cut off in its middle
        rows = at.vector[0, 4 + part // 4 : 5 + part // 4]
        scatter(
            inside, offsets + np.uint64(4 + part), rows, kind if size < 4 else "b32", active(mask)
        )
    run(f"buffer_store_{vmem(kind)} {span(4, size)}, v0, s[8:11], 4 offen", at, memory)
    np.testing.assert_array_equal(memory, want)


def test_buffer_without_offset_register() -> None:
    memory = random_bytes(64)
    at = state(SOME)
    set_buffer(at, 8, memory.ctypes.data, 64)
    before = at.vector.copy()
    run("buffer_load_dwordx2 v[4:5], off, s[8:11], 0 offset:56", at, memory)
    run("buffer_load_dwordx2 v[6:7], off, s[8:11], 0 offset:60", at, memory)
    raw = np.broadcast_to(memory[56:64], (64, 8))
    expect_rows(at, 4, loaded(raw, "b64"), before, SOME)
    cut = raw.copy()
    cut[:, :4], cut[:, 4:] = raw[:, 4:], 0
    expect_rows(at, 6, loaded(cut, "b64"), before, SOME)


@pytest.mark.parametrize("add_tid", [False, True])
@pytest.mark.parametrize("swizzle", [False, True])
@pytest.mark.parametrize("index_stride", [0, 2])
def test_structured_buffers(swizzle: bool, index_stride: int, add_tid: bool) -> None:
    """num_records counts records of stride bytes; swizzled ones interleave by dwords."""
    memory = random_bytes(1 << 16)
    at = state()
    stride, records, group = 24, 200, 8 << index_stride
    set_buffer(at, 8, memory.ctypes.data, records, stride, swizzle=swizzle,
               index_stride=index_stride, add_tid=add_tid)  # fmt: skip
    index = np.random.default_rng(1).integers(0, 220, 64)
    offset = np.random.default_rng(2).integers(0, 6, 64) * 4
    at.v(0)[:], at.v(1)[:] = index, offset
    at.scalar[0, 12] = 64
    before = at.vector.copy()
    run("buffer_load_dwordx2 v[4:5], v[0:1], s[8:11], s12 idxen offen offset:4", at, memory)
    want = np.zeros((2, 64), U32)
    for lane in range(64):
        record = int(index[lane]) + (lane if add_tid else 0)
        for part in range(2):
            within = int(offset[lane]) + 4 + 4 * part
            if record >= records or within + 4 > stride:
                continue
            if swizzle:
                place = (record // group * stride + within) * group + record % group * 4
            else:
                place = record * stride + within
            want[part, lane] = memory[64 + place : 68 + place].view(U32)[0]
    expect_rows(at, 4, want, before, EVERY)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_formatted_buffers_as_dwords(count: int) -> None:
    """Plain 32-bit components; out of range as a whole."""
    memory = random_bytes(2048)
    at = state()
    set_buffer(at, 8, memory.ctypes.data, 1000)
    offsets = (distinct(66, 16)).astype(np.uint64)
    at.v(0)[:] = offsets
    before, want = at.vector.copy(), memory.copy()
    letters = "xyzw"[:count]
    run(f"buffer_load_format_{letters} {span(4, 4 * count)}, v0, s[8:11], 0 offen", at, memory)
    run(f"buffer_store_format_{letters} {span(12, 4 * count)}, v0, s[8:11], 0 offen", at, memory)
    raw = gather(want, offsets, 4 * count)
    out = offsets + np.uint64(4 * count) > 1000
    raw[out] = 0
    expect_rows(at, 4, loaded(raw, "b128"), before, EVERY)
    for lane in np.flatnonzero(~out):
        begin = int(offsets[lane])
        data = np.ascontiguousarray(before[0, 12 : 12 + count, lane]).view(np.uint8)
        want[begin : begin + 4 * count] = data
    np.testing.assert_array_equal(memory, want)


@MASKS
@pytest.mark.parametrize("kind", ["u8", "i8", "u16", "i16", "b32"])
@pytest.mark.parametrize("family", ["buffer", "global"])
def test_loads_to_lds(kind: str, family: str, mask: int) -> None:
    """A dword a lane at M0 + instruction offset + 4 * lane; zeros from out of range."""
    memory = random_bytes(4096)
    at = state(mask, lds_bytes=2048)
    at.lds[:] = random_bytes(2048, 8)
    at.scalar[0, snippet.M0] = 0x5550200  # only the lower half counts
    offsets = distinct(260, 4)
    want = at.lds.copy()
    if family == "buffer":
        set_buffer(at, 8, memory.ctypes.data, 1024)
        at.v(0)[:] = offsets
        code = f"buffer_load_{vmem(kind)} v0, s[8:11], 0 offen offset:8 lds"
        rows = loaded(by_dword(memory, offsets + np.uint64(8), LOADS[kind], 1024), kind)
    else:
        set_address(at, 0, offsets + np.uint64(memory.ctypes.data))
        code = f"global_load_lds_{vmem(kind)} v[0:1], off offset:8"
        rows = loaded(gather(memory, offsets + np.uint64(8), LOADS[kind]), kind)
    scatter(want, 0x208 + 4 * np.arange(64), rows, "b32", active(mask))
    run(code, at, memory)
    np.testing.assert_array_equal(at.lds, want)


# ---- scalar memory


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_scalar_loads(count: int) -> None:
    memory = random_bytes(256)
    at = state()
    at.set_s64(4, memory.ctypes.data)
    at.scalar[0, 6] = 24
    to = "s16" if count == 1 else f"s[16:{15 + count}]"
    suffix = "" if count == 1 else f"x{count}"
    words = memory.view(U32)
    with registered(memory):
        for operand, first in (("0x14", 5), ("s6", 6), ("s6 offset:0x8", 8)):
            run(f"s_load_dword{suffix} {to}, s[4:5], {operand}", at)
            np.testing.assert_array_equal(
                at.scalar[0, 16 : 16 + count], words[first : first + count]
            )
        at.set_s64(4, memory.ctypes.data + 64)
        run(f"s_load_dword{suffix} {to}, s[4:5], -0x20", at)
        np.testing.assert_array_equal(at.scalar[0, 16 : 16 + count], words[8 : 8 + count])
        # 40 bytes of buffer: what lies beyond reads as zero
        set_buffer(at, 8, memory.ctypes.data, 40)
        run(f"s_buffer_load_dword{suffix} {to}, s[8:11], 0x10", at)
        want = np.where(np.arange(4, 4 + count) < 10, words[4 : 4 + count], 0)
        np.testing.assert_array_equal(at.scalar[0, 16 : 16 + count], want)


def test_clocks_run() -> None:
    at = state()
    run("s_memtime s[4:5]\ns_waitcnt lgkmcnt(0)\ns_memrealtime s[6:7]\ns_dcache_inv", at)
    assert at.s64(6) >= at.s64(4)


# ---- all variants, counters


@pytest.mark.usefixtures("variant")
def test_variants_agree() -> None:
    memory = random_bytes(4096)
    at = state(lds_bytes=4096)
    at.lds[:] = random_bytes(4096, 9)
    at.v(0)[:] = distinct(200, 16)
    set_buffer(at, 8, memory.ctypes.data, 4096)
    before, lds = at.vector.copy(), at.lds.copy()
    code = (
        "buffer_load_dwordx4 v[4:7], v0, s[8:11], 0 offen\n"
        "buffer_load_dwordx3 v[8:10], v0, s[8:11], 0 offen\n"
        "ds_read2_b64 v[12:15], v0 offset1:1\nds_read_b96 v[16:18], v0\n"
        "buffer_store_dwordx4 v[20:23], v0, s[8:11], 0 offen\n"
        "ds_write_b64 v0, v[24:25]"
    )
    run(code, at, memory)
    clean = random_bytes(4096)
    offsets = before[0, 0].astype(np.int64)
    expect_rows(at, 4, loaded(gather(clean, offsets, 16), "b128"), before, EVERY)
    expect_rows(at, 8, loaded(gather(clean, offsets, 12), "b96"), before, EVERY)
    expect_rows(at, 12, loaded(gather(lds, offsets, 16), "b128"), before, EVERY)
    expect_rows(at, 16, loaded(gather(lds, offsets, 12), "b96"), before, EVERY)
    scatter(clean, offsets, before[0, 20:24], "b128", active(EVERY))
    scatter(lds, offsets, before[0, 24:26], "b64", active(EVERY))
    np.testing.assert_array_equal(memory, clean)
    np.testing.assert_array_equal(at.lds, lds)


PHASES = {
    4: [range(32), range(32, 64)],
    8: [range(k, k + 16) for k in range(0, 64, 16)],
    "wide store": [range(k, k + 8) for k in range(0, 64, 8)],
    "wide load": [
        [*range(a, a + 4), *range(b, b + 4)]
        for a, b in ((0, 20), (4, 16), (8, 28), (12, 24), (32, 52), (36, 48), (40, 60), (44, 56))
    ],
}


def bank_cost(address: Array, size: int, write: bool) -> tuple[int, int]:
    """Phases and extra cycles of one LDS access: 32 banks of 4 bytes."""
    phases = PHASES[max(size, 4) if size <= 8 else "wide store" if write else "wide load"]
    extra = 0
    for lanes in phases:
        dwords = {int(address[lane]) // 4 + d for lane in lanes for d in range((size + 3) // 4)}
        banks = [dword % 32 for dword in dwords]
        extra += max(banks.count(bank) for bank in set(banks)) - 1
    return len(phases), extra


@pytest.mark.parametrize("code, size, write, parts", [
    ("ds_read_b32 v4, v0", 4, False, (0,)),
    ("ds_read_u16 v4, v0", 2, False, (0,)),
    ("ds_read_b64 v[4:5], v0", 8, False, (0,)),
    ("ds_read_b128 v[4:7], v0", 16, False, (0,)),
    ("ds_read2_b64 v[4:7], v0 offset0:1 offset1:6", 8, False, (8, 48)),
    ("ds_write_b128 v0, v[4:7]", 16, True, (0,)),
    ("ds_write2_b32 v0, v4, v5 offset1:33", 4, True, (0, 132)),
])  # fmt: skip
def test_bank_conflicts(code: str, size: int, write: bool, parts: tuple[int, ...]) -> None:
    lane = np.arange(64)
    patterns = {
        "contiguous": lane * size,
        "same": lane * 0,
        "rows of 128 bytes": lane * 128,
        "rows of 144 bytes": lane * 144,
        "columns": lane % 16 * 256 + lane // 16 * 16,
        "random": np.random.default_rng(0).integers(0, 500, 64) * 16,
    }
    for name, address in patterns.items():
        at = state(lds_bytes=65536)
        at.v(0)[:] = address
        row = run(code, at)["executed"][0]
        costs = [bank_cost(address + part, size, write) for part in parts]
        assert tuple(row[4:6]) == tuple(map(sum, zip(*costs, strict=True))), name
        if name == "contiguous" and size != 2:
            assert row[5] == 0


def test_bytes_and_lines() -> None:
    memory = random_bytes(8192 + 128)
    begin = -memory.ctypes.data % 128
    at = state(lds_bytes=4096, scratch_bytes=16)
    at.set_s64(8, memory.ctypes.data + begin)
    at.v(0)[:], at.v(1)[:], at.v(2)[:] = np.arange(64) * 16, np.arange(64)[::-1] * 128, 100
    code = (
        "global_load_dwordx4 v[4:7], v0, s[8:9]\n"
        "global_load_dword v8, v1, s[8:9]\n"
        "global_load_ushort v9, v2, s[8:9]\n"
        "global_store_dwordx2 v0, v[10:11], s[8:9] offset:124\n"
        "s_load_dwordx2 s[4:5], s[8:9], 0\n"
        "scratch_store_dword off, v12, off\n"
        "ds_read_b64 v[14:15], v0"
    )
    counters = run(code, at, memory)["counters"]
    assert counters["global_load_bytes"] == 64 * (16 + 4 + 2)
    assert counters["global_store_bytes"] == 64 * 8
    # Contiguous, a line a lane, all at one place, and nine because the last ones straddle.
    assert counters["vmem_lines"] == 8 + 64 + 1 + 9
    # 1 KiB; a piece in each of 64 lines, 8 of them in it; one piece that is among them
    assert counters["distinct_load_bytes"] == 1024 + 64 * 56
    assert counters["smem_bytes"] == 8
    assert counters["scratch_bytes"] == 256
    assert counters["lds_bytes"] == 512
