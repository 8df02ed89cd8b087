/* The part of CUDA's bfloat16 that CuPy's headers use: the upper half of a float, rounded to even. */
#pragma once

struct __nv_bfloat16 {
    unsigned short bits;

    __nv_bfloat16() = default;
    __nv_bfloat16(float v) {
        unsigned whole = __float_as_uint(v);
        bits = v != v ? 0x7fff : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    operator float() const { return __uint_as_float((unsigned)bits << 16); }
};

static inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }
static inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    __nv_bfloat16 made;
    made.bits = bits;
    return made;
}
static inline bool __hisnan(__nv_bfloat16 v) { return (v.bits & 0x7fff) > 0x7f80; }
static inline bool __hisinf(__nv_bfloat16 v) { return (v.bits & 0x7fff) == 0x7f80; }
