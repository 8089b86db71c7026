// Conversions between number formats.
#pragma once

#include "exec/float_functions.h"
#include "exec/map.h"

namespace emulator::VARIANT {
namespace {

// Saturating, towards zero, NaN to 0.
inline int32_t to_int(float x) {
    const bool low = x < -0x1p31f, high = x >= 0x1p31f, nan = x != x;
    const float inside = pick(low | high | nan, 0.0f, x);
    uint32_t r = static_cast<uint32_t>(static_cast<int32_t>(inside));
    r = pick(high, 0x7fffffffu, r);
    return static_cast<int32_t>(pick(low, 0x80000000u, r));
}
inline uint32_t to_unsigned(float x) {
    const bool positive = x > 0.0f, high = x >= 0x1p32f, upper = x >= 0x1p31f;
    const float moved = pick(upper, x - 0x1p31f, x);
    const float inside = pick(positive & !high, moved, 0.0f);
    const uint32_t r =
        static_cast<uint32_t>(static_cast<int32_t>(inside)) ^ (upper ? 0x80000000u : 0u);
    return pick(high, 0xffffffffu, pick(positive, r, 0u));
}
inline int32_t to_int(double x) {
    if (x != x) return 0;
    return static_cast<int32_t>(clamped(x, -2147483648.0, 2147483647.0));
}
inline uint32_t to_unsigned(double x) {
    if (!(x > 0)) return 0;
    return x >= 4294967295.0 ? 0xffffffffu : static_cast<uint32_t>(x);
}

inline uint32_t norm16(float x, bool is_signed) {
    if (x != x) return 0;
    const float scaled =
        is_signed ? clamped(x, -1.0f, 1.0f) * 32767.0f : clamped(x, 0.0f, 1.0f) * 65535.0f;
    return static_cast<uint32_t>(static_cast<int32_t>(std::rint(scaled))) & 0xffff;
}

inline uint32_t to_byte(float x) {
    if (x != x) return 0;
    return static_cast<uint32_t>(std::rint(clamped(x, 0.0f, 255.0f)));
}

inline int32_t nibble(uint32_t x, int n) { return static_cast<int32_t>(x << (28 - 4 * n)) >> 28; }

inline void register_conversions(Handler* table) {
    V1(v_cvt_f32_i32, F32, I32, static_cast<float>(a));
    V1(v_cvt_f32_u32, F32, U32, static_cast<float>(a));
    V1(v_cvt_i32_f32, I32, F32, to_int(a));
    V1(v_cvt_u32_f32, U32, F32, to_unsigned(a));
    V1(v_cvt_rpi_i32_f32, I32, F32, to_int(std::floor(static_cast<double>(a) + 0.5)));
    V1(v_cvt_flr_i32_f32, I32, F32, to_int(std::floor(a)));
    V1(v_cvt_off_f32_i4, F32, U32, static_cast<float>(nibble(a, 0)) * 0.0625f);
    V1(v_cvt_f32_ubyte0, F32, U32, static_cast<float>(static_cast<int32_t>(a & 255)));
    V1(v_cvt_f32_ubyte1, F32, U32, static_cast<float>(static_cast<int32_t>(a >> 8 & 255)));
    V1(v_cvt_f32_ubyte2, F32, U32, static_cast<float>(static_cast<int32_t>(a >> 16 & 255)));
    V1(v_cvt_f32_ubyte3, F32, U32, static_cast<float>(static_cast<int32_t>(a >> 24)));
    V1(v_cvt_f64_i32, F64, I32, static_cast<double>(a));
    V1(v_cvt_f64_u32, F64, U32, static_cast<double>(a));
    V1(v_cvt_i32_f64, I32, F64, to_int(a));
    V1(v_cvt_u32_f64, U32, F64, to_unsigned(a));
    V1(v_cvt_f32_f64, F32, F64, static_cast<float>(a));
    V1(v_cvt_f64_f32, F64, F32, static_cast<double>(a));
    V1(v_cvt_f16_f32, F16, F32, a);
    V1(v_cvt_f32_f16, F32, F16, quieted(a));
    V1(v_cvt_f16_u16, F16, U16, static_cast<float>(static_cast<int32_t>(a)));
    V1(v_cvt_f16_i16, F16, I16, static_cast<float>(a));
    V1(v_cvt_u16_f16, U16, F16,
       (a > 0.0f ? static_cast<uint32_t>(static_cast<int32_t>(lesser(a, 65535.0f))) : 0u));
    V1(v_cvt_i16_f16, I16, F16,
       (a == a ? static_cast<int32_t>(clamped(a, -32768.0f, 32767.0f)) : 0));
    V1(v_cvt_norm_i16_f16, U16, F16, norm16(a, true));
    V1(v_cvt_norm_u16_f16, U16, F16, norm16(a, false));
    V2(v_cvt_pknorm_i16_f32, U32, F32, F32, norm16(a, true) | norm16(b, true) << 16);
    V2(v_cvt_pknorm_u16_f32, U32, F32, F32, norm16(a, false) | norm16(b, false) << 16);
    V2(v_cvt_pknorm_i16_f16, U32, F16, F16, norm16(a, true) | norm16(b, true) << 16);
    V2(v_cvt_pknorm_u16_f16, U32, F16, F16, norm16(a, false) | norm16(b, false) << 16);
    V2(v_cvt_pkrtz_f16_f32, U32, F32, F32, float_to_half(a, 3) | float_to_half(b, 3) << 16);
    V3(v_cvt_pk_u8_f32, U32, F32, U32, U32,
       (c & ~(255u << 8 * (b & 3))) | to_byte(a) << 8 * (b & 3));
    HANDLER(v_cvt_pkaccum_u8_f32) {
        map<U32, F32, U32, Old<U32>>(w, i, [](float a, uint32_t b, uint32_t c) {
            return (c & ~(255u << 8 * (b & 3))) | to_byte(a) << 8 * (b & 3);
        });
    };
    V1(v_cvt_f32_fp8, F32, U32, from_8bit<3>(a & 255));
    V1(v_cvt_f32_bf8, F32, U32, from_8bit<2>(a & 255));
#define TWO_FLOATS(name, mantissa)                                                          \
    HANDLER(name) {                                                                         \
        map<U64, U32>(w, i, [](uint32_t a) {                                                \
            return static_cast<uint64_t>(as_bits(from_8bit<mantissa>(a & 255))) |           \
                   static_cast<uint64_t>(as_bits(from_8bit<mantissa>(a >> 8 & 255))) << 32; \
        });                                                                                 \
    }
    TWO_FLOATS(v_cvt_pk_f32_fp8, 3);
    TWO_FLOATS(v_cvt_pk_f32_bf8, 2);
#undef TWO_FLOATS
#define TO_8BIT(name, mantissa)                                   \
    HANDLER(name) {                                               \
        const bool saturate = w.mode & kFp16Overflow;             \
        map<U16Keep, F32, F32>(w, i, [=](float a, float b) {      \
            return to_8bit<mantissa>(a, saturate, false, 0) |     \
                   to_8bit<mantissa>(b, saturate, false, 0) << 8; \
        });                                                       \
    }
    TO_8BIT(v_cvt_pk_fp8_f32, 3);
    TO_8BIT(v_cvt_pk_bf8_f32, 2);
#undef TO_8BIT
    // Into the byte that op_sel[3:2] names.
#define TO_8BIT_RANDOM(name, mantissa)                                                          \
    HANDLER(name) {                                                                             \
        const bool saturate = w.mode & kFp16Overflow;                                           \
        Inst whole = i;                                                                         \
        const uint32_t shift = 8u * (2u * i.op_sel_dst + i.src[2].op_sel);                      \
        whole.op_sel_dst = false;                                                               \
        map<U32, F32, U32, Old<U32>>(w, whole, [=](float a, uint32_t b, uint32_t old) {         \
            return (old & ~(255u << shift)) | to_8bit<mantissa>(a, saturate, true, b) << shift; \
        });                                                                                     \
    }
    TO_8BIT_RANDOM(v_cvt_sr_fp8_f32, 3);
    TO_8BIT_RANDOM(v_cvt_sr_bf8_f32, 2);
#undef TO_8BIT_RANDOM
}

}  // namespace
}  // namespace emulator::VARIANT
