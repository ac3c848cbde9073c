/* Attention whose bias never leaves the nearest caches: for 64 queries at a time, and 512 keys at a time, scores by a
   matrix product, the bias added from its sources while they are there, softmax as it goes, and the product with v.

   Included by native.c. Keys lie in panels of 32, [panel][dim][32], values in panels of 32 columns, [panel][key][32]
   (regard_pack), so that the innermost loops read memory in a row. */

#define ROWS 64
#define KEYS 512
#define STRIDE (KEYS + 16) /* rows of scores, apart enough for the cache */
#define PANEL 32

/* c[8 x 32] += or = a[8 x depth] b[depth x 32]; a by its stride, b in a row. */
static inline __attribute__((always_inline)) void product(const float *restrict a, int64_t a_step, int64_t rows,
                                                          const float *restrict b, int64_t depth, float *restrict c,
                                                          int64_t c_step, int add) {
    lane_t sum[8][2];
    const float *at[8];
    for (int i = 0; i < 8; i++) at[i] = a + (i < rows ? i : 0) * a_step;
    for (int i = 0; i < 8; i++)
        for (int n = 0; n < 2; n++) {
            lane_t zero = {0};
            sum[i][n] = add && i < rows ? *(const lane_t *)(c + i * c_step + 16 * n) : zero;
        }
    for (int64_t d = 0; d < depth; d++) {
        const lane_t b0 = *(const lane_t *)(b + PANEL * d), b1 = *(const lane_t *)(b + PANEL * d + 16);
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const float x = at[i][d];
            sum[i][0] += x * b0;
            sum[i][1] += x * b1;
        }
    }
    for (int i = 0; i < 8 && i < rows; i++)
        for (int n = 0; n < 2; n++) *(lane_t *)(c + i * c_step + 16 * n) = sum[i][n];
}

/* x [batch, heads, rows, dim] in panels, plane after plane: [panel][row][32] for `across` (columns of x make a panel),
   else [panel][dim][32] (rows of x make a panel, turned). What is missing in a panel is 0. */
void regard_pack(const float *x, int64_t batch, int64_t heads, int64_t x_batch, int64_t x_head, int64_t rows, int64_t x_row,
                 int64_t dim, int64_t across, float *into, int threads) {
    const int64_t inner = across ? rows : dim, outer = across ? dim : rows, panels = (outer + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t job = 0; job < batch * heads * panels; job++) {
        const int64_t plane = job / panels, first = job % panels * PANEL, many = outer - first < PANEL ? outer - first : PANEL;
        const float *from = x + plane / heads * x_batch + plane % heads * x_head;
        float *o = into + job * inner * PANEL;
        if (many < PANEL) memset(o, 0, inner * PANEL * sizeof(float));
        if (across)
            for (int64_t i = 0; i < rows; i++) memcpy(o + i * PANEL, from + i * x_row + first, many * sizeof(float));
        else
            for (int64_t i = 0; i < many; i++)
                for (int64_t d = 0; d < dim; d++) o[d * PANEL + i] = from[(first + i) * x_row + d];
    }
}

/* A term <u_i, R[t]> with as many entries as displacements: multiplied here, and read with its skew, t = rows[i] + j. */
typedef struct {
    const float *u; /* NULL: no such term */
    int64_t batch, head, row;
    const float *features; /* packed */
    int64_t features_batch, features_head, dim;
    const int64_t *rows;
} long_t;

typedef struct {
    const float *q, *k, *v; /* k and v packed */
    int64_t q_batch, q_head, q_row, k_batch, k_head, k_group, v_batch, v_head, v_group; /* heads that share a key's */
    int64_t dim, v_dim, q_len, k_len, first_row;
    int64_t low, high; /* row i sees keys i - high .. i - low at most; the sources hide the others of a tile */
    float *out, *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head;
    float *room; /* of each thread */
    int64_t room_size;
    long_t term;
    float scale;
} attend_t;

static void attend_rows(const source_t *sources, int64_t count, const attend_t *x, int64_t b, int64_t h, int64_t top,
                        float *room) {
    const int64_t rows = x->q_len - top < ROWS ? x->q_len - top : ROWS, v_wide = (x->v_dim + PANEL - 1) / PANEL * PANEL;
    float *scores = room, *out = scores + ROWS * STRIDE, *q = out + ROWS * v_wide, *skewed = q + ROWS * x->dim;
    float most[ROWS], total[ROWS];
    const float *given = x->q + b * x->q_batch + h * x->q_head + top * x->q_row;
    const float *k = x->k + b * x->k_batch + h / x->k_group * x->k_head;
    const float *v = x->v + b * x->v_batch + h / x->v_group * x->v_head;
    for (int64_t i = 0; i < rows; i++) most[i] = -INFINITY, total[i] = 0;
    memset(out, 0, ROWS * v_wide * sizeof(float));
    for (int64_t i = 0; i < rows; i++) /* scaled once, not once for every key */
        for (int64_t d = 0; d < x->dim; d++) q[i * x->dim + d] = given[i * x->q_row + d] * x->scale;
    const int paired = count == 2 && can_pair(sources, sources + 1);
    const int64_t here = x->first_row + top;
    int64_t begin = here - x->high > 0 ? (here - x->high) / PANEL * PANEL : 0;
    int64_t stop = here + rows - x->low < x->k_len ? here + rows - x->low : x->k_len;
    for (int64_t left = begin; left < stop; left += KEYS) {
        const int64_t right = left + KEYS < stop ? left + KEYS : stop, keys = right - left;
        for (int64_t j = 0; j < keys; j += PANEL)
            for (int64_t i = 0; i < rows; i += 8)
                product(q + i * x->dim, x->dim, rows - i, k + (left + j) * x->dim, x->dim, scores + i * STRIDE + j, STRIDE,
                        0);
        int64_t from = 0, wide = 0;
        const long_t *term = &x->term;
        if (term->u) {
            from = (term->rows[here + rows - 1] + left) / PANEL * PANEL;
            wide = ROWS + KEYS + PANEL;
            const int64_t to = term->rows[here] + right;
            const float *u = term->u + b * term->batch + h * term->head + top * term->row;
            const float *features = term->features + b * term->features_batch + h * term->features_head;
            for (int64_t t = from; t < to; t += PANEL)
                for (int64_t i = 0; i < rows; i += 8)
                    product(u + i * term->row, term->row, rows - i, features + t * term->dim, term->dim,
                            skewed + i * wide + t - from, wide, 0);
        }
        for (int64_t i = 0; i < rows; i++) {
            float *s = scores + i * STRIDE;
            if (term->u) {
                const float *more = skewed + i * wide + term->rows[here + i] + left - from;
                for (int64_t j = 0; j < keys; j++) s[j] += more[j];
            }
            if (paired) lay_pair(sources, s, b, h, top + i, here + i, left, right);
            else
                for (int64_t n = 0; n < count; n++) lay_row(sources + n, s, b, h, top + i, here + i, left, right, 0);
            float peak = most[i];
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
            if (peak > most[i]) {
                const float less = quick_exp(most[i] - base);
                total[i] *= less;
                float *o = out + i * v_wide;
                for (int64_t d = 0; d < v_wide; d++) o[d] *= less;
                most[i] = peak;
            }
            total[i] += sum;
        }
        for (int64_t d = 0; d < v_wide; d += PANEL)
            for (int64_t i = 0; i < rows; i += 8)
                product(scores + i * STRIDE, STRIDE, rows - i, v + d * x->k_len + left * PANEL, keys, out + i * v_wide + d,
                        v_wide, 1);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *o = x->out + b * x->out_batch + h * x->out_head + (top + i) * x->out_row;
        const float over = total[i] > 0 ? 1 / total[i] : total[i];
        for (int64_t d = 0; d < x->v_dim; d++) o[d] = out[i * v_wide + d] * over;
        x->lse[b * x->lse_batch + h * x->lse_head + top + i] = total[i] == 0 ? -INFINITY : most[i] + logf(total[i]);
    }
}

/* All planes and rows of a problem; keys must be packed in whole panels, and values too. */
void regard_attend(const source_t *sources, int64_t count, const block_t *block, const attend_t *x, int threads) {
    const int64_t parts = (x->q_len + ROWS - 1) / ROWS, jobs = block->batch * block->heads * parts;
#pragma omp parallel num_threads(threads)
    {
        float *room = x->room + omp_get_thread_num() * x->room_size;
#pragma omp for schedule(dynamic, 4)
        for (int64_t job = 0; job < jobs; job++) {
            const int64_t plane = job / parts;
            attend_rows(sources, count, x, plane / block->heads, plane % block->heads, job % parts * ROWS, room);
        }
    }
}
