/* Causal attention over a paged pool of keys and values: decodes and ragged prefill chunks alike.
 *
 * Work is cut into items: (sequence, block of its queries, part of its keys, heads of one KV head). A row
 * is one query of one head. An item walks over its keys in blocks of 64 with a running maximum and sum
 * (the online softmax of Milakov and Gimelshein, 2018). With up to 4 rows keys and values are read in place; with more
 * they are copied, keys transposed, and both products run on tiles in registers.
 *
 * How a sequence is cut depends on its own lengths alone, so a row's result does not depend on its
 * neighbours in the batch, on the number of threads or on chance. Keys that no query of an item sees are
 * never read.
 */
#include <math.h>
#include <stdlib.h>

#include "pool.h"
#include "simd.h"

#define BLOCK_KEYS 64
#define MAX_ROWS 48       /* of an item: a multiple of TILE_ROWS */
#define TILE_ROWS 6
#define TILE_VECTORS (VF_LANES == 16 ? 4 : 2)
#define FEW_ROWS 4
#define MAX_HEAD_DIM 256
#define PART_KEYS 128     /* a single block of queries shares its keys between items of at least this many */
#define MAX_PARTS 16

enum { FLOAT32, BFLOAT16, FLOAT16 };

/* The caller's arguments, as aserve/kernels/cpu/library.py spells them. */
typedef struct {
    const float *q;  /* [tokens][num_heads][head_dim], q_stride elements from token to token */
    float *output;   /* [tokens][num_heads][head_dim] */
    float *lse;      /* [tokens][num_heads], or NULL */
    const void *key, *value; /* [slots][num_kv_heads][head_dim] */
    const int32_t *page_table; /* [num_seqs][table_stride] */
    const int32_t *cu_query_lens; /* [num_seqs + 1] */
    const int32_t *key_lens; /* [num_seqs] */
    const float *sinks; /* [num_heads], or NULL */
    int64_t q_stride, table_stride;
    int32_t kv_type, page_size, num_seqs, num_heads, num_kv_heads, head_dim;
    int32_t window; /* keys that a query sees, itself included; 0 for all */
    float scale, softcap; /* softcap 0: none */
} AttentionArguments;

/* How one sequence is cut. */
typedef struct {
    int first_item; /* among all items */
    int num_parts;  /* of its keys; above 1 the results are merged afterwards */
    int64_t first_partial; /* row of the first partial result */
} Cut;

typedef struct {
    const AttentionArguments *in;
    Cut *cuts; /* [num_seqs + 1]; the last one ends the list */
    float *partials; /* [rows][num_parts][2 + head_dim]: maximum, sum, weighted values */
    int group, heads_per_item, items_per_part, tokens_per_item, padded_dim;
} Attention;

/* One item at work. */
typedef struct {
    int seq, part, kv_head, first_head, num_heads; /* num_heads of this item, from first_head on */
    int first_token, num_tokens;                   /* in the batch */
    int position;                                  /* of the first token in its sequence */
    int first_key, end_key;
    int num_rows, padded_rows;                     /* row = token * num_heads + head */
    float q[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float output[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float scores[MAX_ROWS * BLOCK_KEYS] __attribute__((aligned(64)));
    float keys[MAX_HEAD_DIM * BLOCK_KEYS] __attribute__((aligned(64))); /* [dim][key] */
    float values[BLOCK_KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    float maximum[MAX_ROWS], sum[MAX_ROWS];
    const char *key_rows[BLOCK_KEYS], *value_rows[BLOCK_KEYS]; /* in the pool, of this block */
} Item;

static int minimum(int a, int b) { return a < b ? a : b; }
static int divide_up(int a, int b) { return (a + b - 1) / b; }

INLINE vf load_kv(const char *row, int i, const int type) {
    if (type == FLOAT32) return vf_load((const float *)row + i);
    if (type == BFLOAT16) return vf_load_bf16((const uint16_t *)row + i);
    return vf_load_f16((const uint16_t *)row + i);
}

/* Up to VF_LANES values; never reads past the n-th. */
INLINE vf load_kv_n(const char *row, int i, int n, const int type) {
    if (n >= VF_LANES) return load_kv(row, i, type);
    if (type == FLOAT32) return vf_load_part((const float *)row + i, n);
    uint16_t rest[VF_LANES] = {0};
    memcpy(rest, (const uint16_t *)row + i, (size_t)n * 2);
    return load_kv((const char *)rest, 0, type);
}

/* Sums over the lanes of VF_LANES vectors, in order. */
#if VF_LANES == 16
/* slot_of_key says where the sum of a vector must stand for the tree below to put it in its place. */
static const int slot_of_key[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
INLINE vf sum_lanes(const vf *v) {
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 8]), _mm512_unpackhi_ps(v[i], v[i + 8]));
    for (int i = 0; i < 4; i++) {
        __m512d low = _mm512_castps_pd(a[i]), high = _mm512_castps_pd(a[i + 4]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    for (int i = 0; i < 2; i++)
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[i], b[i + 2], 0x88), _mm512_shuffle_f32x4(b[i], b[i + 2], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}
#elif VF_LANES == 8
static const int slot_of_key[8] = {0, 4, 2, 6, 1, 5, 3, 7};
INLINE vf sum_lanes(const vf *v) {
    __m256 a[4], b[2];
    for (int i = 0; i < 4; i++)
        a[i] = _mm256_add_ps(_mm256_unpacklo_ps(v[i], v[i + 4]), _mm256_unpackhi_ps(v[i], v[i + 4]));
    for (int i = 0; i < 2; i++) {
        __m256d low = _mm256_castps_pd(a[i]), high = _mm256_castps_pd(a[i + 2]);
        b[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(low, high)),
                             _mm256_castpd_ps(_mm256_unpackhi_pd(low, high)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(b[0], b[1], 0x20), _mm256_permute2f128_ps(b[0], b[1], 0x31));
}
#else
static const int slot_of_key[4] = {0, 1, 2, 3};
INLINE vf sum_lanes(const vf *v) { VF_EACH(vf_sum(v[i])); }
#endif

/* scores[row][low..] = q . key for few rows: VF_LANES keys at a time, read in place. */
INLINE void score_few(Item *item, int low, int count, int head_dim, int padded_dim, const int type) {
    for (int r = 0; r < item->num_rows; r++) {
        const float *q = item->q + r * padded_dim;
        for (int j = 0; j < BLOCK_KEYS; j += VF_LANES) {
            if (j + VF_LANES <= low || j >= count) continue; /* hidden from all rows */
            vf sums[VF_LANES];
            for (int k = 0; k < VF_LANES; k++) {
                int seen = j + k < low ? low : j + k < count ? j + k : count - 1; /* in place of keys out of reach */
                const char *row = item->key_rows[seen];
                vf sum = vf_zero();
                for (int i = 0; i < head_dim; i += VF_LANES)
                    sum = vf_fma(vf_load(q + i), load_kv_n(row, i, head_dim - i, type), sum);
                sums[slot_of_key[k]] = sum;
            }
            vf_store(item->scores + r * BLOCK_KEYS + j, sum_lanes(sums));
        }
    }
}

/* output[row] += weights[row] . values for a constant, small number of rows. */
INLINE void add_values_few(Item *item, const int rows, int low, int count, int head_dim, int padded_dim,
                           const int type) {
    for (int i = 0; i < head_dim; i += VF_LANES) {
        vf sums[FEW_ROWS];
        for (int r = 0; r < rows; r++) sums[r] = vf_load(item->output + r * padded_dim + i);
        for (int j = low; j < count; j++) {
            vf value = load_kv_n(item->value_rows[j], i, head_dim - i, type);
            for (int r = 0; r < rows; r++)
                sums[r] = vf_fma(vf_set1(item->scores[r * BLOCK_KEYS + j]), value, sums[r]);
        }
        for (int r = 0; r < rows; r++) vf_store(item->output + r * padded_dim + i, sums[r]);
    }
}

/* Copy the block's keys (transposed) and values, zeros where no row looks. */
INLINE void copy_block(Item *item, int low, int count, int head_dim, int padded_dim, const int type) {
    for (int j = 0; j < BLOCK_KEYS; j++) {
        int is_seen = j >= low && j < count;
        for (int i = 0; i < padded_dim; i += VF_LANES) {
            float key[VF_LANES];
            vf_store(key, is_seen ? load_kv_n(item->key_rows[j], i, head_dim - i, type) : vf_zero());
            for (int lane = 0; lane < VF_LANES; lane++) item->keys[(i + lane) * BLOCK_KEYS + j] = key[lane];
            vf_store(item->values + j * padded_dim + i,
                     is_seen ? load_kv_n(item->value_rows[j], i, head_dim - i, type) : vf_zero());
        }
    }
}

/* c[TILE_ROWS][vectors] (+)= a[TILE_ROWS][depth] b[depth][vectors] in registers. */
INLINE void multiply_tile(const float *a, int a_stride, const float *b, int b_stride, float *c, int c_stride,
                          int depth, const int vectors, const int is_added) {
    vf sums[TILE_ROWS][4];
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++)
            sums[r][v] = is_added ? vf_load(c + r * c_stride + v * VF_LANES) : vf_zero();
    for (int k = 0; k < depth; k++) {
        vf columns[4];
        for (int v = 0; v < vectors; v++) columns[v] = vf_load(b + (int64_t)k * b_stride + v * VF_LANES);
        for (int r = 0; r < TILE_ROWS; r++) {
            vf factor = vf_set1(a[r * a_stride + k]);
            for (int v = 0; v < vectors; v++) sums[r][v] = vf_fma(factor, columns[v], sums[r][v]);
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++) vf_store(c + r * c_stride + v * VF_LANES, sums[r][v]);
}

INLINE void multiply(const float *a, int a_stride, const float *b, int b_stride, float *c, int c_stride, int rows,
                     int depth, int columns, const int is_added) {
    for (int r = 0; r < rows; r += TILE_ROWS) {
        const float *a_rows = a + r * a_stride;
        float *c_rows = c + r * c_stride;
        int j = 0;
        for (; j + TILE_VECTORS * VF_LANES <= columns; j += TILE_VECTORS * VF_LANES)
            multiply_tile(a_rows, a_stride, b + j, b_stride, c_rows + j, c_stride, depth, TILE_VECTORS, is_added);
        for (; j < columns; j += VF_LANES)
            multiply_tile(a_rows, a_stride, b + j, b_stride, c_rows + j, c_stride, depth, 1, is_added);
    }
}

static void score_many(Item *item, int padded_dim) {
    multiply(item->q, padded_dim, item->keys, BLOCK_KEYS, item->scores, BLOCK_KEYS, item->padded_rows, padded_dim,
             BLOCK_KEYS, 0);
}

static void add_values_many(Item *item, int padded_dim) {
    multiply(item->scores, BLOCK_KEYS, item->values, padded_dim, item->output, padded_dim, item->padded_rows,
             BLOCK_KEYS, padded_dim, 1);
}

/* scores = softcap * tanh(scores / softcap), with tanh(x) = 1 - 2 / (e^2x + 1). */
static void cap_scores(float *scores, int n, float softcap) {
    vf one = vf_set1(1.0f), two = vf_set1(2.0f);
    for (int i = 0; i < n; i += VF_LANES) {
        vf grown = vf_exp(vf_mul(vf_load(scores + i), vf_set1(2.0f / softcap)));
        vf tanh = vf_sub(one, vf_div(two, vf_add(grown, one)));
        vf_store(scores + i, vf_mul(tanh, vf_set1(softcap)));
    }
}

/* Hide from row r of the block at `block` what its query does not see. */
static void mask_row(Item *item, int r, int block, int low, int count, int window) {
    float *scores = item->scores + r * BLOCK_KEYS;
    int position = item->position + r / item->num_heads;
    int end = minimum(count, position + 1 - block);
    int start = window && position - window + 1 - block > low ? position - window + 1 - block : low;
    for (int j = 0; j < start && j < BLOCK_KEYS; j++) scores[j] = -INFINITY;
    for (int j = end < 0 ? 0 : end; j < BLOCK_KEYS; j++) scores[j] = -INFINITY;
}

/* Turn the scores of row r into weights under the running maximum, and scale what was summed before. */
static void update_row(Item *item, int r, int padded_dim) {
    float *scores = item->scores + r * BLOCK_KEYS;
    vf top = vf_set1(item->maximum[r]);
    for (int j = 0; j < BLOCK_KEYS; j += VF_LANES) top = vf_max(top, vf_load(scores + j));
    float maximum = vf_top(top);
    if (maximum == -INFINITY) { /* nothing seen so far */
        memset(scores, 0, BLOCK_KEYS * sizeof *scores);
        return;
    }
    vf sum = vf_zero();
    for (int j = 0; j < BLOCK_KEYS; j += VF_LANES) {
        vf weight = vf_exp(vf_sub(vf_load(scores + j), vf_set1(maximum)));
        sum = vf_add(sum, weight);
        vf_store(scores + j, weight);
    }
    float shrink = item->maximum[r] == maximum ? 1.0f : expf(item->maximum[r] - maximum);
    item->sum[r] = item->sum[r] * shrink + vf_sum(sum);
    item->maximum[r] = maximum;
    if (shrink == 1.0f) return;
    float *output = item->output + r * padded_dim;
    for (int i = 0; i < padded_dim; i += VF_LANES) vf_store(output + i, vf_mul(vf_load(output + i), vf_set1(shrink)));
}

static void find_rows(const AttentionArguments *in, Item *item, int block, int low, int count) {
    const int32_t *pages = in->page_table + item->seq * in->table_stride;
    int64_t size = in->kv_type == FLOAT32 ? 4 : 2;
    int64_t head_offset = (int64_t)item->kv_head * in->head_dim, width = (int64_t)in->num_kv_heads * in->head_dim;
    for (int j = low; j < count; j++) {
        int position = block + j;
        int64_t slot = (int64_t)pages[position / in->page_size] * in->page_size + position % in->page_size;
        item->key_rows[j] = (const char *)in->key + (slot * width + head_offset) * size;
        item->value_rows[j] = (const char *)in->value + (slot * width + head_offset) * size;
    }
}

/* Read one block of keys: few rows score it in place, for more rows keys and values are copied first. */
INLINE void score_block_of(const Attention *job, Item *item, int low, int count, const int type) {
    int head_dim = job->in->head_dim;
    if (item->num_rows <= FEW_ROWS) {
        score_few(item, low, count, head_dim, job->padded_dim, type);
        return;
    }
    copy_block(item, low, count, head_dim, job->padded_dim, type);
    score_many(item, job->padded_dim);
}

static void score_block(const Attention *job, Item *item, int low, int count) {
    switch (job->in->kv_type) {
        case FLOAT32: score_block_of(job, item, low, count, FLOAT32); break;
        case BFLOAT16: score_block_of(job, item, low, count, BFLOAT16); break;
        case FLOAT16: score_block_of(job, item, low, count, FLOAT16); break;
    }
}

INLINE void add_values_of(const Attention *job, Item *item, int low, int count, const int type) {
    int head_dim = job->in->head_dim, padded_dim = job->padded_dim;
    switch (item->num_rows) {
        case 1: add_values_few(item, 1, low, count, head_dim, padded_dim, type); break;
        case 2: add_values_few(item, 2, low, count, head_dim, padded_dim, type); break;
        case 3: add_values_few(item, 3, low, count, head_dim, padded_dim, type); break;
        case 4: add_values_few(item, 4, low, count, head_dim, padded_dim, type); break;
        default: add_values_many(item, padded_dim);
    }
}

static void add_values(const Attention *job, Item *item, int low, int count) {
    switch (job->in->kv_type) {
        case FLOAT32: add_values_of(job, item, low, count, FLOAT32); break;
        case BFLOAT16: add_values_of(job, item, low, count, BFLOAT16); break;
        case FLOAT16: add_values_of(job, item, low, count, FLOAT16); break;
    }
}

/* Scores, softmax and sum of the block of keys at `block`; low and count bound those that some row sees. */
static void attend_block(const Attention *job, Item *item, int block, int low, int count) {
    find_rows(job->in, item, block, low, count);
    score_block(job, item, low, count);
    if (job->in->softcap != 0.0f) cap_scores(item->scores, item->num_rows * BLOCK_KEYS, job->in->softcap);
    for (int r = 0; r < item->num_rows; r++) {
        mask_row(item, r, block, low, count, job->in->window);
        update_row(item, r, job->padded_dim);
    }
    add_values(job, item, low, count);
}

static int seen_from(const AttentionArguments *in, int position) {
    return in->window && position >= in->window ? position - in->window + 1 : 0;
}

/* Keys of part `part` of the span that all queries of a sequence see together; cut at whole blocks. */
static void find_part(int first_key, int end_key, int num_parts, int part, int *start, int *end) {
    int first_block = first_key / BLOCK_KEYS, num_blocks = divide_up(end_key, BLOCK_KEYS) - first_block;
    *start = (first_block + num_blocks * part / num_parts) * BLOCK_KEYS;
    *end = (first_block + num_blocks * (part + 1) / num_parts) * BLOCK_KEYS;
    if (*start < first_key) *start = first_key;
    if (*end > end_key) *end = end_key;
}

static void load_queries(const Attention *job, Item *item) {
    const AttentionArguments *in = job->in;
    int padded_dim = job->padded_dim;
    size_t bytes = (size_t)item->padded_rows * padded_dim * sizeof(float);
    memset(item->q, 0, bytes);
    memset(item->output, 0, bytes);
    memset(item->scores, 0, (size_t)item->padded_rows * BLOCK_KEYS * sizeof(float));
    vf scale = vf_set1(in->scale);
    for (int r = 0; r < item->num_rows; r++) {
        item->maximum[r] = -INFINITY;
        item->sum[r] = 0.0f;
        const float *q = in->q + (item->first_token + r / item->num_heads) * in->q_stride +
                         (int64_t)(item->first_head + r % item->num_heads) * in->head_dim;
        for (int i = 0; i < in->head_dim; i += VF_LANES) {
            int left = in->head_dim - i;
            vf_store_n(item->q + r * padded_dim + i, vf_mul(vf_load_n(q + i, left), scale), left);
        }
    }
}

/* Write a finished row: output = weighted / sum, after the sink (a logit without a value) has joined the sum. */
static void finish_row(const AttentionArguments *in, int64_t token, int head, float maximum, float sum,
                       const float *weighted) {
    float shrink = 1.0f;
    if (in->sinks) {
        float top = in->sinks[head] > maximum ? in->sinks[head] : maximum;
        shrink = expf(maximum - top);
        sum = sum * shrink + expf(in->sinks[head] - top);
        maximum = top;
    }
    int64_t row = token * in->num_heads + head;
    if (in->lse) in->lse[row] = maximum + logf(sum);
    vf factor = vf_set1(shrink / sum);
    float *output = in->output + row * in->head_dim;
    for (int i = 0; i < in->head_dim; i += VF_LANES) {
        int left = in->head_dim - i;
        vf_store_n(output + i, vf_mul(vf_load_n(weighted + i, left), factor), left);
    }
}

static float *partial_row(const Attention *job, int seq, int64_t token, int head, int part) {
    const Cut *cut = &job->cuts[seq];
    int64_t row = (token - job->in->cu_query_lens[seq]) * job->in->num_heads + head;
    return job->partials + (cut->first_partial + row * cut->num_parts + part) * (2 + job->in->head_dim);
}

static void finish_item(const Attention *job, const Item *item) {
    const AttentionArguments *in = job->in;
    for (int r = 0; r < item->num_rows; r++) {
        int64_t token = item->first_token + r / item->num_heads;
        int head = item->first_head + r % item->num_heads;
        const float *weighted = item->output + r * job->padded_dim;
        if (job->cuts[item->seq].num_parts == 1) {
            finish_row(in, token, head, item->maximum[r], item->sum[r], weighted);
            continue;
        }
        float *partial = partial_row(job, item->seq, token, head, item->part);
        partial[0] = item->maximum[r];
        partial[1] = item->sum[r];
        memcpy(partial + 2, weighted, (size_t)in->head_dim * sizeof(float));
    }
}

static int find_seq(const Attention *job, int number) {
    int low = 0, high = job->in->num_seqs;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (job->cuts[middle].first_item <= number) low = middle;
        else high = middle;
    }
    return low;
}

static void locate_item(const Attention *job, int number, Item *item) {
    const AttentionArguments *in = job->in;
    item->seq = find_seq(job, number);
    const Cut *cut = &job->cuts[item->seq];
    int index = number - cut->first_item;
    int heads = index % job->items_per_part, heads_per_group = divide_up(job->group, job->heads_per_item);
    item->kv_head = heads / heads_per_group;
    int offset = heads % heads_per_group * job->heads_per_item;
    item->first_head = item->kv_head * job->group + offset;
    item->num_heads = minimum(job->heads_per_item, job->group - offset);
    index /= job->items_per_part;
    item->part = index % cut->num_parts;
    int block = index / cut->num_parts * job->tokens_per_item;
    int start = in->cu_query_lens[item->seq], num_queries = in->cu_query_lens[item->seq + 1] - start;
    item->first_token = start + block;
    item->num_tokens = minimum(job->tokens_per_item, num_queries - block);
    item->position = in->key_lens[item->seq] - num_queries + block;
    item->num_rows = item->num_tokens * item->num_heads;
    item->padded_rows = divide_up(item->num_rows, TILE_ROWS) * TILE_ROWS;
    find_part(seen_from(in, item->position), item->position + item->num_tokens, cut->num_parts, item->part,
              &item->first_key, &item->end_key);
}

static void attend_chunk(const void *argument, int chunk) {
    const Attention *job = argument;
    int num_items = job->cuts[job->in->num_seqs].first_item;
    Item item; /* a few hundred kilobytes of stack, of which a small head touches a part */
    locate_item(job, num_items - 1 - chunk, &item); /* prefill chunks stand last and take longest: begin there */
    load_queries(job, &item);
    int block = item.first_key / BLOCK_KEYS * BLOCK_KEYS;
    for (; block < item.end_key; block += BLOCK_KEYS) {
        int low = item.first_key > block ? item.first_key - block : 0;
        int count = minimum(BLOCK_KEYS, item.end_key - block);
        attend_block(job, &item, block, low, count);
    }
    finish_item(job, &item);
}

static void merge_parts(const Attention *job, int seq) {
    const AttentionArguments *in = job->in;
    int num_parts = job->cuts[seq].num_parts;
    for (int64_t token = in->cu_query_lens[seq]; token < in->cu_query_lens[seq + 1]; token++) {
        for (int head = 0; head < in->num_heads; head++) {
            float *first = partial_row(job, seq, token, head, 0);
            float maximum = -INFINITY, sum = 0.0f, weighted[MAX_HEAD_DIM] = {0};
            for (int part = 0; part < num_parts; part++)
                if (first[part * (2 + in->head_dim)] > maximum) maximum = first[part * (2 + in->head_dim)];
            for (int part = 0; part < num_parts; part++) {
                const float *partial = first + part * (2 + in->head_dim);
                float shrink = expf(partial[0] - maximum);
                sum += partial[1] * shrink;
                for (int i = 0; i < in->head_dim; i++) weighted[i] += partial[2 + i] * shrink;
            }
            finish_row(in, token, head, maximum, sum, weighted);
        }
    }
}

/* Decide how each sequence is cut; returns the number of partial rows. */
static int64_t cut_sequences(Attention *job) {
    const AttentionArguments *in = job->in;
    int num_items = 0;
    int64_t num_partials = 0;
    for (int seq = 0; seq <= in->num_seqs; seq++) {
        Cut *cut = &job->cuts[seq];
        *cut = (Cut){num_items, 1, num_partials};
        if (seq == in->num_seqs) break;
        int num_queries = in->cu_query_lens[seq + 1] - in->cu_query_lens[seq];
        int num_blocks = divide_up(num_queries, job->tokens_per_item);
        if (num_blocks == 1) {
            int first_key = seen_from(in, in->key_lens[seq] - num_queries);
            cut->num_parts = (in->key_lens[seq] - first_key) / PART_KEYS;
            if (cut->num_parts < 1) cut->num_parts = 1;
            if (cut->num_parts > MAX_PARTS) cut->num_parts = MAX_PARTS;
        }
        num_items += num_blocks * cut->num_parts * job->items_per_part;
        if (cut->num_parts > 1) num_partials += (int64_t)num_queries * in->num_heads * cut->num_parts;
    }
    return num_partials;
}

/* Returns 0, or -1 if memory for the bookkeeping is lacking. head_dim is at most MAX_HEAD_DIM. */
int paged_attention(Pool *pool, const AttentionArguments *in) {
    Attention job = {.in = in, .group = in->num_heads / in->num_kv_heads};
    job.heads_per_item = minimum(job.group, MAX_ROWS);
    job.items_per_part = in->num_kv_heads * divide_up(job.group, job.heads_per_item);
    job.tokens_per_item = MAX_ROWS / job.heads_per_item;
    job.padded_dim = divide_up(in->head_dim, VF_LANES) * VF_LANES;
    job.cuts = malloc((size_t)(in->num_seqs + 1) * sizeof *job.cuts);
    if (!job.cuts) return -1;
    int64_t num_partials = cut_sequences(&job);
    if (num_partials) {
        job.partials = malloc((size_t)num_partials * (2 + in->head_dim) * sizeof(float));
        if (!job.partials) {
            free(job.cuts);
            return -1;
        }
    }
    pool_run(pool, attend_chunk, &job, job.cuts[in->num_seqs].first_item);
    for (int seq = 0; seq < in->num_seqs; seq++)
        if (job.cuts[seq].num_parts > 1) merge_parts(&job, seq);
    free(job.partials);
    free(job.cuts);
    return 0;
}
