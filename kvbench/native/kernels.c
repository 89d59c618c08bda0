/* Attention over ragged segments and selection on a CPU; see __init__.py.

   Every sum has a fixed order within its segment, so a result depends neither on the rest of a batch nor on where
   entries lie. Functions that need memory return 0, or 1 if there is none. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef int64_t i64;

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
    uint32_t bits = (uint32_t)((const uint16_t *)row)[index] << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE void store_number(char *row, i64 index, float number, int is_bf16)
{
    if (!is_bf16) {
        ((float *)row)[index] = number;
        return;
    }
    uint32_t bits;
    memcpy(&bits, &number, 4);
    uint32_t rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    ((uint16_t *)row)[index] = (uint16_t)(number == number ? rounded : 0x7FC0);
}

/* exp(x) for x <= 0, with a relative error of 2e-7; NaN stays NaN. */
INLINE float exponential(float x)
{
    float y = x * 1.4426950408889634f;
    y = y < -126.0f ? -126.0f : y;
    float whole = rintf(y), part = y - whole;
    float power = 1.535336188319500e-4f;
    power = power * part + 1.339887440266574e-3f;
    power = power * part + 9.618437357674640e-3f;
    power = power * part + 5.550332471162809e-2f;
    power = power * part + 2.402264791363012e-1f;
    power = power * part + 6.931472028550421e-1f;
    power = power * part + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)whole + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return power * scale;
}

#define LANES 16

/* Return the largest of some numbers, in lanes: a plain loop waits for one comparison after the other. */
INLINE float largest_of(const float *numbers, i64 count)
{
    float lanes[LANES], largest = -INFINITY;
    i64 whole = count / LANES * LANES;
    for (int lane = 0; lane < LANES; lane++)
        lanes[lane] = -INFINITY;
    for (i64 j = 0; j < whole; j += LANES)
        for (int lane = 0; lane < LANES; lane++)
            lanes[lane] = numbers[j + lane] > lanes[lane] ? numbers[j + lane] : lanes[lane];
    for (int lane = 0; lane < LANES; lane++)
        largest = lanes[lane] > largest ? lanes[lane] : largest;
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

/* Attention of some queries over the entries of one segment; query `r` sees the first `seen[r]` of them.

   `query` and `sums` are memory for [rows, dim] and [rows, value_dim]. `weights`, [rows, stride], receives the
   exponentials of the logits, and `inverse` the reciprocals of their sums. */
INLINE void attend_rows(int rows, i64 dim, i64 value_dim, int is_bf16, const char *const *key_rows,
                        const char *const *value_rows, const i64 *seen, const char *const *query_rows, float scale,
                        float *restrict query, float *restrict sums, float *restrict weights, float *restrict inverse,
                        i64 stride, char *const *output_rows)
{
    i64 entries = 0;
    for (int r = 0; r < rows; r++) {
        entries = seen[r] > entries ? seen[r] : entries;
        for (i64 d = 0; d < dim; d++)
            query[r * dim + d] = number_at(query_rows[r], d, is_bf16) * scale;
    }
    for (i64 j = 0; j < entries; j++) {
        const char *key = key_rows[j];
        for (int r = 0; r < rows; r++) {
            float logit = 0.0f;
            for (i64 d = 0; d < dim; d++)
                logit += query[r * dim + d] * number_at(key, d, is_bf16);
            weights[r * stride + j] = logit;
        }
    }
    for (int r = 0; r < rows; r++) {
        inverse[r] = seen[r] ? exponentials(weights + r * stride, seen[r]) : 0.0f;
        memset(weights + r * stride + seen[r], 0, sizeof(float) * (entries - seen[r]));
    }
    memset(sums, 0, sizeof(float) * rows * value_dim);
    for (i64 j = 0; j < entries; j++) {
        const char *value = value_rows[j];
        for (int r = 0; r < rows; r++) {
            float weight = weights[r * stride + j];
            for (i64 d = 0; d < value_dim; d++)
                sums[r * value_dim + d] += weight * number_at(value, d, is_bf16);
        }
    }
    for (int r = 0; r < rows; r++)
        for (i64 d = 0; d < value_dim; d++)
            store_number(output_rows[r], d, sums[r * value_dim + d] * inverse[r], is_bf16);
}

#define MOST_ROWS 4

/* Call attend_rows with constants where they are known, so that the compiler keeps the sums in registers. */
#define WITH_SIZES(R, D, V, H)                                                                                        \
    attend_rows(R, D, V, H, key_rows, value_rows, seen, query_rows, scale, query, sums, weights, inverse, stride,      \
                output_rows)
#define WITH_TYPE(R, D, V)                                                                                            \
    do {                                                                                                              \
        if (is_bf16)                                                                                                  \
            WITH_SIZES(R, D, V, 1);                                                                                   \
        else                                                                                                          \
            WITH_SIZES(R, D, V, 0);                                                                                   \
    } while (0)
#define ATTEND(R)                                                                                                     \
    static void attend_##R(i64 dim, i64 value_dim, int is_bf16, const char *const *key_rows,                          \
                           const char *const *value_rows, const i64 *seen, const char *const *query_rows,             \
                           float scale, float *query, float *sums, float *weights, float *inverse, i64 stride,        \
                           char *const *output_rows)                                                                  \
    {                                                                                                                 \
        if (dim == 32 && value_dim == 32)                                                                             \
            WITH_TYPE(R, 32, 32);                                                                                     \
        else if (dim == 64 && value_dim == 64)                                                                        \
            WITH_TYPE(R, 64, 64);                                                                                     \
        else if (dim == 128 && value_dim == 128)                                                                      \
            WITH_TYPE(R, 128, 128);                                                                                   \
        else                                                                                                          \
            WITH_TYPE(R, dim, value_dim);                                                                             \
    }
ATTEND(1)
ATTEND(2)
ATTEND(3)
ATTEND(4)

static void (*const attend_few[MOST_ROWS])(i64, i64, int, const char *const *, const char *const *, const i64 *,
                                           const char *const *, float, float *, float *, float *, float *, i64,
                                           char *const *) = {attend_1, attend_2, attend_3, attend_4};

/* Where attention that entries receive is summed: [entries, group] in the order of the segments; NULL: not at all. */
typedef struct {
    float *weights, *squares;
    const i64 *first;       /* the first entry of every segment */
    const uint8_t *counted; /* queries that are tokens, [B, n]; NULL: all */
} received;

/* Attention of new queries over ragged segments.

   Segment `s = b * kv_heads + h` reads its shared entries and then rows `start[s] .. start[s] + length[s]` of `key` and
   `value`, whose columns ascend. Query `i` has the column `first_column + i` and sees no later one; shared entries
   precede all queries. Strides of `query` [B, H_q, n, dim] are in bytes; `output` is [B, n, H_q, value_dim]. Segments
   `first .. last` are computed. What entries receive is added to `sums_to`, which is for segments that share nothing. */
int ragged_attention(const char *query_states, i64 query_batch, i64 query_head, i64 query_step, const char *key,
                     const char *value, const int32_t *columns, const i64 *start, const i64 *length,
                     const shared_entries *shared, i64 first, i64 last, i64 kv_heads, i64 group, i64 queries, i64 dim,
                     i64 value_dim, i64 first_column, float scale, int is_bf16, const received *sums_to, char *output)
{
    i64 number = is_bf16 ? 2 : 4, most = 1;
    i64 key_bytes = dim * number, value_bytes = value_dim * number, query_heads = kv_heads * group;
    for (i64 s = first; s < last; s++) {
        i64 entries = length[s] + (shared ? shared[s].count : 0);
        most = entries > most ? entries : most;
    }
    i64 stride = (most + 15) / 16 * 16;
    const char **key_rows = malloc(sizeof(char *) * most), **value_rows = malloc(sizeof(char *) * most);
    float *weights = malloc(sizeof(float) * MOST_ROWS * stride);
    float *query = malloc(sizeof(float) * MOST_ROWS * dim), *sums = malloc(sizeof(float) * MOST_ROWS * value_dim);
    int failed = !(key_rows && value_rows && weights && query && sums);
    for (i64 s = first; s < last && !failed; s++) {
        i64 own = length[s], before = shared ? shared[s].count : 0, batch = s / kv_heads, head = s % kv_heads;
        for (i64 j = 0; j < before; j++) {
            key_rows[j] = shared[s].key + shared[s].column[j] * key_bytes;
            value_rows[j] = shared[s].value + shared[s].column[j] * value_bytes;
        }
        for (i64 j = 0; j < own; j++) {
            key_rows[before + j] = key + (start[s] + j) * key_bytes;
            value_rows[before + j] = value + (start[s] + j) * value_bytes;
        }
        i64 total = queries * group, visible = 0;
        for (i64 row = 0; row < total;) {
            int rows = total - row < MOST_ROWS ? (int)(total - row) : MOST_ROWS;
            const char *query_rows[MOST_ROWS];
            char *output_rows[MOST_ROWS];
            i64 seen[MOST_ROWS];
            float inverse[MOST_ROWS];
            for (int r = 0; r < rows; r++) {
                i64 step = (row + r) / group, query_index = head * group + (row + r) % group;
                if (queries == 1)
                    visible = own;
                while (visible < own && columns[start[s] + visible] <= first_column + step)
                    visible++;
                seen[r] = before + visible;
                query_rows[r] = query_states + batch * query_batch + query_index * query_head + step * query_step;
                output_rows[r] = output + ((batch * queries + step) * query_heads + query_index) * value_bytes;
            }
            attend_few[rows - 1](dim, value_dim, is_bf16, key_rows, value_rows, seen, query_rows, scale, query, sums,
                                 weights, inverse, stride, output_rows);
            for (int r = 0; r < rows && sums_to; r++) {
                i64 step = (row + r) / group, entry = sums_to->first[s] * group + (row + r) % group;
                float *weight = weights + r * stride;
                if (sums_to->counted && !sums_to->counted[batch * queries + step])
                    continue;
                /* A loop for each sum: in one loop, whether products are rounded would depend on what is asked for. */
                for (i64 j = 0; j < seen[r]; j++)
                    weight[j] *= inverse[r];
                for (i64 j = 0; j < seen[r] && sums_to->weights; j++)
                    sums_to->weights[entry + j * group] += weight[j];
                for (i64 j = 0; j < seen[r] && sums_to->squares; j++)
                    sums_to->squares[entry + j * group] += weight[j] * weight[j];
            }
            row += rows;
        }
    }
    free(key_rows);
    free(value_rows);
    free(weights);
    free(query);
    free(sums);
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
            uint32_t bits;
            memcpy(&bits, value + j, 4);
            bits = bits == 0x80000000u ? 0 : bits; /* no negative zero */
            i64 ordered = (bits & 0x80000000u ? -1 - (i64)(bits & 0x7FFFFFFFu) : (i64)bits) + ((i64)1 << 31);
            i64 class = protect[j], place = position[j];
            ordered = class > 1 ? 0 : ordered;
            place = class == 3 ? ((i64)1 << 28) - 1 - place : place;
            i64 key = ((class << 32) + ordered) * ((i64)1 << 28) + place;
            keys[r * count + j] = valid[j] ? key : -1;
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
