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

/* The factors of a term <u_i, R[t]>, R packed: it is multiplied where it is read. */
typedef struct {
    const float *u; /* NULL: no such term */
    int64_t batch, head, row;
    const float *features; /* packed */
    int64_t features_batch, features_head, dim, entries;
    const int64_t *rows; /* of a term with an entry for every displacement: read with its skew, t = rows[i] + j */
} factors_t;

typedef struct {
    const float *q, *k, *v; /* k and v packed */
    int64_t q_batch, q_head, q_row, k_batch, k_head, k_group, v_batch, v_head, v_group; /* heads that share a key's */
    int64_t dim, v_dim, q_len, k_len, first_row;
    int64_t low, high; /* row i sees keys i - high .. i - low at most; the sources hide the others of a tile */
    float *out, *lse;
    int64_t out_batch, out_head, out_row, lse_batch, lse_head;
    float *room; /* of each thread */
    int64_t room_size;
    factors_t term;
    const factors_t *made; /* of each source: those that are to be multiplied here */
    drop_t drop;
    float scale;
} attend_t;

#define WIDE(entries) (((entries) + PANEL - 1) / PANEL * PANEL + 16) /* a row of <u_i, R>, and room to read beyond it */

/* c [rows, entries of interest] = <u_i, R[t]>, t from a multiple of PANEL on. */
static void multiply(const factors_t *x, int64_t b, int64_t h, int64_t top, int64_t rows, int64_t from, int64_t to, float *c,
                     int64_t c_step) {
    const float *u = x->u + b * x->batch + h * x->head + top * x->row;
    const float *features = x->features + b * x->features_batch + h * x->features_head;
    for (int64_t t = from; t < to; t += PANEL)
        for (int64_t i = 0; i < rows; i += 8)
            product(u + i * x->row, x->row, rows - i, features + t * x->dim, x->dim, c + i * c_step + t - from, c_step, 0);
}

/* <w_j, R> of all keys: out [batch, heads, rows, WIDE(entries)]. */
void regard_multiply(const factors_t *x, int64_t batch, int64_t heads, int64_t rows, float *out, int threads) {
    const int64_t parts = (rows + ROWS - 1) / ROWS, wide = WIDE(x->entries);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t job = 0; job < batch * heads * parts; job++) {
        const int64_t plane = job / parts, top = job % parts * ROWS, some = rows - top < ROWS ? rows - top : ROWS;
        multiply(x, plane / heads, plane % heads, top, some, 0, x->entries, out + (plane * rows + top) * wide, wide);
    }
}

/* Multiplies a source's entries for some rows, those that keys [begin, stop) read, and points it to them. */
static void make(source_t *s, const factors_t *x, int64_t b, int64_t h, int64_t top, int64_t rows, int64_t here, int64_t begin,
                 int64_t stop, float *table) {
    int64_t from = 0, to = x->entries, wide = WIDE(x->entries);
    if (s->smooth && begin < stop) { /* entries rise or fall: the ends say which are met */
        const int64_t low = s->rows[here + rows - 1] + begin, high = s->rows[here] + stop - 1;
        const int64_t one = s->map ? s->map[low] : low, other = s->map ? s->map[high] : high;
        from = (one < other ? one : other) / PANEL * PANEL, to = (one < other ? other : one) + 1;
    }
    multiply(x, b, h, top, rows, from, to, table + from, wide);
    s->data = table - top * wide, s->batch = s->head = 0, s->row = wide;
}

static int is_straight(const source_t *s) {
    return !s->map && !s->col && !s->sliding && s->run_count == 1 && s->runs->step == 1;
}

/* The bias of one row, and its largest logit. */
static float add_sources(const source_t *sources, int64_t count, int paired, float *restrict s, int64_t b, int64_t h, int64_t i,
                         int64_t query, int64_t left, int64_t right, float peak) {
    const int64_t keys = right - left;
    if (count == 1 && is_straight(sources)) { /* a table: read and compared in one go */
        const float *x = sources->data + b * sources->batch + h * sources->head + i * sources->row + sources->rows[query] +
                         sources->runs->base - sources->runs->begin + left;
#pragma omp simd reduction(max : peak)
        for (int64_t j = 0; j < keys; j++) {
            const float logit = s[j] + x[j];
            s[j] = logit;
            peak = logit > peak ? logit : peak;
        }
        return peak;
    }
    if (paired) lay_pair(sources, s, b, h, i, query, left, right);
    else
        for (int64_t n = 0; n < count; n++)
            if (!sources[n].col || !sources[n].smooth) lay_row(sources + n, s, b, h, i, query, left, right, 0);
#pragma omp simd reduction(max : peak)
    for (int64_t j = 0; j < keys; j++) peak = s[j] > peak ? s[j] : peak;
    return peak;
}

/* s [keys] becomes 2^(s / log 2 - level); their sum. */
static inline float raise_all(float *s, int64_t keys, float level) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < keys; j++) {
        const float e = power_of_2(s[j] * LOG2_E - level);
        s[j] = e;
        sum += e;
    }
    return sum;
}

static void attend_rows(const source_t *given, int64_t count, const attend_t *x, int64_t b, int64_t h, int64_t top, float *room) {
    const int64_t rows = x->q_len - top < ROWS ? x->q_len - top : ROWS, v_wide = (x->v_dim + PANEL - 1) / PANEL * PANEL;
    float *scores = room, *out = scores + ROWS * STRIDE, *q = out + ROWS * v_wide, *skewed = q + ROWS * x->dim;
    float *table = skewed + (x->term.u ? ROWS * (ROWS + KEYS + PANEL) : 0);
    float level[ROWS], total[ROWS]; /* weights so far are 2^(logit / log 2 - level) */
    source_t sources[count > 0 ? count : 1];
    const float *asked = x->q + b * x->q_batch + h * x->q_head + top * x->q_row;
    const float *k = x->k + b * x->k_batch + h / x->k_group * x->k_head;
    const float *v = x->v + b * x->v_batch + h / x->v_group * x->v_head;
    for (int64_t i = 0; i < rows; i++) level[i] = -INFINITY, total[i] = 0;
    memset(out, 0, ROWS * v_wide * sizeof(float));
    for (int64_t i = 0; i < rows; i++) /* scaled once, not once for every key */
        for (int64_t d = 0; d < x->dim; d++) q[i * x->dim + d] = asked[i * x->q_row + d] * x->scale;
    const int paired = count == 2 && can_pair(given, given + 1);
    const int64_t here = x->first_row + top;
    int64_t begin = here - x->high > 0 ? (here - x->high) / PANEL * PANEL : 0;
    int64_t stop = here + rows - x->low < x->k_len ? here + rows - x->low : x->k_len;
    for (int64_t n = 0; n < count; n++) {
        sources[n] = given[n];
        if (!x->made || !x->made[n].u) continue;
        make(sources + n, x->made + n, b, h, top, rows, here, begin, stop, table);
        table += ROWS * WIDE(x->made[n].entries);
    }
    const int64_t seed = x->drop.seeds ? x->drop.seeds[b * x->drop.batch + h * x->drop.head] : 0;
    for (int64_t left = begin; left < stop; left += KEYS) {
        const int64_t right = left + KEYS < stop ? left + KEYS : stop, keys = right - left;
        for (int64_t j = 0; j < keys; j += PANEL) {
            for (int64_t i = 0; i < rows; i += 8)
                product(q + i * x->dim, x->dim, rows - i, k + (left + j) * x->dim, x->dim, scores + i * STRIDE + j, STRIDE,
                        0);
            for (int64_t n = 0; n < count; n++)
                if (sources[n].col && sources[n].smooth)
                    lay_rows(sources + n, scores + j, STRIDE, b, h, top, rows, here, left + j,
                             left + j + PANEL < right ? left + j + PANEL : right, 0);
        }
        int64_t from = 0;
        const int64_t wide = ROWS + KEYS + PANEL;
        const factors_t *term = &x->term;
        if (term->u) {
            from = (term->rows[here + rows - 1] + left) / PANEL * PANEL;
            multiply(term, b, h, top, rows, from, term->rows[here] + right, skewed, wide);
        }
        for (int64_t i = 0; i < rows; i++) {
            float *s = scores + i * STRIDE;
            if (term->u) {
                const float *more = skewed + i * wide + term->rows[here + i] + left - from;
                for (int64_t j = 0; j < keys; j++) s[j] += more[j];
            }
            const float peak = add_sources(sources, count, paired, s, b, h, top + i, here + i, left, right, -INFINITY);
            const float most = peak * LOG2_E;
            if (most > level[i]) {
                const float less = power_of_2(level[i] - most);
                total[i] *= less;
                float *o = out + i * v_wide;
                for (int64_t d = 0; d < v_wide; d++) o[d] *= less;
                level[i] = most;
            }
            total[i] += raise_all(s, keys, level[i] == -INFINITY ? 0 : level[i]);
            if (x->drop.seeds) drop_row(s, keys, hash_of_row(seed, here + i), left, x->drop.least);
        }
        for (int64_t d = 0; d < v_wide; d += PANEL)
            for (int64_t i = 0; i < rows; i += 8)
                product(scores + i * STRIDE, STRIDE, rows - i, v + d * x->k_len + left * PANEL, keys, out + i * v_wide + d,
                        v_wide, 1);
    }
    for (int64_t i = 0; i < rows; i++) {
        float *o = x->out + b * x->out_batch + h * x->out_head + (top + i) * x->out_row;
        const float kept = x->drop.seeds ? x->drop.over : 1, over = total[i] > 0 ? kept / total[i] : total[i];
        for (int64_t d = 0; d < x->v_dim; d++) o[d] = out[i * v_wide + d] * over;
        const double end = level[i] * 0.69314718055994531 + log(total[i]);
        x->lse[b * x->lse_batch + h * x->lse_head + top + i] = total[i] == 0 ? -INFINITY : end;
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
