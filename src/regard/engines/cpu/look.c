/* Summaries of a strip of logits: softmax of its rows, and all that was asked for while a row is in the cache.
   Included by native.c. */

/* Mass on a set of pairs: of row i those of columns begin[i] .. end[i] - 1, or those that `inside` [rows, cols] marks. */
typedef struct {
    const int64_t *begin, *end; /* [rows]; NULL: see inside */
    const uint8_t *inside;
    int64_t batch, head, row; /* strides of inside: 0 where all have one */
    float *mass;              /* [planes, rows] */
} share_t;

/* What to look at in a strip; NULL for what nobody asked for. Strides are in numbers. */
typedef struct {
    float *lse;                 /* [planes, rows]: log-sum-exp, with the sink */
    const float *sink;          /* [planes]: or NULL */
    float *entropy;             /* [planes, rows] */
    double *received;           /* [threads, planes, cols], added to */
    double *profile;            /* [threads, planes, rows + cols - 1], added to at j - i + rows - 1 */
    float *cell_sum, *cell_max; /* [planes, rows, cells]: of each row */
    int64_t cell, skip, cells;  /* columns in a cell, how many of them the first cell lacks, cells */
    float *top_logit;           /* [planes, rows, top] */
    int64_t *top_index;
    int64_t top;
    float *logit_sum, *logit_max; /* [planes, rows, cells]: of what is not masked */
    int64_t known;                /* lse is given, and the columns may be a part of the row */
    double *squares;              /* of weights, as profile: asked for with it */
    const share_t *shares;
    int64_t share_count, heads;
} look_t;

static void keep_top(const float *x, int64_t cols, float *values, int64_t *index, int64_t top) {
    int64_t kept = 0;
    float least = -INFINITY;
    for (int64_t left = 0; left < cols; left += 64) {
        const int64_t right = left + 64 < cols ? left + 64 : cols;
        int any = 0;
#pragma omp simd reduction(| : any)
        for (int64_t j = left; j < right; j++) any |= x[j] > least;
        if (!any) continue;
        for (int64_t j = left; j < right; j++) {
            if (!(x[j] > least)) continue;
            int64_t at = kept < top ? kept++ : top - 1; /* the lower index stays before an equal one */
            for (; at > 0 && values[at - 1] < x[j]; at--) values[at] = values[at - 1], index[at] = index[at - 1];
            values[at] = x[j], index[at] = j;
            if (kept == top) least = values[top - 1];
        }
    }
    for (; kept < top; kept++) values[kept] = -INFINITY, index[kept] = -1;
}

static void pool_logits(const look_t *look, const float *x, int64_t cols, float *sums, float *maxima) {
    int64_t at = 0;
    for (int64_t c = 0; c < look->cells; c++) {
        int64_t end = (c + 1) * look->cell - look->skip;
        if (end > cols) end = cols;
        float sum = 0, most = -INFINITY;
#pragma omp simd reduction(+ : sum) reduction(max : most)
        for (int64_t j = at; j < end; j++) {
            sum += x[j] > -INFINITY ? x[j] : 0;
            most = x[j] > most ? x[j] : most;
        }
        sums[c] = sum, maxima[c] = most;
        at = end;
    }
}

static float mass_on(const share_t *s, const float *x, int64_t cols, int64_t b, int64_t h, int64_t i) {
    float sum = 0;
    if (s->begin) {
#pragma omp simd reduction(+ : sum)
        for (int64_t j = s->begin[i]; j < s->end[i]; j++) sum += x[j];
        return sum;
    }
    const uint8_t *inside = s->inside + b * s->batch + h * s->head + i * s->row;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < cols; j++) sum += inside[j] ? x[j] : 0;
    return sum;
}

/* Softmax of each row in place, then what was asked for. Returns the number of rows with NaN or +infinity in them,
   which the caller must treat otherwise. */
int64_t regard_look(const look_t *look, int64_t planes, int64_t rows, int64_t cols, float *strip, int threads) {
    int64_t odd = 0;
#pragma omp parallel num_threads(threads) reduction(+ : odd)
    {
        const int thread = omp_get_thread_num();
#pragma omp for schedule(static)
        for (int64_t job = 0; job < planes * rows; job++) {
            const int64_t plane = job / rows, i = job % rows;
            float *x = strip + job * cols;
            if (look->top) keep_top(x, cols, look->top_logit + job * look->top, look->top_index + job * look->top, look->top);
            if (look->logit_sum)
                pool_logits(look, x, cols, look->logit_sum + job * look->cells, look->logit_max + job * look->cells);
            float top = look->sink ? look->sink[plane] : -INFINITY;
            int bad = 0;
#pragma omp simd reduction(max : top) reduction(| : bad)
            for (int64_t j = 0; j < cols; j++) {
                top = x[j] > top ? x[j] : top;
                bad |= !(x[j] < INFINITY);
            }
            odd += bad != 0;
            if (look->known) top = look->lse[job];
            if (top == -INFINITY) top = 0;
            float total = 0, bent = 0;
            if (look->entropy) {
#pragma omp simd reduction(+ : total, bent)
                for (int64_t j = 0; j < cols; j++) {
                    const float away = x[j] - top, e = quick_exp(away);
                    x[j] = e;
                    total += e;
                    bent += e > 0 ? e * away : 0;
                }
            } else {
#pragma omp simd reduction(+ : total)
                for (int64_t j = 0; j < cols; j++) {
                    const float e = quick_exp(x[j] - top);
                    x[j] = e;
                    total += e;
                }
            }
            const float shown = total;
            if (look->known) total = 1; /* x holds the weights already */
            else if (look->sink) total += expf(look->sink[plane] - top);
            const float over = total > 0 ? 1 / total : total; /* 0 for a row that sees nothing, or NaN */
            if (!look->known) look->lse[job] = total > 0 ? top + logf(total) : total == 0 ? -INFINITY : total;
            if (look->entropy) look->entropy[job] = total > 0 ? over * (logf(total) * shown - bent) : total;
            if (look->received || look->profile) {
                double *squares = look->squares ? look->squares + (thread * planes + plane) * (rows + cols - 1) + rows - 1 - i : 0;
                double *r = look->received ? look->received + (thread * planes + plane) * cols : 0;
                double *p = look->profile ? look->profile + (thread * planes + plane) * (rows + cols - 1) + rows - 1 - i : 0;
                if (squares) {
                    for (int64_t j = 0; j < cols; j++) {
                        const double w = x[j] * over;
                        p[j] += w, squares[j] += w * w;
                    }
                    p = 0;
                }
                if (r && p)
                    for (int64_t j = 0; j < cols; j++) {
                        const float w = x[j] * over;
                        r[j] += w, p[j] += w;
                    }
                else if (r || p) {
                    double *o = r ? r : p;
                    for (int64_t j = 0; j < cols; j++) o[j] += x[j] * over;
                }
            }
            for (int64_t n = 0; n < look->share_count; n++)
                look->shares[n].mass[job] = over * mass_on(look->shares + n, x, cols, plane / look->heads, plane % look->heads, i);
            if (look->cell_sum) {
                float *sums = look->cell_sum + job * look->cells, *maxima = look->cell_max + job * look->cells;
                int64_t at = 0;
                for (int64_t c = 0; c < look->cells; c++) {
                    int64_t end = (c + 1) * look->cell - look->skip;
                    if (end > cols) end = cols;
                    float sum = 0, most = 0;
#pragma omp simd reduction(+ : sum) reduction(max : most)
                    for (int64_t j = at; j < end; j++) {
                        sum += x[j];
                        most = x[j] > most ? x[j] : most;
                    }
                    sums[c] = sum * over, maxima[c] = most * over;
                    at = end;
                }
            }
        }
    }
    return odd;
}
