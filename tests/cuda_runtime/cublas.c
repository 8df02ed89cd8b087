/* The part of cuBLAS that CuPy multiplies matrices with (`@`). A library of its own: it has versioned
 * names. What is not here ends the process with the name that was missing. */
#include "standin.h"

#include <stdlib.h>

enum { SUCCESS, INVALID = 7, FAILED = 13, UNSUPPORTED = 15 };
enum { F32 = 0, F64 = 1 }; /* cudaDataType */

struct handle {
    void *stream;
    int pointer_mode, math_mode;
};

PUBLIC int cublasCreate_v2(struct handle **handle)
{
    *handle = calloc(1, sizeof **handle);
    return *handle ? SUCCESS : FAILED;
}

PUBLIC int cublasDestroy_v2(struct handle *handle)
{
    free(handle);
    return SUCCESS;
}

#define GET_AND_SET(get, set, type, field)                 \
    PUBLIC int get(struct handle *handle, type *value)     \
    {                                                      \
        *value = handle->field;                            \
        return SUCCESS;                                    \
    }                                                      \
    PUBLIC int set(struct handle *handle, type value)      \
    {                                                      \
        handle->field = value;                             \
        return SUCCESS;                                    \
    }
GET_AND_SET(cublasGetStream_v2, cublasSetStream_v2, void *, stream)
GET_AND_SET(cublasGetPointerMode_v2, cublasSetPointerMode_v2, int, pointer_mode)
GET_AND_SET(cublasGetMathMode, cublasSetMathMode, int, math_mode)

PUBLIC int cublasGetVersion_v2(struct handle *handle, int *version)
{
    (void)handle;
    *version = 120900;
    return SUCCESS;
}

/* A product of column-major matrices, or of `batch` pairs that lie `strides` elements apart. */
struct product {
    bool transposed[2];
    int m, n, k, type, batch, leading[3];
    long long strides[3];
    uint64_t at[3]; /* A, B, C */
    double alpha, beta;
};

/* Rows of A and columns of B are brought together first: what is added up lies side by side. */
#define MULTIPLY(name, type)                                                                       \
    static __attribute__((optimize("O3", "fast-math"))) type dot_##name(const type *a,             \
                                                                        const type *b, int count)  \
    {                                                                                              \
        type sum = 0;                                                                              \
        for (int k = 0; k < count; k++) sum += a[k] * b[k];                                        \
        return sum;                                                                                \
    }                                                                                              \
    static type *packed_##name(const type *from, int lines, int count, long long line,             \
                               long long step)                                                     \
    {                                                                                              \
        type *made = malloc(sizeof(type) * (size_t)lines * (size_t)count + 1), *at = made;         \
        for (int row = 0; row < lines; row++)                                                      \
            for (int k = 0; k < count; k++) *at++ = from[row * line + k * step];                   \
        return made;                                                                               \
    }                                                                                              \
    static void name(const struct product *p, int number)                                          \
    {                                                                                              \
        const type *a = (const type *)(uintptr_t)p->at[0] + number * p->strides[0];                \
        const type *b = (const type *)(uintptr_t)p->at[1] + number * p->strides[1];                \
        type *c = (type *)(uintptr_t)p->at[2] + number * p->strides[2];                            \
        bool ta = p->transposed[0], tb = p->transposed[1];                                         \
        int lda = p->leading[0], ldb = p->leading[1];                                              \
        type *rows = packed_##name(a, p->m, p->k, ta ? lda : 1, ta ? 1 : lda);                     \
        type *columns = packed_##name(b, p->n, p->k, tb ? 1 : ldb, tb ? ldb : 1);                  \
        for (int column = 0; column < p->n; column++)                                              \
            for (int row = 0; row < p->m; row++) {                                                 \
                type *at = &c[row + (long long)column * p->leading[2]];                            \
                type sum = dot_##name(&rows[(size_t)row * p->k], &columns[(size_t)column * p->k],  \
                                      p->k);                                                       \
                *at = (type)p->alpha * sum + (p->beta != 0 ? (type)p->beta * *at : 0);             \
            }                                                                                      \
        free(rows);                                                                                \
        free(columns);                                                                             \
    }
MULTIPLY(multiply_f32, float)
MULTIPLY(multiply_f64, double)

static void multiply(void *argument)
{
    const struct product *p = argument;
    for (int number = 0; number < p->batch; number++)
        (p->type == F64 ? multiply_f64 : multiply_f32)(p, number);
}

static struct span extent(const struct product *p, int matrix, int rows, int columns)
{
    long long last = (p->batch - 1) * p->strides[matrix] +
                     (long long)(columns - 1) * p->leading[matrix] + rows;
    return (struct span){p->at[matrix], (size_t)last * (p->type == F64 ? 8 : 4), matrix == 2};
}

static int queue(struct handle *handle, struct product *p, int a, int b, const void *alpha,
                 const void *beta)
{
    if (handle->pointer_mode || (p->type != F32 && p->type != F64)) return UNSUPPORTED;
    if (!p->m || !p->n || !p->batch) return SUCCESS;
    p->transposed[0] = a != 0;
    p->transposed[1] = b != 0;
    p->alpha = p->type == F64 ? *(const double *)alpha : *(const float *)alpha;
    p->beta = p->type == F64 ? *(const double *)beta : *(const float *)beta;
    struct product *kept = malloc(sizeof *kept);
    *kept = *p;
    const struct span spans[] = {
        extent(p, 0, p->transposed[0] ? p->k : p->m, p->transposed[0] ? p->m : p->k),
        extent(p, 1, p->transposed[1] ? p->n : p->k, p->transposed[1] ? p->k : p->n),
        extent(p, 2, p->m, p->n),
    };
    return standin_queue("a product", multiply, kept, spans, 3, handle->stream) ? FAILED : SUCCESS;
}

PUBLIC int cublasGemmStridedBatchedEx(
    struct handle *handle, int transa, int transb, int m, int n, int k, const void *alpha, uint64_t a,
    int a_type, int lda, long long stride_a, uint64_t b, int b_type, int ldb, long long stride_b,
    const void *beta, uint64_t c, int c_type, int ldc, long long stride_c, int batch, int compute,
    int algorithm)
{
    (void)compute, (void)algorithm;
    if (a_type != b_type || a_type != c_type) return UNSUPPORTED;
    struct product p = {
        .m = m, .n = n, .k = k, .type = a_type, .batch = batch, .leading = {lda, ldb, ldc},
        .strides = {stride_a, stride_b, stride_c}, .at = {a, b, c},
    };
    return queue(handle, &p, transa, transb, alpha, beta);
}

PUBLIC int cublasGemmEx(struct handle *handle, int transa, int transb, int m, int n, int k,
                        const void *alpha, uint64_t a, int a_type, int lda, uint64_t b, int b_type,
                        int ldb, const void *beta, uint64_t c, int c_type, int ldc, int compute,
                        int algorithm)
{
    return cublasGemmStridedBatchedEx(handle, transa, transb, m, n, k, alpha, a, a_type, lda, 0, b,
                                      b_type, ldb, 0, beta, c, c_type, ldc, 0, 1, compute, algorithm);
}

#define GEMM(name, type)                                                                           \
    PUBLIC int name(struct handle *handle, int transa, int transb, int m, int n, int k,            \
                    const void *alpha, uint64_t a, int lda, uint64_t b, int ldb, const void *beta, \
                    uint64_t c, int ldc)                                                           \
    {                                                                                              \
        return cublasGemmEx(handle, transa, transb, m, n, k, alpha, a, type, lda, b, type, ldb,    \
                            beta, c, type, ldc, 0, 0);                                             \
    }
GEMM(cublasSgemm_v2, F32)
GEMM(cublasDgemm_v2, F64)

/* A matrix and a vector, or two vectors, are matrices of one column. */
#define GEMV(name, type)                                                                           \
    PUBLIC int name(struct handle *handle, int trans, int m, int n, const void *alpha, uint64_t a, \
                    int lda, uint64_t x, int step_x, const void *beta, uint64_t y, int step_y)     \
    {                                                                                              \
        if (step_x != 1 || step_y != 1) return UNSUPPORTED;                                        \
        int rows = trans ? n : m, inner = trans ? m : n;                                           \
        return cublasGemmEx(handle, trans, 0, rows, 1, inner, alpha, a, type, lda, x, type, inner, \
                            beta, y, type, rows, 0, 0);                                            \
    }
GEMV(cublasSgemv_v2, F32)
GEMV(cublasDgemv_v2, F64)
