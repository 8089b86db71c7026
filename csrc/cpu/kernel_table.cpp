// Which kernel serves which path and dtype.

#include "kernel.h"

namespace liteattention::cpu {

namespace portable {
extern const Kernel kBf16, kFp16, kFp32;
extern const DecodeKernel kDecodeBf16, kDecodeFp16, kDecodeFp32;
}  // namespace portable
#if defined(LITEATTENTION_X86)
namespace avx2 {
extern const Kernel kBf16, kFp16, kFp32;
extern const DecodeKernel kDecodeBf16, kDecodeFp16, kDecodeFp32;
}  // namespace avx2
namespace avx512 {
extern const Kernel kBf16, kFp16, kFp32;
extern const DecodeKernel kDecodeBf16, kDecodeFp16, kDecodeFp32;
}  // namespace avx512
namespace avx512_bf16 {
extern const Kernel kBf16;
extern const DecodeKernel kDecodeBf16;
}  // namespace avx512_bf16
namespace amx_bf16 {
extern const Kernel kBf16;
extern const DecodeKernel kDecodeBf16;
}  // namespace amx_bf16
#endif

namespace {

template <class T>
const T& ByType(DType dtype, const T& bf16, const T& fp16, const T& fp32) {
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

const DecodeKernel& SelectDecode(Isa isa, DType dtype) {
    switch (isa) {
#if defined(LITEATTENTION_X86)
        case Isa::kAmxBf16:
            return ByType(dtype, amx_bf16::kDecodeBf16, avx512::kDecodeFp16, avx512::kDecodeFp32);
        case Isa::kAvx512Bf16:
            return ByType(dtype, avx512_bf16::kDecodeBf16, avx512::kDecodeFp16,
                          avx512::kDecodeFp32);
        case Isa::kAvx512:
            return ByType(dtype, avx512::kDecodeBf16, avx512::kDecodeFp16, avx512::kDecodeFp32);
        case Isa::kAvx2:
            return ByType(dtype, avx2::kDecodeBf16, avx2::kDecodeFp16, avx2::kDecodeFp32);
#endif
        default:
            return ByType(dtype, portable::kDecodeBf16, portable::kDecodeFp16,
                          portable::kDecodeFp32);
    }
}

}  // namespace liteattention::cpu
