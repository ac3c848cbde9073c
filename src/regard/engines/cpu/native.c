/* Passes over blocks of logits that PyTorch would take several times over the same memory.

   Everything here works on float32 blocks [batch, heads, rows, cols], contiguous, rows being whole visible rows of A:

   regard_lay    the bias of a block: the sum of its sources, written once
   regard_weigh  from logits and the gradient of the weights to weights and the gradient of the logits (eq. 22),
                 and on to the gradients of the sources
   regard_look   softmax of the rows and every summary of them, in one pass (look.c)
   regard_attend the whole of attention, the bias added where the scores are (attend.c), from what regard_pack and
                 regard_multiply laid out
   regard_decode the same for few queries (decode.c)

   Threads share out rows (or columns) in a fixed way, and what they add up together is kept apart by thread and added
   in order by the caller: the same inputs give the same bits. No fast-math: NaN and infinity mean what they mean. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#define TILE 1024 /* columns at a time: a source by columns stays in the nearest cache */
#define CHUNK 16  /* rows a thread takes at a time */

/* Where a bias comes from. The entry of the pair (i, j) is map[t], or t itself without a map, where t = rows[i] +
   column(j), and column(j) is given by runs of columns: from `begin` on it is base + step * (j - begin), step 0 or 1
   (or -1, where a table is only read).
   Where runs are `sliding`, they are runs of t instead: from t = begin on, the entry is base + step * (t - begin), and
   column(j) is j. */
typedef struct {
    int64_t begin, base, step;
} run_t;

typedef struct {
    float *data;         /* laid out: what is read; pulled: what is added to */
    int64_t batch, head; /* strides of data, in numbers */
    int64_t row, col;    /* of a row and of a column; by entry for the others */
    int64_t thread;      /* stride between the copies that threads add to (pulled tables only) */
    const int64_t *rows;
    const run_t *runs;
    int64_t run_count, sliding;
    const int32_t *map;
    int64_t smooth; /* entries of neighbouring pairs are the same or neighbours, and t goes by one from row to row (bins.c) */
} source_t;

typedef struct {
    int64_t batch, heads, rows, cols;
    int64_t first_row, first_col; /* in the whole */
    int64_t plane;                /* stride from one head's block to the next, in numbers */
} block_t;

/* e^x for x <= 0 or so, to a rounding or two; 0 below the normal numbers, NaN stays NaN. */
static inline float quick_exp(float x) {
    const float scaled = x * 1.44269504088896341f;
    const float whole = scaled < -126.0f ? -126.0f : scaled > 127.0f ? 127.0f : scaled;
    const float shifted = whole + 12582912.0f; /* 1.5 * 2^23: rounds to a whole number in the low bits */
    const float n = shifted - 12582912.0f;
    float r = x - n * 0.693359375f; /* log 2 in two parts */
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union {
        float f;
        int32_t i;
    } power, low;
    low.f = shifted;
    power.i = (low.i + 127) << 23;
    const float value = p * power.f;
    return x < -87.0f ? 0.0f : value;
}

#define LOG2_E 1.44269504088896341f

/* 2^x for x <= 0 or so, to a rounding; 0 where it is below the normal numbers, NaN stays NaN. */
static inline float power_of_2(float x) {
    const float shifted = x + 12583039.0f; /* 1.5 * 2^23 + 127: rounds to a whole number, an exponent in the low bits */
    const float r = x - (shifted - 12583039.0f);
    float p = 1.545316295e-4f; /* 2^r = 1 + r p(r), to 5e-9 */
    p = p * r + 1.339086336e-3f;
    p = p * r + 9.618082557e-3f;
    p = p * r + 5.550357114e-2f;
    p = p * r + 2.402265076e-1f;
    p = p * r + 6.931471880e-1f;
    p = p * r + 1.0f;
    union {
        float f;
        uint32_t i;
    } power;
    power.f = shifted;
    power.i <<= 23;
    const float value = p * power.f;
    return x < -125.5f ? 0.0f : value;
}

static inline uint32_t stir(uint32_t x) {
    x = (x ^ x >> 16) * 0x85EBCA6Bu;
    x = (x ^ x >> 13) * 0xC2B2AE35u;
    return x ^ x >> 16;
}

/* Dropout (eq. 25): a weight stays if the hash of seed, row and column is `least` or more. */
typedef struct {
    const int64_t *seeds; /* [batch, heads]; NULL: all */
    int64_t batch, head;
    uint32_t least; /* of a hash that keeps its weight */
    float over;     /* what is kept is multiplied by this */
} drop_t;

static inline uint32_t hash_of_row(int64_t seed, int64_t row) { return stir(stir((uint32_t)seed) + (uint32_t)row * 0x9E3779B1u); }

static inline int is_kept(uint32_t row, uint32_t col, uint32_t least) { return stir(row + col * 0x85EBCA77u) >= least; }

static inline void drop_row(float *x, int64_t count, uint32_t row, int64_t first, uint32_t least) {
    const uint32_t from = (uint32_t)first;
#pragma omp simd
    for (uint32_t j = 0; j < (uint32_t)count; j++) x[j] = is_kept(row, from + j, least) ? x[j] : 0;
}

static int64_t run_at(const source_t *s, int64_t t) {
    int64_t low = 0, high = s->run_count;
    while (high - low > 1) {
        const int64_t mid = (low + high) / 2;
        if (s->runs[mid].begin <= t) low = mid;
        else high = mid;
    }
    return low;
}

/* Goes through the runs of columns [from, to) of one row: `at` and `end` are a run's columns, `entry` the first one's
   entry, `step` how entries go on from there. */
#define EACH_RUN(s, query, from, to)                                                                                   \
    const int64_t slide = (s)->sliding ? (s)->rows[query] : 0, add = (s)->sliding ? 0 : (s)->rows[query];              \
    const run_t *run = (s)->runs + ((s)->run_count > 1 ? run_at(s, (from) + slide) : 0);                               \
    const run_t *const last = (s)->runs + (s)->run_count - 1;                                                          \
    for (int64_t at = (from), end, entry, step;                                                                        \
         at < (to) && (end = run < last && run[1].begin - slide < (to) ? run[1].begin - slide : (to), step = run->step, \
                      entry = add + run->base + step * (at + slide - run->begin), 1);                                   \
         at = end, run++)

typedef float lane_t __attribute__((vector_size(64), aligned(4), may_alias));

/* Runs of a grid are short: straight loops of whole vectors, with nothing to set up. */
static inline void add_run(float *restrict o, const float *restrict x, int64_t count, int first) {
    int64_t j = 0;
    if (first)
        for (; j + 16 <= count; j += 16) *(lane_t *)(o + j) = *(const lane_t *)(x + j);
    else
        for (; j + 16 <= count; j += 16) *(lane_t *)(o + j) += *(const lane_t *)(x + j);
    for (; j < count; j++) o[j] = first ? x[j] : o[j] + x[j];
}

#if defined(__clang__)
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t order_t __attribute__((vector_size(64)));
#define PICK(a, b, ...) __builtin_shuffle(a, b, (order_t){__VA_ARGS__})
#endif

/* The same from x[0], x[-1], x[-2] ... */
static inline void add_back(float *restrict o, const float *restrict x, int64_t count, int first) {
    int64_t j = 0;
    for (; j + 16 <= count; j += 16) {
        const lane_t here = *(const lane_t *)(x - j - 15);
        const lane_t back = PICK(here, here, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        if (first) *(lane_t *)(o + j) = back;
        else *(lane_t *)(o + j) += back;
    }
    for (; j < count; j++) o[j] = first ? x[-j] : o[j] + x[-j];
}

static inline void add_level(float *restrict o, float x, int64_t count, int first) {
    int64_t j = 0;
    if (first)
        for (; j + 16 <= count; j += 16) *(lane_t *)(o + j) = x - (lane_t){0};
    else
        for (; j + 16 <= count; j += 16) *(lane_t *)(o + j) += x;
    for (; j < count; j++) o[j] = first ? x : o[j] + x;
}

#include "bins.c"

#define LAY(value)                                                                                                     \
    do {                                                                                                               \
        if (first)                                                                                                     \
            for (int64_t j = 0; j < count; j++) o[j] = (value);                                                        \
        else                                                                                                           \
            for (int64_t j = 0; j < count; j++) o[j] += (value);                                                       \
    } while (0)

static void lay_row(const source_t *s, float *restrict out, int64_t b, int64_t h, int64_t i, int64_t query, int64_t from,
                    int64_t to, int first) {
    const float *restrict data = s->data + b * s->batch + h * s->head + i * s->row;
    const int64_t col = s->col;
    EACH_RUN(s, query, from, to) {
        const int64_t count = end - at;
        float *restrict o = out + (at - from);
        const float *restrict column = data + at * col;
        if (s->map) {
            const int32_t *restrict map = s->map + entry;
            if (!step) LAY(column[j * col + map[0]]);
            else if (!col) {
                const int64_t done = s->smooth ? add_bins(o, data, map, count, first) : 0;
                for (int64_t j = done; j < count; j++) o[j] = first ? data[map[j]] : o[j] + data[map[j]];
            } else LAY(column[j * col + map[j]]);
        } else if (col) {
            const float *restrict x = column + entry;
            const int64_t stride = col + step;
            LAY(x[j * stride]);
        } else if (step < 0) {
            add_back(o, data + entry, count, first);
        } else if (step) {
            add_run(o, data + entry, count, first);
        } else {
            add_level(o, data[entry], count, first);
        }
    }
}

/* Rows and columns of a grid are two sources with the same runs, one of which stays level in a run: added in one go. */
static int can_pair(const source_t *a, const source_t *b) {
    if (a->map || b->map || a->col || b->col || a->sliding || b->sliding || a->run_count != b->run_count) return 0;
    for (int64_t n = 0; n < a->run_count; n++)
        if (a->runs[n].begin != b->runs[n].begin || a->runs[n].step || b->runs[n].step != 1) return 0;
    return 1;
}

static void lay_pair(const source_t *pair, float *restrict out, int64_t b, int64_t h, int64_t i, int64_t query, int64_t from,
                     int64_t to) {
    const float *restrict levels = pair[0].data + b * pair[0].batch + h * pair[0].head + i * pair[0].row + pair[0].rows[query];
    const float *restrict data = pair[1].data + b * pair[1].batch + h * pair[1].head + i * pair[1].row;
    EACH_RUN(pair + 1, query, from, to) {
        const float level = levels[pair[0].runs[run - pair[1].runs].base];
        const float *restrict x = data + entry;
        float *restrict o = out + (at - from);
        const int64_t count = end - at;
        int64_t j = 0;
        for (; j + 16 <= count; j += 16) *(lane_t *)(o + j) += *(const lane_t *)(x + j) + level;
        for (; j < count; j++) o[j] += x[j] + level;
    }
}

/* Some rows of a source, in squares where it runs along columns. */
static void lay_rows(const source_t *s, float *restrict out, int64_t stride, int64_t b, int64_t h, int64_t top, int64_t rows,
                     int64_t query, int64_t from, int64_t to, int first) {
    const int64_t square = s->col && s->smooth ? rows / SIDE * SIDE : 0;
    const int64_t done = square ? lay_squares(s, out, stride, b, h, query, square, from, to, first) : from;
    for (int64_t i = 0; i < rows; i++) {
        const int64_t at = i < square ? done : from;
        if (at < to) lay_row(s, out + i * stride + at - from, b, h, top + i, query + i, at, to, first);
    }
}

void regard_lay(const source_t *sources, int64_t count, const block_t *block, float *out, int threads) {
    const int64_t rows = block->rows, cols = block->cols, chunks = (rows + CHUNK - 1) / CHUNK;
    const int64_t jobs = block->batch * block->heads * chunks;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t job = 0; job < jobs; job++) {
        const int64_t plane = job / chunks, top = job % chunks * CHUNK, b = plane / block->heads, h = plane % block->heads;
        const int64_t bottom = top + CHUNK < rows ? top + CHUNK : rows;
        for (int64_t left = 0; left < cols; left += TILE) {
            const int64_t right = left + TILE < cols ? left + TILE : cols;
            for (int64_t n = 0; n < count; n++)
                lay_rows(sources + n, out + plane * block->plane + top * cols + left, cols, b, h, top, bottom - top,
                         block->first_row + top, block->first_col + left, block->first_col + right, n == 0);
        }
    }
}

/* Adds x to the entries that lay_row reads, for a source by rows. */
static void pull_row(const source_t *s, const float *restrict x, int64_t b, int64_t h, int64_t i, int64_t query,
                     int64_t from, int64_t to, int thread) {
    float *restrict data = s->data + thread * s->thread + b * s->batch + h * s->head + i * s->row;
    EACH_RUN(s, query, from, to) {
        const int64_t count = end - at;
        const float *restrict y = x + (at - from);
        if (!step) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t j = 0; j < count; j++) sum += y[j];
            data[s->map ? s->map[entry] : entry] += sum;
        } else if (s->map) {
            for (int64_t j = 0; j < count; j++) data[s->map[entry + j]] += y[j];
        } else {
            add_run(data + entry, y, count, 0);
        }
    }
}

/* The same for a source by columns: every row of the block, for some columns. */
static void pull_cols(const source_t *s, const float *x, const block_t *block, int64_t b, int64_t h, int64_t from, int64_t to) {
    float *data = s->data + b * s->batch + h * s->head;
    for (int64_t i = 0; i < block->rows; i++) {
        const float *row = x + i * block->cols - block->first_col;
        EACH_RUN(s, block->first_row + i, from, to)
            for (int64_t j = at, t = entry; j < end; j++, t += step)
                data[j * s->col + (s->map ? s->map[t] : t)] += row[j];
    }
}

/* One row: w, its logits, becomes weights, and d, the gradient of what v is multiplied by, that of the logits. `mass` is
   what the weights sum to; the gradient of the row's log-sum-exp is taken from their mean, which is handed back.
   With dropout, w becomes what v was multiplied by: a weight that is dropped is kept as its negative on the way. */
static inline __attribute__((always_inline)) float weigh_row(float *restrict w, float *restrict d, int64_t cols, float end,
                                                             float mass, float d_end, const drop_t *drop, uint32_t row,
                                                             uint32_t first) {
    const float more = drop ? drop->over : 1;
    const uint32_t least = drop ? drop->least : 0;
    float total = 0, mean = 0;
#pragma omp simd reduction(+ : total, mean)
    for (uint32_t j = 0; j < (uint32_t)cols; j++) {
        const float e = quick_exp(w[j] - end);
        total += e;
        if (drop) {
            const int kept = is_kept(row, first + j, least);
            const float g = kept ? d[j] * more : 0;
            w[j] = kept ? e : -e;
            d[j] = g;
            mean += e * g;
        } else {
            w[j] = e;
            mean += e * d[j];
        }
    }
    /* exp(logit - lse) carries the rounding of lse; the rows are whole, so their sum tells it */
    const float fix = total > 0 ? mass / total : total; /* 0, or NaN */
    const float middle = mean * fix - d_end;
    for (int64_t j = 0; j < cols; j++) {
        const float e = (drop ? fabsf(w[j]) : w[j]) * fix;
        d[j] = e * (d[j] - middle);
        w[j] = drop ? (w[j] < 0 ? 0 : e * more) : e;
    }
    return middle;
}

/* logits becomes weights, grads (of the weights) becomes the gradient of the logits; ends is the log-sum-exp of each
   row (+inf where it sees nothing), mass what its weights sum to (1, or less with a sink), d_ends the gradient of its
   log-sum-exp; inner [rows] is handed back for the sink. */
void regard_weigh(const source_t *pulled, int64_t count, const block_t *block, float *logits, float *grads, const float *ends,
                  const float *mass, const float *d_ends, float *inner, const drop_t *drop, int threads) {
    const int64_t rows = block->rows, cols = block->cols, planes = block->batch * block->heads;
#pragma omp parallel num_threads(threads)
    {
        const int thread = omp_get_thread_num();
#pragma omp for schedule(static)
        for (int64_t job = 0; job < planes * rows; job++) {
            const int64_t plane = job / rows, i = job % rows, b = plane / block->heads, h = plane % block->heads;
            float *w = logits + job * cols, *d = grads + job * cols;
            if (drop->seeds) {
                const int64_t seed = drop->seeds[b * drop->batch + h * drop->head];
                inner[job] = weigh_row(w, d, cols, ends[job], mass[job], d_ends[job], drop,
                                       hash_of_row(seed, block->first_row + i), (uint32_t)block->first_col);
            } else inner[job] = weigh_row(w, d, cols, ends[job], mass[job], d_ends[job], NULL, 0, 0);
            for (int64_t n = 0; n < count; n++)
                if (!pulled[n].col)
                    pull_row(pulled + n, d, b, h, i, block->first_row + i, block->first_col, block->first_col + cols, thread);
        }
        const int64_t tiles = (cols + 255) / 256;
        for (int64_t n = 0; n < count; n++) {
            if (!pulled[n].col) continue;
#pragma omp for schedule(static)
            for (int64_t job = 0; job < planes * tiles; job++) {
                const int64_t plane = job / tiles, left = job % tiles * 256, right = left + 256 < cols ? left + 256 : cols;
                pull_cols(pulled + n, grads + plane * rows * cols, block, plane / block->heads, plane % block->heads,
                          block->first_col + left, block->first_col + right);
            }
        }
    }
}

#include "look.c"
#include "attend.c"
#include "decode.c"
