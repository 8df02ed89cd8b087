/* The part of CUDA's half that CuPy's headers use. */
#pragma once

struct __half_raw {
    unsigned short x;
};

struct __half {
    _Float16 value;

    __half() = default;
    __half(const __half_raw &raw) { memcpy(&value, &raw, 2); }
    __half(float v) : value(v) {}
    __half(double v) : value(v) {}
    __half(int v) : value(v) {}
    __half(unsigned v) : value(v) {}
    __half(long long v) : value(v) {}
    __half(unsigned long long v) : value(v) {}
    operator float() const { return value; }
    operator __half_raw() const { __half_raw raw; memcpy(&raw, &value, 2); return raw; }
};
typedef __half half;

static inline unsigned short __half_as_ushort(__half h) { return __half_raw(h).x; }
static inline __half __ushort_as_half(unsigned short bits) { return __half(__half_raw{bits}); }
static inline __half __float2half_rn(float v) { return __half(v); }
static inline float __half2float(__half h) { return h; }
