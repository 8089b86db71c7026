from typing import ClassVar

CPU_K_BLOCK: int
CPU_ROW_STEP: int
CPU_MAX_Q_BLOCK: int
CPU_MAX_VOTE_ROWS: int
CPU_MAX_HEAD_DIM: int

class DType:
    bf16: ClassVar[DType]
    fp16: ClassVar[DType]
    fp32: ClassVar[DType]

class Rounding:
    rtne: ClassVar[Rounding]
    rtna: ClassVar[Rounding]
    rtz: ClassVar[Rounding]

class AttentionParams:
    dtype: DType
    rounding: Rounding
    scale: float
    causal: bool
    threads: int
    def set_pointers(self, q: int, k: int, v: int, out: int, lse: int) -> None: ...
    def set_shape(
        self, batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, head_dim: int
    ) -> None: ...
    def set_strides(
        self,
        q: tuple[int, int, int],
        k: tuple[int, int, int],
        v: tuple[int, int, int],
        out: tuple[int, int, int],
    ) -> None: ...

class LiteParams:
    q_block: int
    vote_rows: int
    threshold: float
    descending: bool
    soft_skip: bool
    def set_bitmaps(self, read: int, write: int, must_do: int, must_skip: int) -> None: ...

def cpu_available_isas() -> list[str]: ...
def cpu_attention(params: AttentionParams, lite: LiteParams | None, isa: str) -> None: ...

GFX942_Q_BLOCK: int
GFX942_K_BLOCK: int
GFX942_WAVE_ROWS: int
GFX942_COMPUTE_UNITS: int
GFX942_MAX_LITE_KEYS: int
TAIL_MIN_GAIN: float
TAIL_NEARLY_FULL: float

class HipUnavailable(RuntimeError): ...
class HipError(RuntimeError): ...

class HipLibrary:
    def __init__(self, path: str) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def emulated(self) -> bool: ...
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
    def transpose_grid(self) -> int: ...
    @property
    def lpt_grid(self) -> int: ...
    @property
    def lite_grid(self) -> int: ...
    @property
    def v_t_offset(self) -> int: ...
    @property
    def order_offset(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...

def lite_reasons(shape: DenseShape) -> list[str]: ...
def plan_lite(shape: DenseShape) -> LitePlan: ...
def dense_reasons(shape: DenseShape) -> list[str]: ...
def plan_dense(shape: DenseShape, compute_units: int, splits: int) -> DensePlan: ...
def tail_cost(
    tail_tiles: int, splits: int, k_blocks: int, head_dim: int, compute_units: int
) -> float: ...

class Number:
    bf16_rtne: ClassVar[Number]
    bf16_rtna: ClassVar[Number]
    bf16_rtz: ClassVar[Number]
    fp16: ClassVar[Number]

class DenseRequest:
    scale: float
    number: Number
    def set_pointers(self, q: int, k: int, v: int, out: int, lse: int) -> None: ...
    def set_strides(
        self,
        q: tuple[int, int, int],
        k: tuple[int, int, int],
        v: tuple[int, int, int],
        out: tuple[int, int, int],
    ) -> None: ...

class LiteStep:
    threshold: float
    descending: bool
    soft_skip: bool
    def set_bitmaps(self, read: int, write: int, must_do: int, must_skip: int) -> None: ...

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
    def attention(
        self, plan: DensePlan, request: DenseRequest, workspace: int, stream: int
    ) -> None: ...
    def lite(
        self, plan: LitePlan, request: DenseRequest, step: LiteStep, workspace: int, stream: int
    ) -> None: ...
    def plan_lpt(
        self,
        skip: int,
        must_do: int,
        must_skip: int,
        order: int,
        rows: int,
        q_blocks: int,
        words: int,
        stream: int,
    ) -> None: ...
