// Which kernel serves which path and dtype.

#include "kernel.h"

namespace liteattention::cpu {

namespace portable {
extern const Kernel kBf16, kFp16, kFp32;
}
#if defined(LITEATTENTION_X86)
namespace avx2 {
extern const Kernel kBf16, kFp16, kFp32;
}
namespace avx512 {
extern const Kernel kBf16, kFp16, kFp32;
}
namespace avx512_bf16 {
extern const Kernel kBf16;
}
namespace amx_bf16 {
extern const Kernel kBf16;
}
#endif

namespace {

const Kernel& ByType(DType dtype, const Kernel& bf16, const Kernel& fp16, const Kernel& fp32) {
    return dtype == DType::kBf16 ? bf16 : dtype == DType::kFp16 ? fp16 : fp32;
}

}  // namespace

const Kernel& SelectKernel(Isa isa, DType dtype) {
    switch (isa) {
#if defined(LITEATTENTION_X86)
        case Isa::kAmxBf16:
            return ByType(dtype, amx_bf16::kBf16, avx512::kFp16, avx512::kFp32);
        case Isa::kAvx512Bf16:
            return ByType(dtype, avx512_bf16::kBf16, avx512::kFp16, avx512::kFp32);
        case Isa::kAvx512:
            return ByType(dtype, avx512::kBf16, avx512::kFp16, avx512::kFp32);
        case Isa::kAvx2:
            return ByType(dtype, avx2::kBf16, avx2::kFp16, avx2::kFp32);
#endif
        default:
            return ByType(dtype, portable::kBf16, portable::kFp16, portable::kFp32);
    }
}

}  // namespace liteattention::cpu
