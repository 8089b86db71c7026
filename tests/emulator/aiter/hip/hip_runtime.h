// The little of HIP's header that the device code of moonmath-ai/amd-kernels needs, so that plain
// clang-19 builds it without ROCm.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <cmath>

#define __host__ __attribute__((host))
#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __shared__ __attribute__((shared))
#define __forceinline__ inline __attribute__((always_inline))
// clang ignores its own launch_bounds on this target.
#define __launch_bounds__(threads, waves) \
    __attribute__((amdgpu_flat_work_group_size(1, threads), amdgpu_waves_per_eu(waves)))

#define SHIM static __device__ __forceinline__

namespace shim {

template <unsigned (*read)()>
struct Value {
    __device__ operator unsigned() const { return read(); }
};
SHIM unsigned ThreadX() { return __builtin_amdgcn_workitem_id_x(); }
SHIM unsigned BlockX() { return __builtin_amdgcn_workgroup_id_x(); }
SHIM unsigned BlockY() { return __builtin_amdgcn_workgroup_id_y(); }
SHIM unsigned SizeX() { return __builtin_amdgcn_workgroup_size_x(); }
SHIM unsigned BlocksX() { return __builtin_amdgcn_grid_size_x() / SizeX(); }
SHIM unsigned BlocksY() { return __builtin_amdgcn_grid_size_y(); }

struct Thread {
    Value<ThreadX> x;
};
struct Block {
    Value<BlockX> x;
    Value<BlockY> y;
};
struct Size {
    Value<SizeX> x;
};
struct Grid {
    Value<BlocksX> x;
    Value<BlocksY> y;
};

}  // namespace shim

#define threadIdx (shim::Thread{})
#define blockIdx (shim::Block{})
#define blockDim (shim::Size{})
#define gridDim (shim::Grid{})

struct int4 {
    int x, y, z, w;
};

SHIM void __syncthreads() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
SHIM unsigned long long __ballot(int predicate) {
    constexpr int kNotEqual = 33;
    return __builtin_amdgcn_uicmp(static_cast<unsigned>(predicate), 0u, kNotEqual);
}
SHIM int __any(int predicate) { return __ballot(predicate) != 0; }
SHIM int __all(int predicate) { return __ballot(!predicate) == 0; }
SHIM float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHIM float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
SHIM float fminf(float a, float b) { return __builtin_fminf(a, b); }
SHIM unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
SHIM float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
SHIM int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
SHIM float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
SHIM float __shfl_xor(float value, int mask) {
    const unsigned lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    const int other = static_cast<int>((lane ^ static_cast<unsigned>(mask)) * 4u);
    return __int_as_float(__builtin_amdgcn_ds_bpermute(other, __float_as_int(value)));
}

#undef SHIM
