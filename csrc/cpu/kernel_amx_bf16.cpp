// x86-64 with AMX-BF16 (and AVX-512-BF16): products on the tile unit.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernel.h"
#if defined(LITEATTENTION_SOFT_TILES)
#include "soft_tiles.h"
#endif

namespace liteattention::cpu::amx_bf16 {

#include "vec_avx512.h"
#include "gemm_amx.h"
#include "kernel_impl.h"
#include "decode_lanes.h"
#include "decode_impl.h"

extern const Kernel kBf16 = MakeKernel<GemmAmx, DType::kBf16>();
extern const DecodeKernel kDecodeBf16 = MakeDecode<GemmAmx, DType::kBf16>();

}  // namespace liteattention::cpu::amx_bf16
