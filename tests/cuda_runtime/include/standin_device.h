/* CUDA C++ for g++: what programs find before their first line. Threads of a block run one after the
 * other; those of a kernel with __syncthreads() have stacks of their own, and take turns there. */
#pragma once

#include <assert.h>
#include <limits.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>
#include <type_traits>
#include <utility>

#include "standin_kernel.h"

#define __CUDACC_VER_MAJOR__ 12
#define __CUDACC_VER_MINOR__ 9
#define __global__
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __shared__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};
struct standin_index {
    unsigned x, y, z;
};

static standin_index threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static constexpr int warpSize = 32;
static char *standin_shared;
void standin_barrier();

static inline void __syncthreads() { standin_barrier(); }
static inline void __syncwarp(unsigned = ~0u) { standin_barrier(); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}

/* ---------------------------------------------------------------------------------- intrinsics */

using std::max;
using std::min;
using std::isfinite;
using std::isinf;
using std::isnan;
using std::signbit;
using std::abs;
template <class A, class B> using standin_common = typename std::common_type<A, B>::type;
template <class A, class B>
using standin_mixed = std::enable_if_t<std::is_arithmetic_v<A> && std::is_arithmetic_v<B> &&
                                       !std::is_same_v<A, B>>;
template <class A, class B, class = standin_mixed<A, B>>
static inline standin_common<A, B> max(A a, B b) { return a > b ? a : b; }
template <class A, class B, class = standin_mixed<A, B>>
static inline standin_common<A, B> min(A a, B b) { return a < b ? a : b; }

static inline float rsqrtf(float x) { return 1 / sqrtf(x); }
static inline double rsqrt(double x) { return 1 / sqrt(x); }
static inline float rsqrt(float x) { return 1 / sqrtf(x); }
static inline float __expf(float x) { return expf(x); }
static inline float __logf(float x) { return logf(x); }
static inline float __fdividef(float x, float y) { return x / y; }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline float __int_as_float(int x) { float y; memcpy(&y, &x, 4); return y; }
static inline int __float_as_int(float x) { int y; memcpy(&y, &x, 4); return y; }
static inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
static inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
static inline double __longlong_as_double(long long x) { double y; memcpy(&y, &x, 8); return y; }
static inline long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
template <class T> static inline T __ldg(const T *at) { return *at; }

/* One thread runs at a time, so nothing need be atomic. */
#define STANDIN_ATOMIC(name, ...)                                           \
    template <class T, class U> static inline T name(T *at, U value) {      \
        T old = *at;                                                        \
        *at = __VA_ARGS__;                                                  \
        return old;                                                         \
    }
STANDIN_ATOMIC(atomicAdd, old + (T)value)
STANDIN_ATOMIC(atomicSub, old - (T)value)
STANDIN_ATOMIC(atomicExch, (T)value)
STANDIN_ATOMIC(atomicMax, old > (T)value ? old : (T)value)
STANDIN_ATOMIC(atomicMin, old < (T)value ? old : (T)value)
STANDIN_ATOMIC(atomicAnd, old & (T)value)
STANDIN_ATOMIC(atomicOr, old | (T)value)
STANDIN_ATOMIC(atomicXor, old ^ (T)value)
template <class T> static inline T atomicCAS(T *at, T compare, T value) {
    T old = *at;
    if (old == compare) *at = value;
    return old;
}

/* ------------------------------------------------------------------------------------- running */

#include <setjmp.h>
#include <stdlib.h>
#include <ucontext.h>

enum { STANDIN_STACK = (1 << 16) + 320 }; /* no power of 2: they would meet in the cache */

/* The threads of a block, one after the other on stacks of their own, used again for each block.
 * `_setjmp` changes to another without a system call; ucontext only makes the stacks. */
struct standin_threads {
    struct one {
        ucontext_t context;
        jmp_buf place;
        bool started, ended;
    } *all;
    char *stacks;
    unsigned count, current;
    jmp_buf scheduler;
    void (*body)(void *);
    void *argument;
};
static standin_threads *standin_now;

static inline standin_index standin_place(unsigned k) {
    return {k % blockDim.x, k / blockDim.x % blockDim.y, k / blockDim.x / blockDim.y};
}

/* The block's other threads go on up to theirs. */
inline void standin_barrier() {
    standin_threads *now = standin_now;
    if (now && !_setjmp(now->all[now->current].place)) _longjmp(now->scheduler, 1);
}

static void standin_begin_thread() {
    for (;;) {
        standin_now->body(standin_now->argument);
        standin_now->all[standin_now->current].ended = true;
        standin_barrier();
    }
}

static __attribute__((noinline)) void standin_resume(standin_threads *now, unsigned k) {
    standin_threads::one *one = &now->all[k];
    now->current = k;
    threadIdx = standin_place(k);
    if (_setjmp(now->scheduler)) return;
    if (one->started) _longjmp(one->place, 1);
    one->started = true;
    getcontext(&one->context);
    one->context.uc_stack.ss_sp = now->stacks + (size_t)k * STANDIN_STACK;
    one->context.uc_stack.ss_size = STANDIN_STACK;
    makecontext(&one->context, standin_begin_thread, 0);
    setcontext(&one->context);
}

static inline void standin_run_block(standin_threads *now) {
    for (unsigned k = 0; k < now->count; k++) now->all[k].ended = false;
    for (unsigned left = now->count; left;)
        for (unsigned k = 0; k < now->count; k++) {
            if (now->all[k].ended) continue;
            standin_resume(now, k);
            left -= now->all[k].ended;
        }
}

static inline void standin_run_grid(void (*body)(void *), void *argument, const unsigned *grid,
                                    const unsigned *block, size_t shared, bool barriers) {
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {block[0], block[1], block[2]};
    unsigned count = block[0] * block[1] * block[2];
    standin_shared = (char *)aligned_alloc(64, (shared + 64) / 64 * 64);
    standin_threads threads = {};
    if (barriers) {
        threads.all = (standin_threads::one *)calloc(count, sizeof *threads.all);
        threads.stacks = (char *)malloc((size_t)count * STANDIN_STACK);
        threads.count = count;
        threads.body = body;
        threads.argument = argument;
        standin_now = &threads;
    }
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) {
                blockIdx = {x, y, z};
                if (barriers) {
                    standin_run_block(&threads);
                    continue;
                }
                for (unsigned k = 0; k < count; k++) {
                    threadIdx = standin_place(k);
                    body(argument);
                }
            }
    standin_now = nullptr;
    free(threads.all);
    free(threads.stacks);
    free(standin_shared);
}

/* ------------------------------------------------------------------------------------- kernels */

template <class T, int ndim, bool contiguous, bool narrow> class CArray;

/* The bytes an argument lets a kernel touch. */
template <class A> struct standin_extent {
    static bool of(const A &, standin_span *) { return false; }
};

template <class T> struct standin_extent<T *> {
    static bool of(T *const &at, standin_span *span) {
        *span = {(uint64_t)at, at ? (size_t)1 : 0, !std::is_const_v<T>};
        return at != nullptr;
    }
};

/* CuPy's arrays: an address, a size, and shape and strides in bytes. */
template <class T, int ndim, bool contiguous, bool narrow>
struct standin_extent<CArray<T, ndim, contiguous, narrow>> {
    static bool of(const CArray<T, ndim, contiguous, narrow> &array, standin_span *span) {
        ptrdiff_t words[2 + 2 * ndim];
        memcpy(words, &array, sizeof words);
        if (!words[1]) return false;
        ptrdiff_t low = 0, high = sizeof(T);
        for (int k = 0; k < ndim; k++) {
            ptrdiff_t reach = (words[2 + k] - 1) * words[2 + ndim + k];
            (reach < 0 ? low : high) += reach;
        }
        *span = {(uint64_t)words[0] + low, (size_t)(high - low), 1};
        return true;
    }
};

template <auto function, const int *reads> struct standin_of;
template <class... A, void (*function)(A...), const int *reads>
struct standin_of<function, reads> {
    static constexpr size_t sizes[sizeof...(A) + 1] = {sizeof(A)...};
    static constexpr int count = sizeof...(A);

    template <size_t... I> static void call(void **arguments, std::index_sequence<I...>) {
        function(*(std::remove_reference_t<A> *)arguments[I]...);
    }
    static void body(void *arguments) {
        call((void **)arguments, std::index_sequence_for<A...>());
    }
    template <size_t... I>
    static int extents(void **arguments, standin_span *spans, std::index_sequence<I...>) {
        int found = 0;
        auto add = [&](bool there, int read) {
            if (!there) return;
            if (read) spans[found].write = 0;
            found++;
        };
        (add(standin_extent<std::remove_cv_t<A>>::of(*(A *)arguments[I], &spans[found]), reads[I]), ...);
        return found;
    }
    static int spans(void **arguments, standin_span *spans) {
        return extents(arguments, spans, std::index_sequence_for<A...>());
    }
};

#ifndef STANDIN_BARRIERS
#define STANDIN_BARRIERS false
#endif
#define STANDIN_KERNEL(symbol, function, name, ...)                                               \
    static constexpr int standin_reads_##symbol[64] = __VA_ARGS__;                                \
    using standin_type_##symbol = standin_of<function, standin_reads_##symbol>;                   \
    static void standin_run_##symbol(void **arguments, const unsigned *grid, const unsigned *block, \
                                     size_t shared) {                                             \
        standin_run_grid(standin_type_##symbol::body, arguments, grid, block, shared,             \
                         STANDIN_BARRIERS);                                                       \
    }                                                                                             \
    extern "C" __attribute__((visibility("default")))                                             \
    const standin_kernel standin_kernel_##symbol = {name, standin_type_##symbol::count,           \
        standin_type_##symbol::sizes, standin_run_##symbol, standin_type_##symbol::spans};
