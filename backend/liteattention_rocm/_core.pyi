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
