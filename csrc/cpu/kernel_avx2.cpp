// x86-64 with AVX2, FMA and F16C: fp32 arithmetic for every dtype.
#include <immintrin.h>

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernel.h"

namespace liteattention::cpu::avx2 {

#include "vec_avx2.h"
#include "gemm_lanes.h"
#include "kernel_impl.h"
#include "decode_lanes.h"
#include "decode_impl.h"

extern const Kernel kBf16 = MakeKernel<GemmLanes<OpFp32>, DType::kBf16>();
extern const Kernel kFp16 = MakeKernel<GemmLanes<OpFp32>, DType::kFp16>();
extern const Kernel kFp32 = MakeKernel<GemmLanes<OpFp32>, DType::kFp32>();
extern const DecodeKernel kDecodeBf16 = MakeDecode<GemmLanes<OpFp32>, DType::kBf16>();
extern const DecodeKernel kDecodeFp16 = MakeDecode<GemmLanes<OpFp32>, DType::kFp16>();
extern const DecodeKernel kDecodeFp32 = MakeDecode<GemmLanes<OpFp32>, DType::kFp32>();

}  // namespace liteattention::cpu::avx2
