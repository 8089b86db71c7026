from collections.abc import Callable
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch

_Pair = tuple[int, int]
_Triple = tuple[int, int, int]

CPU_K_BLOCK: int
CPU_ROW_STEP: int
CPU_MAX_Q_BLOCK: int
CPU_MAX_VOTE_ROWS: int
CPU_MAX_HEAD_DIM: int
CPU_ROW_GUARD: float

class DType:
    bf16: ClassVar[DType]
    fp16: ClassVar[DType]
    fp32: ClassVar[DType]

class Rounding:
    rtne: ClassVar[Rounding]
    rtna: ClassVar[Rounding]
    rtz: ClassVar[Rounding]

class CpuAttention:
    def __init__(
        self,
        heads: _Triple,
        sizes: tuple[int, int, int, int],
        q_strides: _Triple,
        k_strides: _Triple,
        v_strides: _Triple,
        out_strides: _Triple,
        dtype: DType,
        rounding: Rounding,
        scale: float,
        causal: bool,
        isa: str,
        threads: Callable[[], int],
    ) -> None: ...
    def skip(
        self,
        q_block: int,
        vote_rows: int,
        threshold: float,
        descending: bool,
        soft_skip: bool,
        budget: float,
    ) -> None: ...
    def __call__(self, tensors: tuple[torch.Tensor | None, ...]) -> None: ...

def count_bits(words: int, count: int) -> int: ...
def cpu_available_isas() -> list[str]: ...

class CpuKvType:
    same: ClassVar[CpuKvType]
    fp8_e4m3: ClassVar[CpuKvType]
    fp8_e5m2: ClassVar[CpuKvType]
    fp8_e4m3fnuz: ClassVar[CpuKvType]
    fp8_e5m2fnuz: ClassVar[CpuKvType]

class CpuRaggedShape:
    def __init__(
        self,
        requests: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int,
        page_size: int,
        dtype: DType,
        kv_type: CpuKvType,
        rounding: Rounding,
        scale: float,
        v_scale: float,
        soft_cap: float,
        lookahead: int | None,
        window: int,
    ) -> None: ...

def lengths_hold(
    q_start: int, kv_len: int, requests: int, max_q_len: int, max_kv_len: int
) -> bool: ...
def pages_hold(
    q_start: int,
    kv_len: int,
    table: int,
    requests: int,
    width: int,
    stride: int,
    rows: int,
    pages: int,
    page_size: int,
) -> bool: ...

class CpuSeenBatch:
    def __init__(
        self, q_start: int, kv_len: int, requests: int, width: int, stride: int
    ) -> None: ...
    def same_lengths(self, q_start: int, kv_len: int) -> bool: ...
    def check(
        self, q_start: int, kv_len: int, table: int, rows: int, pages: int, page_size: int
    ) -> Callable[[], bool]: ...

class CpuRaggedPlan:
    def __init__(
        self,
        shape: CpuRaggedShape,
        q_start: int,
        kv: int,
        page_table: int,
        table_stride: int,
        isa: str,
    ) -> None: ...
    @property
    def tiles(self) -> int: ...
    @property
    def parts(self) -> int: ...

class CpuRaggedRun:
    def __init__(
        self,
        plan: CpuRaggedPlan,
        q_strides: _Triple,
        k_strides: _Triple,
        v_strides: _Triple,
        out_strides: _Triple,
        lse_head: int,
        threads: Callable[[], int],
    ) -> None: ...
    def __call__(self, tensors: tuple[torch.Tensor | None, ...]) -> None: ...

class CpuKvWrite:
    def __init__(
        self,
        shape: _Triple,
        k_strides: _Triple,
        v_strides: _Triple,
        pages: int,
        page_size: int,
        k_cache_strides: _Triple,
        v_cache_strides: _Triple,
        wide_slots: bool,
        dtype: DType,
        kv_type: CpuKvType,
        k_scale: float,
        v_scale: float,
    ) -> None: ...
    def run(self, k: int, v: int, k_cache: int, v_cache: int, slots: int, threads: int) -> int: ...

GFX942_Q_BLOCK: int
GFX942_K_BLOCK: int
GFX942_WAVE_ROWS: int
GFX942_COMPUTE_UNITS: int
GFX942_ROW_GUARD: float
TAIL_MIN_GAIN: float
TAIL_NEARLY_FULL: float
MODELLED_GIGAHERTZ: float

class HipUnavailable(RuntimeError): ...
class HipError(RuntimeError): ...

class HipLibrary:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
    # These three of the software MI300X alone.
    def current_stream(self, device: int) -> int: ...
    def capturing(self) -> bool: ...
    def graph_memory(self, stream: int, size: int, contents: int = 0) -> int: ...
    def device_count(self) -> int: ...
    def version(self) -> str: ...

class DenseShape:
    def __init__(
        self, batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int
    ) -> None: ...

class Split:
    pays: ClassVar[Split]
    even: ClassVar[Split]
    nearly_full: ClassVar[Split]
    too_short: ClassVar[Split]
    forced: ClassVar[Split]
    @property
    def name(self) -> str: ...

class Mapping:
    swizzled_head_first: ClassVar[Mapping]
    naive_head_first: ClassVar[Mapping]
    swizzled_block_first: ClassVar[Mapping]
    naive_block_first: ClassVar[Mapping]
    @property
    def name(self) -> str: ...

class DensePlan:
    @property
    def split(self) -> Split: ...
    @property
    def mapping(self) -> Mapping: ...
    @property
    def modelled_us(self) -> float: ...
    @property
    def modelled_unsplit_us(self) -> float: ...
    @property
    def whole_tiles(self) -> int: ...
    @property
    def tail_tiles(self) -> int: ...
    @property
    def splits(self) -> int: ...
    @property
    def transpose_grid(self) -> int: ...
    @property
    def dense_grid(self) -> int: ...
    @property
    def merge_grid(self) -> int: ...
    @property
    def v_t_offset(self) -> int: ...
    @property
    def part_out_offset(self) -> int: ...
    @property
    def part_stats_offset(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

class LitePlan:
    @property
    def tiles(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def together(self) -> int: ...
    @property
    def transpose_grid(self) -> int: ...
    @property
    def count_grid(self) -> int: ...
    @property
    def packs(self) -> bool: ...
    @property
    def cuts(self) -> bool: ...
    @property
    def lpt_grid(self) -> int: ...
    @property
    def lite_grid(self) -> int: ...
    @property
    def merge_grid(self) -> int: ...
    @property
    def select_grid(self) -> int: ...
    @property
    def v_t_offset(self) -> int: ...
    @property
    def order_offset(self) -> int: ...
    @property
    def order_bytes(self) -> int: ...
    @property
    def counts_offset(self) -> int: ...
    @property
    def counts_bytes(self) -> int: ...
    @property
    def weights_offset(self) -> int: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def parts_offset(self) -> int: ...
    @property
    def parts_bytes(self) -> int: ...
    @property
    def cuts_offset(self) -> int: ...
    @property
    def cuts_bytes(self) -> int: ...
    @property
    def part_out_offset(self) -> int: ...
    @property
    def part_stats_offset(self) -> int: ...
    @property
    def part_weights_offset(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

def plan_lite(
    shape: DenseShape, compute_units: int, weighs: bool = False, cuts: bool = True
) -> LitePlan: ...
def tiles_of(mapping: Mapping, rows: int, q_blocks: int, count: int) -> npt.NDArray[np.uint32]: ...
def dense_reasons(shape: DenseShape) -> list[str]: ...
def plan_dense(shape: DenseShape, compute_units: int, splits: int) -> DensePlan: ...
def tail_cost(
    tail_tiles: int, splits: int, k_blocks: int, head_dim: int, compute_units: int
) -> float: ...

class RaggedShape:
    def __init__(
        self,
        requests: int,
        rows: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        page_size: int,
        max_q_len: int,
        max_kv_len: int,
        min_q_len: int = 0,
        window: int = 0,
        fp8: bool = False,
        lookahead: int | None = 0,
    ) -> None: ...

class RaggedStage:
    @property
    def split(self) -> Split: ...
    @property
    def splits(self) -> int: ...
    @property
    def grid(self) -> int: ...
    @property
    def merge_grid(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def out_offset(self) -> int: ...
    @property
    def stats_offset(self) -> int: ...
    @property
    def modelled_us(self) -> float: ...
    @property
    def modelled_unsplit_us(self) -> float: ...

class RaggedPlan:
    @property
    def decode(self) -> RaggedStage: ...
    @property
    def prefill(self) -> RaggedStage: ...
    @property
    def prefill_room(self) -> int: ...
    @property
    def prefill_blocks(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> float: ...

DECODE_MOST_SPLITS: int
PREFILL_MOST_SPLITS: int
DECODE_ROWS: int

def ragged_reasons(shape: RaggedShape) -> list[str]: ...
def plan_ragged(shape: RaggedShape, compute_units: int, splits: int) -> RaggedPlan: ...
def decode_cost(shape: RaggedShape, splits: int, compute_units: int) -> float: ...
def decode_work(
    q_len: int, kv_len: int, window: int, splits: int, head_dim: int
) -> tuple[int, int, int]: ...
def prefill_cost(shape: RaggedShape, splits: int, compute_units: int) -> float: ...
def prefill_splits(tiles: int, room: int, splits: int) -> int: ...
def prefill_parts(blocks: int, part_blocks: int, splits: int) -> int: ...
def is_decode(q_len: int, group: int) -> bool: ...

class Number:
    bf16_rtne: ClassVar[Number]
    bf16_rtna: ClassVar[Number]
    bf16_rtz: ClassVar[Number]
    fp16: ClassVar[Number]

class DenseLaunch:
    scale: float
    number: Number
    def set_strides(self, q: _Triple, k: _Triple, v: _Triple, out: _Triple) -> None: ...

class LiteLaunch:
    threshold: float
    budget: float
    descending: bool
    soft_skip: bool

class RaggedLaunch:
    pages: int
    page_rows: int
    table_width: int
    table_stride: int
    scale: float
    k_scale: float
    v_scale: float
    soft_cap: float
    number: Number
    def set_strides(self, q: _Pair, k: _Triple, v: _Triple, out: _Pair) -> None: ...

class WriteLaunch:
    wide: bool
    def set_fp8(self, number: Number, k_scale: float, v_scale: float) -> None: ...
    def set_strides(self, k: _Pair, v: _Pair, k_cache: _Triple, v_cache: _Triple) -> None: ...
    def set_shape(
        self, rows: int, kv_heads: int, head_dim: int, pages: int, page_size: int
    ) -> None: ...

class Gfx942Device:
    def __init__(
        self,
        library: HipLibrary,
        ordinal: int,
        objects: list[tuple[str, bytes, list[tuple[str, int]]]],
    ) -> None: ...
    @property
    def ordinal(self) -> int: ...
    @property
    def compute_units(self) -> int: ...
    # The integers after plan and launch are the addresses of the tensors, in the order of the
    # tuples of liteattention_rocm.contract (without the tally), of the workspace, and the stream's
    # handle.
    def attention(self, plan: DensePlan, launch: DenseLaunch, *addresses: int) -> None: ...
    def lite(
        self, plan: LitePlan, launch: DenseLaunch, step: LiteLaunch, *addresses: int
    ) -> None: ...
    def ragged(self, plan: RaggedPlan, launch: RaggedLaunch, *addresses: int) -> None: ...
    def write_kv(self, launch: WriteLaunch, *addresses: int) -> None: ...
    def plan_lpt(
        self,
        plan: LitePlan,
        read: int,
        must_do: int,
        must_skip: int,
        order: int,
        counts: int,
        stream: int,
        parts: int = 0,
        cuts: int = 0,
    ) -> None: ...

class CudaKernel:
    def __call__(
        self, stream: int, tensors: tuple[torch.Tensor, ...], addresses: tuple[int, ...]
    ) -> bool: ...

def cuda_kernel(
    function: int,
    grid: tuple[int, ...],
    threads: int,
    shared_bytes: int,
    early: bool,
    parameters: list[bytes | tuple[object, ...] | None],
) -> CudaKernel | None: ...
