// The little of HIP that the kernels need, so that they build with plain clang (Debian: clang-19,
// lld-19; options in tools/liteattention_tools/build.py) as well as with hipcc. Nothing here is
// specific to attention.
#pragma once

#include <stdint.h>

#ifndef __device__
#define __device__ __attribute__((device))
#endif
#ifndef __shared__
#define __shared__ __attribute__((shared))
#endif

// Always inlined: a call would cost the callee-saved registers of a whole wave.
#define LITE_DEVICE __device__ inline __attribute__((always_inline))

// An exported kernel of workgroups of exactly `threads`, with at most `waves` waves on each SIMD:
// the compiler then uses up to 512 / waves registers a lane, and reserves so many that no further
// wave fits, however few it uses. clang ignores its own launch_bounds on this target and would
// assume 1024 threads.
#define LITE_KERNEL(threads, waves)                                                  \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), \
                              amdgpu_waves_per_eu(waves, waves))) void

namespace liteattention::gfx942 {

LITE_DEVICE uint32_t ThreadId() { return __builtin_amdgcn_workitem_id_x(); }
LITE_DEVICE uint32_t WorkgroupId() { return __builtin_amdgcn_workgroup_id_x(); }

// The kernel's argument, read from memory at this point: what is only needed again at the end of a
// kernel would otherwise stay in scalar registers, which the main loop is short of.
template <class Params>
LITE_DEVICE const Params& ArgumentAgain() {
    auto* p = __builtin_amdgcn_kernarg_segment_ptr();
    asm volatile("" : "+s"(p));  // no instruction: another address, for all the compiler knows
    return *(const Params*)p;
}

using Half4 = short __attribute__((ext_vector_type(4)));  // bf16 or fp16 bits, an MFMA operand
using Half8 = short __attribute__((ext_vector_type(8)));  // two of them: one 16-byte access
using Fp16x2 = _Float16 __attribute__((ext_vector_type(2)));
using Fp16x4 = _Float16 __attribute__((ext_vector_type(4)));
using Float2 = float __attribute__((ext_vector_type(2)));
using Float4 = float __attribute__((ext_vector_type(4)));
using FloatX16 = float __attribute__((ext_vector_type(16)));
using Word2 = uint32_t __attribute__((ext_vector_type(2)));
using Word4 = uint32_t __attribute__((ext_vector_type(4)));
using Word8 = uint32_t __attribute__((ext_vector_type(8)));

// Rows start on 4-byte boundaries only (geometry.h); the hardware asks no more of a 16-byte access.
using UnalignedWord4 = Word4 __attribute__((aligned(4)));

// A number that is part of the program.
template <int kValue>
struct Constant {
    LITE_DEVICE constexpr operator int() const { return kValue; }
};

// body(Constant<0>{}), body(Constant<1>{}), ...: a loop whose index is part of the program.
template <int kCount, int kFrom = 0, class Body>
LITE_DEVICE void Unroll(Body body) {
    if constexpr (kFrom < kCount) {
        body(Constant<kFrom>{});
        Unroll<kCount, kFrom + 1>(body);
    }
}

LITE_DEVICE uint32_t Bits(float x) { return __builtin_bit_cast(uint32_t, x); }
LITE_DEVICE float FromBits(uint32_t x) { return __builtin_bit_cast(float, x); }

// On the bits: the compiler is told that arithmetic meets no NaN, so it may turn x == 0 round.
LITE_DEVICE bool IsZero(float x) { return Bits(x) << 1 == 0; }

LITE_DEVICE Half4 Low(Half8 x) { return __builtin_shufflevector(x, x, 0, 1, 2, 3); }
LITE_DEVICE Half4 High(Half8 x) { return __builtin_shufflevector(x, x, 4, 5, 6, 7); }

}  // namespace liteattention::gfx942
