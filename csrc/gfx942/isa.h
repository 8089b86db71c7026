// One function per machine instruction, with the hazard that it brings.
//
// All but CopyToLds, OrWord, AddWord and Pause are compiler builtins or intrinsics: LLVM then
// counts outstanding loads, inserts s_waitcnt before the first use, and pads every wait state that
// gfx942 leaves to software. It does neither next to an asm block. "Covered" below means covered by
// that, and it is the reason why an asm instruction must not be added here without its own s_nop
// and s_waitcnt. What no compiler knows, namely who hands which LDS bytes to whom, is said where it
// is done.
#pragma once

#include "hip_shim.h"

namespace liteattention::gfx942 {

typedef __attribute__((address_space(3))) void LdsVoid;

// v_mfma_f32_16x16x16_bf16, v_mfma_f32_32x32x8_bf16: c += a b (mfma_layout.h), 4 and 8 passes.
// Covered: 7 and 11 wait states from D to any other reader or writer, 3 and 5 from SrcC to its
// overwriting, 2 from a VALU write to an operand. Same-register accumulation needs none. A zero c
// becomes an inline constant.
LITE_DEVICE void MfmaBf16(Half4 a, Half4 b, Float4& c) {
    c = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
}
LITE_DEVICE void MfmaBf16(Half4 a, Half4 b, FloatX16& c) {
    c = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, 0, 0, 0);
}

// v_mfma_f32_16x16x16_f16, v_mfma_f32_32x32x8_f16: the same layouts, rates and wait states.
// Subnormal operands count.
LITE_DEVICE void MfmaFp16(Half4 a, Half4 b, Float4& c) {
    c = __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Fp16x4, a),
                                              __builtin_bit_cast(Fp16x4, b), c, 0, 0, 0);
}
LITE_DEVICE void MfmaFp16(Half4 a, Half4 b, FloatX16& c) {
    c = __builtin_amdgcn_mfma_f32_32x32x8f16(__builtin_bit_cast(Fp16x4, a),
                                             __builtin_bit_cast(Fp16x4, b), c, 0, 0, 0);
}

// v_exp_f32, v_log_f32 (base 2) and v_rcp_f32: quarter rate, 1 ulp, subnormal results become 0.
// Covered: 1 wait state to a VALU reader, 2 to an MFMA operand.
LITE_DEVICE float Exp2(float x) { return __builtin_amdgcn_exp2f(x); }
LITE_DEVICE float Log2(float x) { return __builtin_amdgcn_logf(x); }
LITE_DEVICE float Rcp(float x) { return __builtin_amdgcn_rcpf(x); }

// v_perm_b32: the upper or lower halves of two words, `low`'s below `high`'s. No hazard.
LITE_DEVICE uint32_t UpperHalves(uint32_t low, uint32_t high) {
    return __builtin_amdgcn_perm(high, low, 0x07060302u);
}

LITE_DEVICE uint32_t LowerHalves(uint32_t low, uint32_t high) {
    return __builtin_amdgcn_perm(high, low, 0x05040100u);
}

// v_cvt_pk_f32_fp8: two e4m3fnuz numbers of a word, the lower or the upper ones; exact, 0x80 is
// NaN. The SDWA form, with which the upper ones are taken, has no hazard as a reader.
LITE_DEVICE Float2 FromFp8(uint32_t word, bool upper) {
    const int bits = static_cast<int>(word);
    return upper ? __builtin_amdgcn_cvt_pk_f32_fp8(bits, true)
                 : __builtin_amdgcn_cvt_pk_f32_fp8(bits, false);
}

// v_cvt_pk_fp8_f32: four numbers of at most 240 in size to e4m3fnuz, to nearest even; what becomes
// zero has no sign, and NaN is 0x80. Covered: 1 wait state from the write of a half word, which
// keeps the other half, to a reader.
LITE_DEVICE uint32_t ToFp8(const float (&x)[4]) {
    const int low = __builtin_amdgcn_cvt_pk_fp8_f32(x[0], x[1], 0, false);
    return static_cast<uint32_t>(__builtin_amdgcn_cvt_pk_fp8_f32(x[2], x[3], low, true));
}

// v_med3_f32: x, but at most `limit` in size; x is no NaN.
LITE_DEVICE float Clamped(float x, float limit) {
    return __builtin_amdgcn_fmed3f(x, -limit, limit);
}

// x of the lane whose number differs in bit 4: ds_swizzle_b32, through the LDS crossbar but not
// its memory. Covered: the result is in flight until lgkmcnt says otherwise.
LITE_DEVICE float Xor16(float x) {
    return FromBits(static_cast<uint32_t>(
        __builtin_amdgcn_ds_swizzle(static_cast<int>(Bits(x)), 0x10 << 10 | 0x1f)));
}

// x of lane `lane4 / 4`: ds_bpermute_b32, in flight like a swizzle. A swizzle ends at 32 lanes.
LITE_DEVICE float FromLane(uint32_t lane4, float x) {
    return FromBits(static_cast<uint32_t>(
        __builtin_amdgcn_ds_bpermute(static_cast<int>(lane4), static_cast<int>(Bits(x)))));
}

// v_readfirstlane_b32: makes a value that is the same in all lanes scalar. Covered: 1 wait state
// from the VALU write before it, 2 to a VALU reader and 5 to a descriptor after it.
LITE_DEVICE uint32_t Uniform(uint32_t x) {
    return static_cast<uint32_t>(__builtin_amdgcn_readfirstlane(static_cast<int>(x)));
}
LITE_DEVICE int32_t UniformInt(uint32_t x) { return static_cast<int32_t>(Uniform(x)); }
LITE_DEVICE int32_t UniformInt(int32_t x) { return UniformInt(static_cast<uint32_t>(x)); }

// True in any active lane: v_cmp into a scalar pair, then a scalar test.
LITE_DEVICE bool Any(bool x) { return __builtin_amdgcn_ballot_w64(x) != 0; }

// The active lanes in which x holds: v_cmp into a scalar pair, no hazard to a scalar reader.
LITE_DEVICE uint64_t Lanes(bool x) { return __builtin_amdgcn_ballot_w64(x); }

// Not 0 if any lane is in the mask: s_or_b32, half the registers.
LITE_DEVICE uint32_t AnyBits(uint64_t lanes) {
    return static_cast<uint32_t>(lanes) | static_cast<uint32_t>(lanes >> 32);
}

// v_readlane_b32: x of `lane`, which is scalar. Covered: as v_readfirstlane_b32, and 4 wait states
// from a VALU write of the lane's number.
LITE_DEVICE int32_t OfLane(int32_t x, int32_t lane) { return __builtin_amdgcn_readlane(x, lane); }

// v_writelane_b32: x with `value` in `lane`; both are scalar. Covered: 2 wait states from a VALU
// write of either. clang has no builtin for it, LLVM an intrinsic.
extern "C" __device__ int32_t WriteLane(int32_t value, uint32_t lane,
                                        int32_t x) __asm("llvm.amdgcn.writelane.i32");
LITE_DEVICE int32_t WithLane(int32_t x, uint32_t lane, int32_t value) {
    return WriteLane(value, lane, x);
}

// x of another lane of the wave as kDpp says, 0 where there is none and outside of the rows of 16
// lanes that kRows has bits of: part of the VALU instruction that takes it. Covered: 2 wait states
// from a VALU write of x.
template <int kDpp, int kRows = 15, class T>
LITE_DEVICE T Neighbour(T x) {
    constexpr int kAll = 15;
    return __builtin_bit_cast(
        T, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, x), kDpp, kRows, kAll, true));
}

// Combines x of all lanes into the last one; 0 must be neutral. Six steps: over the 16 lanes of a
// row, then from row to row (row_shr:1, 2, 4, 8, row_bcast:15, row_bcast:31).
template <class T, class Combine>
LITE_DEVICE T OverWave(T x, Combine combine) {
    x = combine(x, Neighbour<0x111>(x));
    x = combine(x, Neighbour<0x112>(x));
    x = combine(x, Neighbour<0x114>(x));
    x = combine(x, Neighbour<0x118>(x));
    x = combine(x, Neighbour<0x142>(x));
    return combine(x, Neighbour<0x143>(x));
}
// The largest x of 32 lanes, the lower or the upper ones, in the last of them: the first five steps
// of it.
LITE_DEVICE uint32_t HalfWaveMaximum(uint32_t x) {
    x = __builtin_elementwise_max(x, Neighbour<0x111>(x));
    x = __builtin_elementwise_max(x, Neighbour<0x112>(x));
    x = __builtin_elementwise_max(x, Neighbour<0x114>(x));
    x = __builtin_elementwise_max(x, Neighbour<0x118>(x));
    return __builtin_elementwise_max(x, Neighbour<0x142>(x));
}
// The sum of x of the lanes up to each one. The same six steps, the last two in the rows that have
// rows before them: 1 and 3, then 2 and 3.
LITE_DEVICE uint32_t SumUpTo(uint32_t x) {
    x += Neighbour<0x111>(x);
    x += Neighbour<0x112>(x);
    x += Neighbour<0x114>(x);
    x += Neighbour<0x118>(x);
    x += Neighbour<0x142, 0b1010>(x);
    return x + Neighbour<0x143, 0b1100>(x);
}
LITE_DEVICE uint32_t LastLane(uint32_t x) {
    return static_cast<uint32_t>(OfLane(static_cast<int32_t>(x), 63));
}

// The lanes in which a <= b, a == b, or either is NaN: v_cmp_le_f32, v_cmp_eq_f32, v_cmp_u_f32.
// Exact in the face of NaN, which the operators of the language are compiled to ignore here. No
// hazard to a scalar reader of the mask.
LITE_DEVICE uint64_t LanesLessEqual(float a, float b) {
    constexpr int kOrderedLessEqual = 5;
    return __builtin_amdgcn_fcmpf(a, b, kOrderedLessEqual);
}
LITE_DEVICE uint64_t LanesEqual(float a, float b) {
    constexpr int kOrderedEqual = 1;
    return __builtin_amdgcn_fcmpf(a, b, kOrderedEqual);
}
LITE_DEVICE uint64_t LanesUnordered(float a, float b) {
    constexpr int kUnordered = 8;
    return __builtin_amdgcn_fcmpf(a, b, kUnordered);
}

// Describes `bytes` bytes at a 64-bit base for buffer instructions, which check against it and
// return 0 beyond. Four scalar registers.
LITE_DEVICE __amdgpu_buffer_rsrc_t Descriptor(const char* base, uint32_t bytes) {
    constexpr uint32_t kRaw32 = 4u << 15;  // word 3: untyped, 32-bit elements
    return __builtin_amdgcn_make_buffer_rsrc(const_cast<char*>(base), 0, static_cast<int>(bytes),
                                             kRaw32);
}

// buffer_load_dword ... lds: lane i copies the dword at base + offset + lane_offset to lds + 4 i
// without a register in between. All but `lane_offset` are scalar. In assembly, since
// before every LDS read LLVM would wait for the copies of its own builtin, wherever they go, and
// they are to be in flight for a whole stretch. What LLVM does not see it does not cover: m0, which
// carries the LDS address, is written here, 1 wait state ahead; `offset` and the descriptor must
// come from the scalar ALU (5 wait states from a VALU write); vmcnt counts the copy, but only the
// wave that issued it knows, so before anyone reads the bytes the issuer must WaitLoads() and then
// pass a barrier with the reader.
template <uint32_t kAdd>
LITE_DEVICE void CopyToLds(Word4 descriptor, uint32_t lane_offset, uint32_t offset, uint32_t lds) {
    asm volatile("s_add_u32 m0, %0, %4\n\ts_nop 0\n\tbuffer_load_dword %1, %2, %3 offen lds"
                 :
                 : "s"(lds), "v"(lane_offset), "s"(descriptor), "s"(offset), "i"(kAdd)
                 : "memory", "scc");
}

// The words of a descriptor.
LITE_DEVICE Word4 DescriptorWords(const char* base, uint32_t bytes) {
    const uint64_t at = reinterpret_cast<uint64_t>(base);
    return {static_cast<uint32_t>(at), static_cast<uint32_t>(at >> 32) & 0xffffu, bytes, 4u << 15};
}

// buffer_atomic_or: bits into the word at base + lane_offset, by the lanes whose offset is within
// the descriptor's bytes; nothing comes back. In assembly since LLVM would put a branch of lanes
// around its own, and then restructure every scalar branch of the loop around that. The descriptor
// must come from the scalar ALU (5 wait states from a VALU write); vmcnt counts it.
LITE_DEVICE void OrWord(Word4 descriptor, uint32_t lane_offset, uint32_t bits) {
    asm volatile("buffer_atomic_or %0, %1, %2, 0 offen"
                 :
                 : "v"(bits), "v"(lane_offset), "s"(descriptor)
                 : "memory");
}

// buffer_atomic_add: the same, adding.
LITE_DEVICE void AddWord(Word4 descriptor, uint32_t lane_offset, uint32_t value) {
    asm volatile("buffer_atomic_add %0, %1, %2, 0 offen"
                 :
                 : "v"(value), "v"(lane_offset), "s"(descriptor)
                 : "memory");
}

LITE_DEVICE uint32_t LdsAddress(const char* lds) { return (uint32_t)(LdsVoid*)lds; }

// buffer_load_dword: 4 bytes at base + lane_offset; `base` and `bytes` are scalar. In flight until
// vmcnt; covered. With `bytes` 0 nothing is fetched and the result is 0.
LITE_DEVICE uint32_t LoadWord(const char* base, uint32_t bytes, uint32_t lane_offset) {
    return __builtin_amdgcn_raw_buffer_load_b32(Descriptor(base, bytes), lane_offset, 0, 0);
}

// s_load_dword: word `i` of what nobody writes during the launch; both scalar. In flight until
// lgkmcnt; covered.
LITE_DEVICE uint32_t ScalarWord(const uint32_t* words, int32_t i) {
    using Constant = const uint32_t __attribute__((address_space(4)));
    return reinterpret_cast<Constant*>(reinterpret_cast<uint64_t>(words))[i];
}

// s_load_dwordx4, s_load_dwordx8: the same of four or eight words.
template <class Words>
LITE_DEVICE Words ScalarWords(const Words* words, int32_t i) {
    using Constant = const Words __attribute__((address_space(4)));
    return reinterpret_cast<Constant*>(reinterpret_cast<uint64_t>(words))[i];
}

// s_waitcnt vmcnt(0): all vector loads of this wave, copies to LDS included, have landed.
LITE_DEVICE void WaitLoads() { __builtin_amdgcn_s_waitcnt(0x0f70); }

// s_waitcnt vmcnt(kLeft): all but the kLeft latest of them, which may be 63 at most. Loads arrive
// in the order in which they were issued.
template <int kLeft>
LITE_DEVICE void WaitLoadsBut() {
    __builtin_amdgcn_s_waitcnt(0x0f70 | (kLeft & 15) | kLeft >> 4 << 14);
}

// s_barrier, with this wave's LDS reads and writes done before it (s_waitcnt lgkmcnt(0), from the
// fence) and none of later code moved above it. Copies to LDS are not LDS accesses in this sense:
// WaitLoads() first. The scheduling fences keep arithmetic in its phase as well.
LITE_DEVICE void Barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_sched_barrier(0);
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_sched_barrier(0);
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// No instruction: LDS that one lane of this wave wrote before it, other lanes of the same wave may
// read after it. The hardware keeps a wave's LDS accesses in order; this keeps the compiler's.
LITE_DEVICE void WaveFence() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}

// No instruction: nothing is scheduled across it.
LITE_DEVICE void SchedulingFence() { __builtin_amdgcn_sched_barrier(0); }

// No instruction: what leads here is seldom taken. The compiler forgets [[unlikely]] on its way to
// machine code, a cold call it does not.
extern "C" __device__ void ColdFence(int) __asm("llvm.amdgcn.sched.barrier") __attribute__((cold));
LITE_DEVICE void Seldom() { ColdFence(0); }

// No instruction: x is computed before this point and not, as the compiler may otherwise choose,
// beside its first use in the next phase. Empty, so nothing can be too close to it.
LITE_DEVICE void Pin(Half4& x) { asm volatile("" : "+v"(x)); }
LITE_DEVICE void Pin(float& x) { asm volatile("" : "+v"(x)); }
LITE_DEVICE void Pin(Float2& x) { asm volatile("" : "+v"(x)); }
LITE_DEVICE void Pin(uint32_t& x) { asm volatile("" : "+v"(x)); }

// s_nop 0: the wave issues nothing for 4 clocks.
LITE_DEVICE void Pause() { asm volatile("s_nop 0"); }

// No instruction: x, of which the compiler knows nothing before this point. Scalar.
LITE_DEVICE int32_t ScalarHere(int32_t x) {
    asm volatile("" : "+s"(x));
    return x;
}

// v_mbcnt_lo/hi_u32_b32: this lane's number, computed at this point: two instructions instead of a
// register held through the main loop.
LITE_DEVICE uint32_t LaneHere() {
    const uint32_t all = static_cast<uint32_t>(ScalarHere(-1));
    return __builtin_amdgcn_mbcnt_hi(all, __builtin_amdgcn_mbcnt_lo(all, 0));
}

// s_setprio: 0 (default) to 3, which wave of a SIMD issues first. No hazard.
template <int kLevel>
LITE_DEVICE void Priority() {
    __builtin_amdgcn_s_setprio(kLevel);
}

}  // namespace liteattention::gfx942
