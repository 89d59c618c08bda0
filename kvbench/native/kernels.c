/* Attention over ragged segments and selection on a CPU; see __init__.py.

   Every sum has a fixed order within its segment, so a result depends neither on the rest of a batch nor on where
   entries lie. Functions that need memory return 0, or 1 if there is none. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef int64_t i64;
typedef union { float number; uint32_t bits; } word;

/* Entries that a segment reads in K and V of a prefill: rows `column[0 .. count]` of its KV head. */
typedef struct {
    const char *key, *value;
    const int32_t *column;
    i64 count;
} shared_entries;

INLINE float number_at(const char *row, i64 index, int is_bf16)
{
    if (!is_bf16)
        return ((const float *)row)[index];
    word widened = {.bits = (uint32_t)((const uint16_t *)row)[index] << 16};
    return widened.number;
}

INLINE void store_number(char *row, i64 index, float number, int is_bf16)
{
    word whole = {number};
    uint32_t rounded = (whole.bits + 0x7FFF + ((whole.bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    if (is_bf16)
        ((uint16_t *)row)[index] = (uint16_t)(number == number ? rounded : 0x7FC0);
    else
        ((float *)row)[index] = number;
}

/* exp(x) for x <= 0, with a relative error of 2e-7; NaN stays NaN. */
INLINE float exponential(float x)
{
    float y = x * 1.4426950408889634f;
    y = y < -126.0f ? -126.0f : y;
    float whole = rintf(y), part = y - whole;
    float power = (1.535336188319500e-4f * part + 1.339887440266574e-3f) * part + 9.618437357674640e-3f;
    power = (power * part + 5.550332471162809e-2f) * part + 2.402264791363012e-1f;
    power = (power * part + 6.931472028550421e-1f) * part + 1.0f;
    word scale = {.bits = (uint32_t)((int32_t)whole + 127) << 23};
    return power * scale.number;
}

#if defined(__AVX512F__)
#define WIDTH 16 /* numbers in a vector */
#elif defined(__AVX__)
#define WIDTH 8
#else
#define WIDTH 4
#endif

/* Return the largest of some numbers, in lanes: a plain loop waits for one comparison after the other. */
INLINE float largest_of(const float *numbers, i64 count)
{
    float in_lane[WIDTH], largest = -INFINITY;
    i64 whole = count / WIDTH * WIDTH;
    for (int lane = 0; lane < WIDTH; lane++)
        in_lane[lane] = -INFINITY;
    for (i64 j = 0; j < whole; j += WIDTH)
        for (int lane = 0; lane < WIDTH; lane++)
            in_lane[lane] = numbers[j + lane] > in_lane[lane] ? numbers[j + lane] : in_lane[lane];
    for (int lane = 0; lane < WIDTH; lane++)
        largest = in_lane[lane] > largest ? in_lane[lane] : largest;
    for (i64 j = whole; j < count; j++)
        largest = numbers[j] > largest ? numbers[j] : largest;
    return largest;
}

/* Replace the first `count` logits by exp(logit - largest); return the reciprocal of their sum. */
INLINE float exponentials(float *logits, i64 count)
{
    float largest = largest_of(logits, count), total = 0.0f;
    for (i64 j = 0; j < count; j++) {
        logits[j] = exponential(logits[j] - largest);
        total += logits[j];
    }
    return 1.0f / total;
}

/* --- attention ------------------------------------------------------------------------------------------------- */

#define TILE (WIDTH == 16 ? 8 : 4) /* keys, or channels, whose sums fit in registers for two vectors of queries */
#define BLOCK 64                   /* values that stay in the nearest cache */
#define MOST_FEW 4
#define AHEAD 32 /* keys that are fetched before they are needed */
#define MOST_WIDE (2 * WIDTH)
#define ENOUGH 8 /* more queries than these are computed side by side, though some lanes may be idle */

typedef float lanes __attribute__((vector_size(4 * WIDTH), may_alias));
#define VECTOR(NUMBERS, I) ((lanes *)(NUMBERS))[I]

/* Some queries of a segment: query `r` sees the first `seen[r]` entries, and no fewer than those before it. */
typedef struct {
    i64 dim, value_dim;
    int is_bf16, rows;
    float scale;
    const char **key_rows, **value_rows;
    const char *query_rows[MOST_WIDE];
    char *output_rows[MOST_WIDE];
    i64 seen[MOST_WIDE], stride;
    /* Memory for queries, outputs, BLOCK keys or values, and weights: exponentials of logits, [rows, stride] of few
       queries and [entries, width] of those side by side. `inverse` receives the reciprocals of their sums. */
    float *query, *sums, *numbers, *weights, inverse[MOST_WIDE];
} attention;

#define PARAMETERS                                                                                                    \
    i64 rows, const char *const *key_rows, const char *const *value_rows, const i64 *all_seen,                        \
        const char *const *query_rows, char *const *output_rows, float scale, i64 stride, float *restrict query,      \
        float *restrict sums, float *restrict numbers, float *restrict weights, float *restrict inverse
#define ARGUMENTS(A)                                                                                                  \
    (A)->rows, (A)->key_rows, (A)->value_rows, (A)->seen, (A)->query_rows, (A)->output_rows, (A)->scale, (A)->stride, \
        (A)->query, (A)->sums, (A)->numbers, (A)->weights, (A)->inverse

/* Attention of up to MOST_FEW queries. */
INLINE void attend_few(int count, i64 dim, i64 value_dim, int is_bf16, PARAMETERS)
{
    i64 entries = all_seen[count - 1], number = is_bf16 ? 2 : 4;
    for (int r = 0; r < count; r++)
        for (i64 d = 0; d < dim; d++)
            query[r * dim + d] = number_at(query_rows[r], d, is_bf16) * scale;
    for (i64 j = 0; j < entries; j++) {
        /* The processor does not foresee rows that columns choose: keys that come soon, and the values for below. */
        for (i64 byte = 0; byte < dim * number && j + AHEAD < entries; byte += 64)
            __builtin_prefetch(key_rows[j + AHEAD] + byte);
        for (i64 byte = 0; byte < value_dim * number; byte += 64)
            __builtin_prefetch(value_rows[j] + byte, 0, 2);
        for (int r = 0; r < count; r++) {
            float logit = 0.0f;
            for (i64 d = 0; d < dim; d++)
                logit += query[r * dim + d] * number_at(key_rows[j], d, is_bf16);
            weights[r * stride + j] = logit;
        }
    }
    for (int r = 0; r < count; r++) {
        inverse[r] = all_seen[r] ? exponentials(weights + r * stride, all_seen[r]) : 0.0f;
        memset(weights + r * stride + all_seen[r], 0, sizeof(float) * (entries - all_seen[r]));
    }
    memset(sums, 0, sizeof(float) * count * value_dim);
    for (i64 j = 0; j < entries; j++)
        for (int r = 0; r < count; r++) {
            float weight = weights[r * stride + j];
            for (i64 d = 0; d < value_dim; d++)
                sums[r * value_dim + d] += weight * number_at(value_rows[j], d, is_bf16);
        }
    for (int r = 0; r < count; r++)
        for (i64 d = 0; d < value_dim; d++)
            store_number(output_rows[r], d, sums[r * value_dim + d] * inverse[r], is_bf16);
}

/* Call attend_few with constants where they are known, so that the compiler keeps the sums in registers. */
#define WITH_TYPE(ATTEND, R, D, V) a->is_bf16 ? ATTEND(R, D, V, 1, ARGUMENTS(a)) : ATTEND(R, D, V, 0, ARGUMENTS(a))
#define WITH_SIZE(R, D)                                                                                               \
    if (a->dim == D && a->value_dim == D)                                                                             \
        WITH_TYPE(attend_few, R, D, D);                                                                               \
    else
#define FEW(R)                                                                                                        \
    static void few_##R(attention *a)                                                                                 \
    {                                                                                                                 \
        WITH_SIZE(R, 32) WITH_SIZE(R, 64) WITH_SIZE(R, 128) WITH_TYPE(attend_few, R, a->dim, a->value_dim);           \
    }
FEW(1) FEW(2) FEW(3) FEW(4)
static void (*const few[MOST_FEW])(attention *) = {few_1, few_2, few_3, few_4};

/* Return `count` numbers as float32, copied to `copy` with zeros up to `padded` if they are not that already. */
INLINE const float *as_floats(const char *row, i64 count, i64 padded, int is_bf16, float *copy)
{
    if (!is_bf16 && count == padded)
        return (const float *)row;
    for (i64 d = 0; d < count; d++)
        copy[d] = number_at(row, d, is_bf16);
    for (i64 d = count; d < padded; d++)
        copy[d] = 0.0f;
    return copy;
}

/* Attention of up to `vectors * WIDTH` queries side by side: each lane of a vector is a query. No sum runs across lanes,
   so a query's result does not depend on its lane. */
INLINE void attend_wide(int vectors, i64 dim, i64 value_dim, int is_bf16, PARAMETERS)
{
    int width = vectors * WIDTH;
    i64 padded = (value_dim + TILE - 1) / TILE * TILE, entries = all_seen[rows - 1];
    int32_t seen[MOST_WIDE];
    float largest[MOST_WIDE], total[MOST_WIDE];
    for (int r = 0; r < width; r++) {
        seen[r] = r < rows ? (int32_t)all_seen[r] : 0;
        largest[r] = -INFINITY, total[r] = 0.0f;
    }
    memset(query, 0, sizeof(float) * width * dim);
    for (int r = 0; r < rows; r++) /* apart, or the compiler gathers one number of every row */
        for (i64 d = 0; d < dim; d++)
            query[d * width + r] = number_at(query_rows[r], d, is_bf16) * scale;
    for (i64 j = 0; j < entries; j += TILE) {
        const float *keys[TILE];
        lanes logits[TILE][2] = {0};
        for (int k = 0; k < TILE; k++)
            keys[k] = as_floats(key_rows[j + k < entries ? j + k : j], dim, dim, is_bf16, numbers + k * dim);
        for (i64 d = 0; d < dim; d++)
            for (int k = 0; k < TILE; k++)
                for (int v = 0; v < vectors; v++)
                    logits[k][v] += VECTOR(query, d * vectors + v) * keys[k][d];
        for (int k = 0; k < TILE; k++)
            for (int v = 0; v < vectors; v++)
                VECTOR(weights, (j + k) * vectors + v) = logits[k][v];
        for (i64 i = j; i < j + TILE; i++)
            for (int r = 0; r < width; r++) {
                float logit = (int32_t)i < seen[r] ? weights[i * width + r] : -INFINITY;
                largest[r] = logit > largest[r] ? logit : largest[r];
            }
    }
    for (i64 j = 0; j < entries; j++)
        for (int r = 0; r < width; r++) {
            float power = exponential(weights[j * width + r] - largest[r]);
            power = (int32_t)j < seen[r] ? power : 0.0f;
            weights[j * width + r] = power;
            total[r] += power;
        }
    for (int r = 0; r < rows; r++)
        inverse[r] = seen[r] ? 1.0f / total[r] : 0.0f;
    memset(sums, 0, sizeof(float) * width * padded);
    for (i64 first = 0; first < entries; first += BLOCK) {
        const float *values[BLOCK];
        int count = entries - first < BLOCK ? (int)(entries - first) : BLOCK;
        for (int j = 0; j < count; j++)
            values[j] = as_floats(value_rows[first + j], value_dim, padded, is_bf16, numbers + j * padded);
        for (i64 d = 0; d < padded; d += TILE) {
            lanes parts[TILE][2];
            for (int k = 0; k < TILE; k++)
                for (int v = 0; v < vectors; v++)
                    parts[k][v] = VECTOR(sums, (d + k) * vectors + v);
            for (int j = 0; j < count; j++)
                for (int k = 0; k < TILE; k++)
                    for (int v = 0; v < vectors; v++)
                        parts[k][v] += VECTOR(weights, (first + j) * vectors + v) * values[j][d + k];
            for (int k = 0; k < TILE; k++)
                for (int v = 0; v < vectors; v++)
                    VECTOR(sums, (d + k) * vectors + v) = parts[k][v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (i64 d = 0; d < value_dim; d++)
            store_number(output_rows[r], d, sums[d * width + r] * inverse[r], is_bf16);
}

#define WIDE(V)                                                                                                       \
    static void wide_##V(attention *a)                                                                                \
    {                                                                                                                 \
        WITH_TYPE(attend_wide, V, a->dim, a->value_dim);                                                              \
    }
WIDE(1) WIDE(2)

/* Where attention that entries receive is summed: [entries, group] in the order of the segments; NULL: not at all. */
typedef struct {
    float *weights, *squares;
    const i64 *first;       /* the first entry of every segment */
    const uint8_t *counted; /* queries that are tokens, [B, n]; NULL: all */
} received;

/* Add the weights of a query among few, which is head `g` of its group, to sums [entries, group].
   A loop for each sum, here and below: in one, whether products are rounded would depend on what is asked for. */
INLINE void add_few(attention *a, int r, i64 group, i64 g, float *to_weights, float *to_squares)
{
    float *weights = a->weights + r * a->stride, inverse = a->inverse[r];
    i64 seen = a->seen[r];
    for (i64 j = 0; j < seen; j++)
        weights[j] *= inverse;
    for (i64 j = 0; j < seen && to_weights; j++)
        to_weights[j * group + g] += weights[j];
    for (i64 j = 0; j < seen && to_squares; j++)
        to_squares[j * group + g] += weights[j] * weights[j];
}

/* Add the weights of queries side by side to sums of every lane, [entries, MOST_WIDE]. */
INLINE void add_wide(attention *a, i64 entries, float *restrict to_weights, float *restrict to_squares)
{
    int width = a->rows > WIDTH ? 2 * WIDTH : WIDTH, counts[MOST_WIDE];
    const float *restrict weights = a->weights;
    float inverse[MOST_WIDE];
    for (int r = 0; r < width; r++) {
        counts[r] = r < a->rows && a->seen[r];
        inverse[r] = counts[r] ? a->inverse[r] : 0.0f;
    }
    for (i64 j = 0; j < entries && to_weights; j++)
        for (int r = 0; r < width; r++)
            to_weights[j * MOST_WIDE + r] += counts[r] ? weights[j * width + r] * inverse[r] : 0.0f;
    for (i64 j = 0; j < entries && to_squares; j++)
        for (int r = 0; r < width; r++) {
            float weight = counts[r] ? weights[j * width + r] * inverse[r] : 0.0f;
            to_squares[j * MOST_WIDE + r] += weight * weight;
        }
}

/* Add sums of lanes to those of query heads; lanes repeat the heads of a group. */
INLINE void add_repeated(i64 group, const float *lane_sums, i64 entries, float *restrict sums)
{
    for (i64 j = 0; j < entries; j++)
        for (i64 g = 0; g < group; g++) {
            float total = 0.0f;
            for (i64 r = g; r < MOST_WIDE / group * group; r += group)
                total += lane_sums[j * MOST_WIDE + r];
            sums[j * group + g] += total;
        }
}

/* Call add_repeated with constants where they are known: twice as fast. */
static void add_lanes(i64 group, const float *lane_sums, i64 entries, float *sums)
{
    group == 2   ? add_repeated(2, lane_sums, entries, sums)
    : group == 3 ? add_repeated(3, lane_sums, entries, sums)
    : group == 4 ? add_repeated(4, lane_sums, entries, sums)
                 : add_repeated(group, lane_sums, entries, sums);
}

/* Attention of new queries over ragged segments.

   Segment `s = b * kv_heads + h` reads its shared entries and then rows `start[s] .. start[s] + length[s]` of `key` and
   `value`, whose columns ascend. Query `i` has the column `first_column + i` and sees no later one; shared entries
   precede all queries. Strides of `query` [B, H_q, n, dim] are in bytes; `output` is [B, n, H_q, value_dim]. Segments
   are computed head by head, as sequences that share a prefill find one head of it in the cache: `first .. last` of
   that order. What entries receive is added to `sums_to`, which is for segments that share nothing. */
int ragged_attention(const char *query_states, i64 query_batch, i64 query_head, i64 query_step, const char *key,
                     const char *value, const int32_t *columns, const i64 *start, const i64 *length,
                     const shared_entries *shared, i64 first, i64 last, i64 batches, i64 kv_heads, i64 group,
                     i64 queries, i64 dim, i64 value_dim, i64 first_column, float scale, int is_bf16,
                     const received *sums_to, char *output)
{
    i64 number = is_bf16 ? 2 : 4, most = 1, total = queries * group;
    i64 key_bytes = dim * number, value_bytes = value_dim * number, query_heads = kv_heads * group;
    for (i64 i = first; i < last; i++) {
        i64 s = i % batches * kv_heads + i / batches, entries = length[s] + (shared ? shared[s].count : 0);
        most = entries > most ? entries : most;
    }
    int is_wide = total > ENOUGH && group <= MOST_WIDE, width = is_wide ? MOST_WIDE : MOST_FEW;
    int step = is_wide && sums_to ? MOST_WIDE / (int)group * (int)group : width; /* a lane always has the same head */
    attention a = {dim, value_dim, is_bf16, .scale = scale, .stride = (most + 15) / 16 * 16};
    i64 channels = ((dim > value_dim ? dim : value_dim) + 15) / 16 * 16;
    i64 lane_sums = is_wide && sums_to ? width * a.stride : 0;
    a.key_rows = malloc(sizeof(char *) * most);
    a.value_rows = malloc(sizeof(char *) * most);
    a.query = aligned_alloc(64, sizeof(float) * ((BLOCK + 2 * width) * channels + width * a.stride + 2 * lane_sums));
    int failed = !(a.key_rows && a.value_rows && a.query);
    a.sums = a.query + width * channels, a.numbers = a.sums + width * channels, a.weights = a.numbers + BLOCK * channels;
    float *lane_weights = sums_to && sums_to->weights ? a.weights + width * a.stride : NULL;
    float *lane_squares = sums_to && sums_to->squares ? a.weights + width * a.stride + lane_sums : NULL;
    for (i64 i = first; i < last && !failed; i++) {
        i64 batch = i % batches, head = i / batches, s = batch * kv_heads + head, own = length[s];
        i64 before = shared ? shared[s].count : 0;
        float *to_weights = lane_weights ? sums_to->weights + sums_to->first[s] * group : NULL;
        float *to_squares = lane_squares ? sums_to->squares + sums_to->first[s] * group : NULL;
        for (i64 j = 0; j < before; j++) {
            a.key_rows[j] = shared[s].key + shared[s].column[j] * key_bytes;
            a.value_rows[j] = shared[s].value + shared[s].column[j] * value_bytes;
        }
        for (i64 j = 0; j < own; j++) {
            a.key_rows[before + j] = key + (start[s] + j) * key_bytes;
            a.value_rows[before + j] = value + (start[s] + j) * value_bytes;
        }
        memset(a.weights + width * a.stride, 0, sizeof(float) * 2 * lane_sums);
        i64 visible = queries == 1 ? own : 0;
        for (i64 row = 0; row < total; row += step) {
            a.rows = total - row < step ? (int)(total - row) : step;
            for (int r = 0; r < a.rows; r++) {
                i64 index = (row + r) / group, query_index = head * group + (row + r) % group;
                while (visible < own && columns[start[s] + visible] <= first_column + index)
                    visible++;
                a.seen[r] = before + visible;
                a.query_rows[r] = query_states + batch * query_batch + query_index * query_head + index * query_step;
                a.output_rows[r] = output + ((batch * queries + index) * query_heads + query_index) * value_bytes;
            }
            (!is_wide ? few[a.rows - 1] : a.rows > WIDTH ? wide_2 : wide_1)(&a);
            for (int r = 0; r < a.rows && sums_to && sums_to->counted; r++)
                a.seen[r] *= sums_to->counted[batch * queries + (row + r) / group] != 0;
            if (is_wide && sums_to)
                add_wide(&a, before + visible, lane_weights, lane_squares);
            for (int r = 0; r < a.rows && sums_to && !is_wide; r++)
                add_few(&a, r, group, (row + r) % group, to_weights, to_squares);
        }
        add_lanes(group, lane_weights, is_wide && to_weights ? own : 0, to_weights);
        add_lanes(group, lane_squares, is_wide && to_squares ? own : 0, to_squares);
    }
    free(a.key_rows), free(a.value_rows), free(a.query);
    return failed;
}

/* --- selection ------------------------------------------------------------------------------------------------- */

/* Rows of a tensor, `stride` numbers apart; row `r` of an operation is row `r % rows`. */
typedef struct {
    const void *data;
    i64 stride, rows;
} row_view;

#define ROW(view, type, r) ((const type *)(view).data + (r) % (view).rows * (view).stride)

/* Integers that order entries; see kvbench.parts.order_key. Rows have `count` entries. */
void entry_keys(const row_view *inputs, i64 rows, i64 count, i64 *keys)
{
    for (i64 r = 0; r < rows; r++) {
        const float *value = ROW(inputs[0], float, r);
        const int8_t *protect = ROW(inputs[1], int8_t, r);
        const i64 *position = ROW(inputs[2], i64, r);
        const uint8_t *valid = ROW(inputs[3], uint8_t, r);
        for (i64 j = 0; j < count; j++) {
            word score = {value[j]};
            uint32_t bits = score.bits == 0x80000000u ? 0 : score.bits; /* no negative zero */
            i64 ordered = (bits & 0x80000000u ? -1 - (i64)(bits & 0x7FFFFFFFu) : (i64)bits) + ((i64)1 << 31);
            i64 class = protect[j], place = position[j];
            ordered = class > 1 ? 0 : ordered;
            place = class == 3 ? ((i64)1 << 28) - 1 - place : place;
            keys[r * count + j] = valid[j] ? ((class << 32) + ordered) * ((i64)1 << 28) + place : -1;
        }
    }
}

/* Return the element that would be at `rank` if `keys` were sorted in ascending order; `keys` are permuted. */
static i64 ranked(i64 *keys, i64 count, i64 rank)
{
    i64 low = 0, high = count - 1;
    uint64_t state = 0x9E3779B97F4A7C15u;
    while (low < high) {
        state = state * 6364136223846793005u + 1442695040888963407u; /* any order of the input costs the same */
        i64 pivot = keys[low + (i64)((state >> 33) % (uint64_t)(high - low + 1))], i = low, j = high;
        while (i <= j) {
            while (keys[i] < pivot)
                i++;
            while (keys[j] > pivot)
                j--;
            if (i <= j) {
                i64 key = keys[i];
                keys[i++] = keys[j];
                keys[j--] = key;
            }
        }
        if (rank <= j)
            high = j;
        else if (rank >= i)
            low = i;
        else
            return keys[rank];
    }
    return keys[rank];
}

/* Mark the largest keys of rows, `share[r]` of row `r`, the first of equal ones; negative keys are never marked.

   There are `distinct` rows of keys; row `r` has those of `r % distinct`. */
int mark_largest(const i64 *keys, i64 distinct, i64 count, const i64 *share, i64 rows, uint8_t *marks)
{
    i64 *permuted = malloc(sizeof(i64) * (count ? count : 1));
    if (!permuted)
        return 1;
    for (i64 d = 0; d < distinct; d++) {
        const i64 *row = keys + d * count;
        memcpy(permuted, row, sizeof(i64) * count);
        for (i64 r = d; r < rows; r += distinct) {
            uint8_t *mark = marks + r * count;
            i64 wanted = share[r] < count ? share[r] : count;
            if (wanted <= 0) {
                memset(mark, 0, count);
                continue;
            }
            i64 threshold = ranked(permuted, count, count - wanted), above = 0;
            for (i64 j = 0; j < count; j++) {
                mark[j] = (row[j] > threshold) & (row[j] >= 0);
                above += row[j] > threshold;
            }
            for (i64 j = 0, equal = wanted - above; threshold >= 0 && equal > 0 && j < count; j++)
                if (row[j] == threshold) {
                    mark[j] = 1;
                    equal--;
                }
        }
    }
    free(permuted);
    return 0;
}

/* Write the columns of the marked entries of every row, row by row, and the number of them in each. */
void marked_columns(const uint8_t *marks, i64 rows, i64 count, int32_t *columns, i64 *lengths)
{
    i64 total = 0;
    for (i64 r = 0; r < rows; r++) {
        i64 before = total;
        for (i64 j = 0; j < count; j++) {
            columns[total] = (int32_t)j; /* overwritten by the next one unless it is marked */
            total += marks[r * count + j];
        }
        lengths[r] = total - before;
    }
}
