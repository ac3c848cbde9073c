/* Entries of neighbouring displacements, sixteen pairs at a time. Included by native.c.

   Along a row or a column the entry of a pair goes on by steps of 0 or 1 (`smooth`): bins of a displacement are wider
   the farther they are, and never leave one out. So sixteen neighbours read at most sixteen neighbouring entries: one
   load and one permutation, where sixteen loads would be several times as slow. A source by keys runs along columns of
   A: squares of 16 x 16 are read key by key and turned.

   The load may go up to 15 numbers beyond the last entry; whoever makes a table leaves room for that. */

#if defined(__AVX512F__)
#include <immintrin.h>
#define SIDE 16 /* of a square; CHUNK rows are a multiple of it */

static inline __m512 read_bins(const float *data, const int32_t *map) {
    const int32_t base = map[0] < map[15] ? map[0] : map[15];
    const __m512i at = _mm512_sub_epi32(_mm512_loadu_si512(map), _mm512_set1_epi32(base));
    return _mm512_permutexvar_ps(at, _mm512_loadu_ps(data + base));
}

/* How many of the pairs were read: a multiple of sixteen. */
static inline int64_t add_bins(float *restrict o, const float *restrict data, const int32_t *restrict map, int64_t count,
                               int first) {
    int64_t j = 0;
    for (; j + 16 <= count; j += 16) {
        const __m512 x = read_bins(data, map + j);
        _mm512_storeu_ps(o + j, first ? x : _mm512_add_ps(_mm512_loadu_ps(o + j), x));
    }
    return j;
}

/* x[n][m] becomes x[m][n]. */
static inline void turn(__m512 x[16]) {
    __m512 y[16];
#pragma GCC unroll 16
    for (int n = 0; n < 16; n += 2) { /* pairs of rows, then fours, within quarters of a register */
        y[n] = _mm512_unpacklo_ps(x[n], x[n + 1]);
        y[n + 1] = _mm512_unpackhi_ps(x[n], x[n + 1]);
    }
#pragma GCC unroll 16
    for (int n = 0; n < 16; n += 4)
        for (int half = 0; half < 2; half++) {
            const __m512d a = _mm512_castps_pd(y[n + half]), b = _mm512_castps_pd(y[n + half + 2]);
            x[n + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            x[n + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    /* now x[n + m], n = 0 4 8 12, holds in its quarter c the columns 4 c + m of rows n .. n + 3 */
#pragma GCC unroll 16
    for (int m = 0; m < 4; m++) {
        const __m512 a = _mm512_shuffle_f32x4(x[m], x[m + 4], 0x88), b = _mm512_shuffle_f32x4(x[m], x[m + 4], 0xdd);
        const __m512 c = _mm512_shuffle_f32x4(x[m + 8], x[m + 12], 0x88), d = _mm512_shuffle_f32x4(x[m + 8], x[m + 12], 0xdd);
        y[m] = _mm512_shuffle_f32x4(a, c, 0x88);
        y[m + 8] = _mm512_shuffle_f32x4(a, c, 0xdd);
        y[m + 4] = _mm512_shuffle_f32x4(b, d, 0x88);
        y[m + 12] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int n = 0; n < 16; n++) x[n] = y[n];
}

/* Rows from `query` on, a multiple of sixteen, columns [from, to) as far as they are whole squares; where it stopped.
   Sixteen keys at a time for all the rows, and those of the next asked for meanwhile: they lie far apart. */
static int64_t lay_squares(const source_t *s, float *restrict out, int64_t stride, int64_t b, int64_t h, int64_t query,
                           int64_t rows, int64_t from, int64_t to, int first) {
    const float *data = s->data + b * s->batch + h * s->head;
    const int64_t shift = s->runs->base - s->runs->begin, top = s->rows[query] + shift; /* t falls from row to row */
    int64_t j = from;
    for (; j + SIDE <= to; j += SIDE) {
        if (j + 2 * SIDE <= to)
            for (int64_t n = j + SIDE; n < j + 2 * SIDE; n++) {
                const float *of_key = data + n * s->col;
                const int64_t one = top + n, other = top + 1 - rows + n;
                __builtin_prefetch(of_key + (s->map ? s->map[one] : one));
                __builtin_prefetch(of_key + (s->map ? s->map[other] : other));
            }
        for (int64_t i = 0; i < rows; i += SIDE) {
            const int64_t last = top - i - (SIDE - 1) + j;
            __m512 x[SIDE];
#pragma GCC unroll 16
            for (int n = 0; n < SIDE; n++) {
                const float *of_key = data + (j + n) * s->col;
                x[n] = s->map ? read_bins(of_key, s->map + last + n) : _mm512_loadu_ps(of_key + last + n);
            }
            turn(x);
#pragma GCC unroll 16
            for (int n = 0; n < SIDE; n++) {
                float *o = out + (i + SIDE - 1 - n) * stride + j - from;
                _mm512_storeu_ps(o, first ? x[n] : _mm512_add_ps(_mm512_loadu_ps(o), x[n]));
            }
        }
    }
    return j;
}
#else
#define SIDE 16

static inline int64_t add_bins(float *restrict o, const float *restrict data, const int32_t *restrict map, int64_t count,
                               int first) {
    (void)o, (void)data, (void)map, (void)count, (void)first;
    return 0;
}

static int64_t lay_squares(const source_t *s, float *restrict out, int64_t stride, int64_t b, int64_t h, int64_t query,
                           int64_t rows, int64_t from, int64_t to, int first) {
    (void)s, (void)out, (void)stride, (void)b, (void)h, (void)query, (void)rows, (void)to, (void)first;
    return from;
}
#endif
