/* Attention of few queries against many keys, a step of decoding: keys and values are read once, where they lie, and
   as fast as memory gives them. The keys of a head are cut into parts, so that every thread has work; each part has a
   softmax of its own, and the parts are put together at the end, always in the same order. A thread has the same parts
   at every step, so that what its caches keep of them is of use.

   Included by native.c. */

#define AT_ONCE 512 /* keys whose scores are held */
#define PART 2048   /* keys of a part */
#define ROW_LIMIT 16

typedef struct {
    const float *q, *k, *v;
    int64_t q_batch, q_head, q_row, k_batch, k_head, k_row, k_group, v_batch, v_head, v_row, v_group;
    int64_t batch, planes, members, q_len, k_len, dim, v_dim; /* planes of `members` heads that share keys and values */
    int64_t low, high;                                        /* row i sees keys i - high .. i - low */
    const float *slope;                                       /* NULL, or what |i + shift - j| costs */
    int64_t slope_batch, slope_head, shift;
    float *out, *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head;
    float *room; /* [jobs][rows][v_wide + 2] */
    float scale;
} decode_t;

/* The sums of 16 vectors, as one vector: halves are added until one number of each is left. */
static inline __attribute__((always_inline)) lane_t sums(const lane_t *x) {
    lane_t a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = PICK(x[2 * i], x[2 * i + 1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(x[2 * i], x[2 * i + 1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = PICK(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               PICK(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = PICK(b[2 * i], b[2 * i + 1], 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +
               PICK(b[2 * i], b[2 * i + 1], 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31);
    return PICK(c[0], c[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           PICK(c[0], c[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
}

/* The dot products of q with 16 keys, of which the last may be missing. */
static inline __attribute__((always_inline)) void score(const float *restrict q, const float *restrict k, int64_t k_row,
                                                        int64_t keys, int64_t dim, float *restrict out) {
    const int64_t whole = dim / 16 * 16;
    lane_t sum[16];
#pragma GCC unroll 16
    for (int t = 0; t < 16; t++) {
        const float *x = k + (t < keys ? t : keys - 1) * k_row;
        lane_t total = {0};
#pragma GCC unroll 8
        for (int64_t d = 0; d < whole; d += 16) total += *(const lane_t *)(q + d) * *(const lane_t *)(x + d);
        sum[t] = total;
    }
    lane_t found = sums(sum);
    for (int64_t t = 0; dim > whole && t < keys; t++)
        for (int64_t d = whole; d < dim; d++) found[t] += q[d] * k[t * k_row + d];
    *(lane_t *)out = found;
}

/* Of all rows with up to AT_ONCE keys: [rows][AT_ONCE]. */
static inline __attribute__((always_inline)) void score_rows(const float *const *q, int64_t rows, const float *k,
                                                             int64_t k_row, int64_t keys, int64_t dim, float *out) {
    int64_t j = 0;
    for (; j + 16 <= keys; j += 16)
        for (int64_t r = 0; r < rows; r++) score(q[r], k + j * k_row, k_row, 16, dim, out + r * AT_ONCE + j);
    for (int64_t r = 0; j < keys && r < rows; r++)
        score(q[r], k + j * k_row, k_row, keys - j, dim, out + r * AT_ONCE + j);
}

typedef void score_t(const float *const *, int64_t, const float *, int64_t, int64_t, int64_t, float *);

#define SCORE(name, width)                                                                                             \
    static void name(const float *const *q, int64_t rows, const float *k, int64_t k_row, int64_t keys, int64_t dim,    \
                     float *out) {                                                                                     \
        (void)dim;                                                                                                     \
        score_rows(q, rows, k, k_row, keys, width, out);                                                               \
    }
SCORE(score_64, 64)
SCORE(score_128, 128)
SCORE(score_any, dim)

/* One row of scores, in place: weights of the largest so far, `ends[0]`; ends[1] is their sum. */
static void soften(float *restrict s, int64_t keys, float *restrict o, int64_t v_dim, float *restrict ends) {
    float peak = ends[0];
#pragma omp simd reduction(max : peak)
    for (int64_t j = 0; j < keys; j++) peak = s[j] > peak ? s[j] : peak;
    const float base = peak == -INFINITY ? 0 : peak;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < keys; j++) {
        const float e = quick_exp(s[j] - base);
        s[j] = e;
        sum += e;
    }
    if (peak > ends[0]) {
        const float less = quick_exp(ends[0] - base);
        ends[1] *= less;
        for (int64_t d = 0; d < v_dim; d++) o[d] *= less;
        ends[0] = peak;
    }
    ends[1] += sum;
}

/* out [4 x 16 lanes] += weights [4 x keys] v [keys x 16 lanes]; `lanes` is known when compiled. */
static inline __attribute__((always_inline)) void mix_four(const float *restrict w, const float *restrict v, int64_t v_row,
                                                           int64_t keys, int lanes, float *restrict out,
                                                           int64_t step) {
    lane_t sum[4][4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int n = 0; n < lanes; n++) sum[r][n] = *(const lane_t *)(out + r * step + 16 * n);
    for (int64_t j = 0; j < keys; j++)
#pragma GCC unroll 4
        for (int n = 0; n < lanes; n++) {
            const lane_t here = *(const lane_t *)(v + j * v_row + 16 * n);
#pragma GCC unroll 4
            for (int r = 0; r < 4; r++) sum[r][n] += w[r * AT_ONCE + j] * here;
        }
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++)
#pragma GCC unroll 4
        for (int n = 0; n < lanes; n++) *(lane_t *)(out + r * step + 16 * n) = sum[r][n];
}

/* The same for one row: four keys at a time, or its sums would wait for each other. */
static inline __attribute__((always_inline)) void mix_one(const float *restrict w, const float *restrict v, int64_t v_row,
                                                          int64_t keys, int lanes, float *restrict out) {
    lane_t sum[4][4];
#pragma GCC unroll 4
    for (int n = 0; n < lanes; n++) {
        const lane_t zero = {0};
        sum[0][n] = *(const lane_t *)(out + 16 * n);
        sum[1][n] = sum[2][n] = sum[3][n] = zero;
    }
    int64_t j = 0;
    for (; j + 4 <= keys; j += 4)
#pragma GCC unroll 4
        for (int t = 0; t < 4; t++)
#pragma GCC unroll 4
            for (int n = 0; n < lanes; n++) sum[t][n] += w[j + t] * *(const lane_t *)(v + (j + t) * v_row + 16 * n);
    for (; j < keys; j++)
#pragma GCC unroll 4
        for (int n = 0; n < lanes; n++) sum[0][n] += w[j] * *(const lane_t *)(v + j * v_row + 16 * n);
#pragma GCC unroll 4
    for (int n = 0; n < lanes; n++) *(lane_t *)(out + 16 * n) = (sum[0][n] + sum[1][n]) + (sum[2][n] + sum[3][n]);
}

static void mix(const float *w, int64_t rows, const float *v, int64_t v_row, int64_t keys, int64_t v_dim, float *out,
                int64_t step) {
    for (int64_t r = 0; r < rows;) {
        const int64_t some = rows - r >= 4 ? 4 : 1;
        const float *weights = w + r * AT_ONCE;
        float *o = out + r * step;
        int64_t d = 0;
        for (; d + 64 <= v_dim; d += 64)
            if (some == 4) mix_four(weights, v + d, v_row, keys, 4, o + d, step);
            else mix_one(weights, v + d, v_row, keys, 4, o + d);
        for (; d + 16 <= v_dim; d += 16)
            if (some == 4) mix_four(weights, v + d, v_row, keys, 1, o + d, step);
            else mix_one(weights, v + d, v_row, keys, 1, o + d);
        for (int64_t n = 0; d < v_dim && n < some; n++)
            for (int64_t j = 0; j < keys; j++)
                for (int64_t e = d; e < v_dim; e++) o[n * step + e] += weights[n * AT_ONCE + j] * v[j * v_row + e];
        r += some;
    }
}

/* The part of the keys [from, to) of one plane: for each row its unfinished output, then its largest logit and sum. */
static void decode_part(const source_t *sources, int64_t count, const decode_t *x, int64_t b, int64_t plane, int64_t from,
                        int64_t to, float *found, int64_t step) {
    const int64_t rows = x->members * x->q_len, first = plane * x->members, dim = x->dim;
    const float *k = x->k + b * x->k_batch + first / x->k_group * x->k_head;
    const float *v = x->v + b * x->v_batch + first / x->v_group * x->v_head;
    score_t *const dots = dim == 64 ? score_64 : dim == 128 ? score_128 : score_any;
    const float *q[ROW_LIMIT];
    float scores[ROW_LIMIT * AT_ONCE];
    for (int64_t r = 0; r < rows; r++)
        q[r] = x->q + b * x->q_batch + (first + r / x->q_len) * x->q_head + r % x->q_len * x->q_row;
    memset(found, 0, rows * step * sizeof(float));
    for (int64_t r = 0; r < rows; r++) found[r * step + step - 2] = -INFINITY;
    for (int64_t left = from; left < to; left += AT_ONCE) {
        const int64_t right = left + AT_ONCE < to ? left + AT_ONCE : to, keys = right - left;
        dots(q, rows, k + left * x->k_row, x->k_row, keys, dim, scores);
        for (int64_t r = 0; r < rows; r++) {
            const int64_t h = first + r / x->q_len, i = r % x->q_len;
            float *s = scores + r * AT_ONCE, *o = found + r * step, scale = x->scale;
            for (int64_t j = 0; j < keys; j++) s[j] *= scale;
            if (x->slope) {
                const float m = x->slope[b * x->slope_batch + h * x->slope_head];
                const int32_t away = i + x->shift - left;
                for (int32_t j = 0; j < keys; j++) s[j] -= m * (float)(away > j ? away - j : j - away);
            }
            for (int64_t n = 0; n < count; n++) lay_row(sources + n, s, b, h, i, i, left, right, 0);
            const int64_t begin = i - x->high - left, stop = i - x->low + 1 - left; /* what it sees of these */
            for (int64_t j = 0; j < begin && j < keys; j++) s[j] = -INFINITY;
            for (int64_t j = stop > 0 ? stop : 0; j < keys; j++) s[j] = -INFINITY;
            soften(s, keys, o, x->v_dim, o + step - 2);
        }
        if (x->v_dim) mix(scores, rows, v + left * x->v_row, x->v_row, keys, x->v_dim, found, step);
    }
}

/* All of it; `parts` of each plane, and room for that many. Returns the number of rows whose log-sum-exp is not finite. */
int64_t regard_decode(const source_t *sources, int64_t count, const decode_t *x, int64_t parts, int threads) {
    const int64_t rows = x->members * x->q_len, step = x->v_dim + 2, planes = x->batch * x->planes;
    int64_t odd = 0;
    const int64_t least = -x->high > 0 ? -x->high : 0, most = x->q_len - x->low < x->k_len ? x->q_len - x->low : x->k_len;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t job = 0; job < planes * parts; job++) {
            const int64_t plane = job / parts, from = least + job % parts * PART, to = from + PART < most ? from + PART : most;
            decode_part(sources, count, x, plane / x->planes, plane % x->planes, from, to, x->room + job * rows * step, step);
        }
#pragma omp for schedule(static) reduction(+ : odd)
        for (int64_t job = 0; job < planes * rows; job++) {
            const int64_t plane = job / rows, r = job % rows, b = plane / x->planes;
            const int64_t h = plane % x->planes * x->members + r / x->q_len, i = r % x->q_len;
            const float *found = x->room + (plane * parts * rows + r) * step;
            float *out = x->out + b * x->out_batch + h * x->out_head + i * x->out_row, top = -INFINITY, total = 0;
            for (int64_t n = 0; n < parts; n++) {
                const float peak = found[n * rows * step + step - 2];
                top = peak > top ? peak : top;
            }
            for (int64_t d = 0; d < x->v_dim; d++) out[d] = 0;
            for (int64_t n = 0; n < parts; n++) {
                const float *one = found + n * rows * step;
                const float share = one[step - 2] == -INFINITY ? (one[step - 1] == 0 ? 0 : 1) : expf(one[step - 2] - top);
                total += share * one[step - 1];
                for (int64_t d = 0; d < x->v_dim; d++) out[d] += share * one[d];
            }
            const float over = total > 0 ? 1 / total : total;
            for (int64_t d = 0; d < x->v_dim; d++) out[d] *= over;
            const float end = total == 0 ? -INFINITY : top + logf(total);
            x->lse[b * x->lse_batch + h * x->lse_head + i] = end;
            odd += !(end - end == 0);
        }
    }
    return odd;
}
