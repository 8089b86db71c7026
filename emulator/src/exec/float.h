// Single, double and half precision arithmetic.
#pragma once

#include "exec/float_functions.h"
#include "exec/map.h"

namespace emulator::VARIANT {
namespace {

// v_rndne goes to the nearest even number whatever the rounding of MODE, which `kRounding` hides.
template <uint32_t kRounding, class F>
[[gnu::always_inline]] inline void nearest_whole(Wave& w, F f) {
    const uint32_t mode = w.mode;
    w.mode = mode & ~kRounding;
    f();
    w.mode = mode;
}

inline void register_float(Handler* table) {
    V2(v_add_f32, F32, F32, F32, a + b);
    V2(v_sub_f32, F32, F32, F32, a - b);
    V2(v_subrev_f32, F32, F32, F32, b - a);
    V2(v_mul_f32, F32, F32, F32, a * b);
    V2(v_mul_legacy_f32, F32, F32, F32, (a == 0.0f || b == 0.0f ? 0.0f : a * b));
    V2(v_min_f32, F32, F32, F32, min32(a, b));
    V2(v_max_f32, F32, F32, F32, max32(a, b));
    V3(v_min3_f32, F32, F32, F32, F32, min32(min32(a, b), c));
    V3(v_max3_f32, F32, F32, F32, F32, max32(max32(a, b), c));
    V3(v_med3_f32, F32, F32, F32, F32, med32(a, b, c));
    V3(v_fma_f32, F32, F32, F32, F32, __builtin_fmaf(a, b, c));
    V3(v_fmac_f32, F32, F32, F32, Old<F32>, __builtin_fmaf(a, b, c));
    V3(v_fmamk_f32, F32, F32, F32, F32, __builtin_fmaf(a, b, c));
    V3(v_fmaak_f32, F32, F32, F32, F32, __builtin_fmaf(a, b, c));
    V2(v_ldexp_f32, F32, F32, I32, ldexp32(a, b));
    V1(v_trunc_f32, F32, F32, std::trunc(a));
    V1(v_ceil_f32, F32, F32, std::ceil(a));
    HANDLER(v_rndne_f32) {
        nearest_whole<kRound32>(
            w, [&] { map<F32, F32>(w, i, [](float a) { return __builtin_nearbyintf(a); }); });
    };
    V1(v_floor_f32, F32, F32, std::floor(a));
    V1(v_fract_f32, F32, F32, fract32(a));
    V1(v_exp_f32, F32, F32, exp2_lane(flushed(a)));
    V1(v_log_f32, F32, F32, log2_lane(flushed(a)));
    V1(v_exp_legacy_f32, F32, F32, exp2_lane(flushed(a)));
    V1(v_log_legacy_f32, F32, F32, log2_lane(flushed(a)));
    V1(v_rcp_f32, F32, F32, flushed(rcp_lane(flushed(a))));
    V1(v_rcp_iflag_f32, F32, F32, flushed(rcp_lane(flushed(a))));
    V1(v_rsq_f32, F32, F32, rsq_lane(flushed(a)));
    V1(v_sqrt_f32, F32, F32, __builtin_sqrtf(flushed(a)));
    V1(v_sin_f32, F32, F32, flushed(static_cast<float>(sin_turns(flushed(a)))));
    V1(v_cos_f32, F32, F32, flushed(static_cast<float>(cos_turns(flushed(a)))));
    V1(v_frexp_mant_f32, F32, F32, static_cast<float>(frexp_mantissa(a)));
    V1(v_frexp_exp_i32_f32, I32, F32, frexp_exponent(a));
    V3(v_cubeid_f32, F32, F32, F32, F32, cube_face(a, b, c).id);
    V3(v_cubesc_f32, F32, F32, F32, F32, cube_face(a, b, c).sc);
    V3(v_cubetc_f32, F32, F32, F32, F32, cube_face(a, b, c).tc);
    V3(v_cubema_f32, F32, F32, F32, F32, cube_face(a, b, c).ma);

    // ---- double
    V2(v_add_f64, F64, F64, F64, a + b);
    V2(v_mul_f64, F64, F64, F64, a * b);
    V2(v_min_f64, F64, F64, F64, min64(a, b));
    V2(v_max_f64, F64, F64, F64, max64(a, b));
    V3(v_fma_f64, F64, F64, F64, F64, __builtin_fma(a, b, c));
    V3(v_fmac_f64, F64, F64, F64, Old<F64>, __builtin_fma(a, b, c));
    V2(v_ldexp_f64, F64, F64, I32, ldexp64(a, b));
    V1(v_trunc_f64, F64, F64, std::trunc(a));
    V1(v_ceil_f64, F64, F64, std::ceil(a));
    HANDLER(v_rndne_f64) {
        nearest_whole<kRound64>(
            w, [&] { map<F64, F64>(w, i, [](double a) { return __builtin_nearbyint(a); }); });
    };
    V1(v_floor_f64, F64, F64, std::floor(a));
    V1(v_fract_f64, F64, F64, fract64(a));
    V1(v_rcp_f64, F64, F64, 1.0 / a);
    V1(v_rsq_f64, F64, F64, static_cast<double>(1.0L / std::sqrt(static_cast<long double>(a))));
    V1(v_sqrt_f64, F64, F64, __builtin_sqrt(a));
    V1(v_frexp_mant_f64, F64, F64, frexp_mantissa(a));
    V1(v_frexp_exp_i32_f64, I32, F64, frexp_exponent(a));
    V2(v_trig_preop_f64, F64, F64, U32, trig_preop(a, b));

    // ---- half; values are floats until they are stored
    V2(v_add_f16, F16, F16, F16, a + b);
    V2(v_sub_f16, F16, F16, F16, a - b);
    V2(v_subrev_f16, F16, F16, F16, b - a);
    V2(v_mul_f16, F16, F16, F16, a * b);
    V2(v_min_f16, F16, F16, F16, min32(a, b));
    V2(v_max_f16, F16, F16, F16, max32(a, b));
    V3(v_min3_f16, F16Keep, F16, F16, F16, min32(min32(a, b), c));
    V3(v_max3_f16, F16Keep, F16, F16, F16, max32(max32(a, b), c));
    V3(v_med3_f16, F16Keep, F16, F16, F16, med32(a, b, c));
    V3(v_fma_f16, F16Keep, F16, F16, F16, fma_for_half(a, b, c));
    V3(v_fma_legacy_f16, F16, F16, F16, F16, fma_for_half(a, b, c));
    // Not fused: the product is rounded to half first.
    V3(v_mad_f16, F16Keep, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V3(v_mad_legacy_f16, F16, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V3(v_mac_f16, F16Keep, F16, F16, Old<F16>, half_to_float(float_to_half(a * b)) + c);
    V3(v_madmk_f16, F16Keep, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V3(v_madak_f16, F16Keep, F16, F16, F16, half_to_float(float_to_half(a * b)) + c);
    V2(v_ldexp_f16, F16, F16, I16, ldexp32(a, b));
    V1(v_trunc_f16, F16, F16, std::trunc(a));
    V1(v_ceil_f16, F16, F16, std::ceil(a));
    V1(v_rndne_f16, F16, F16, __builtin_nearbyintf(a));
    V1(v_floor_f16, F16, F16, std::floor(a));
    V1(v_fract_f16, F16, F16, fract16(a));
    // Correct to 24 bits first; a second rounding can only matter where that lands on a midpoint.
    V1(v_exp_f16, F16, F16, exp2_lane(a));
    V1(v_log_f16, F16, F16, log2_lane(a));
    V1(v_rcp_f16, F16, F16, rcp_lane(a));
    V1(v_rsq_f16, F16, F16, rsq_lane(a));
    V1(v_sqrt_f16, F16, F16, __builtin_sqrtf(a));
    V1(v_sin_f16, F16, F16, static_cast<float>(sin_turns(a)));
    V1(v_cos_f16, F16, F16, static_cast<float>(cos_turns(a)));
    V1(v_frexp_mant_f16, F16, F16, static_cast<float>(frexp_mantissa(a)));
    V1(v_frexp_exp_i16_f16, I16, F16, frexp_exponent(a));
}

}  // namespace
}  // namespace emulator::VARIANT
