/* Scores, softmax and weighted sum of one item of attention over one block of keys; see attention.c. */
#include <math.h>

#include "attention.h"

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

/* scores[row][key] = q . key for few rows, VF_LANES keys at a time. */
INLINE void score_few_of(Item *item, int low, int count, const int head_dim, const int padded_dim) {
    for (int j = low / VF_LANES * VF_LANES; j < count; j += VF_LANES) {
        for (int r = 0; r < item->num_rows; r++) {
            const float *q = item->q + r * padded_dim;
            vf sums[VF_LANES];
            for (int k = 0; k < VF_LANES; k++) {
                vf sum = vf_zero();
                for (int i = 0; i < head_dim; i += VF_LANES)
                    sum = vf_fma(vf_load(q + i), vf_load_n(item->key_rows[j + k] + i, head_dim - i), sum);
                sums[slot_of_key[k]] = sum;
            }
            vf_store(item->scores + r * BLOCK_KEYS + j, sum_lanes(sums));
        }
    }
}

static void score_few(Item *item, int low, int count, int head_dim, int padded_dim) {
    if (head_dim == 64) score_few_of(item, low, count, 64, 64); /* loops of known length */
    else if (head_dim == 128) score_few_of(item, low, count, 128, 128);
    else score_few_of(item, low, count, head_dim, padded_dim);
}

/* output[row] += weights[row] . values for a constant, small number of rows. */
INLINE void add_values_few_of(Item *item, const int rows, int low, int count, int head_dim, int padded_dim) {
    for (int i = 0; i < head_dim; i += VF_LANES) {
        vf sums[FEW_ROWS];
        for (int r = 0; r < rows; r++) sums[r] = vf_load(item->output + r * padded_dim + i);
        for (int j = low; j < count; j++) {
            vf value = vf_load_n(item->value_rows[j] + i, head_dim - i);
            for (int r = 0; r < rows; r++)
                sums[r] = vf_fma(vf_set1(item->scores[r * BLOCK_KEYS + j]), value, sums[r]);
        }
        for (int r = 0; r < rows; r++) vf_store(item->output + r * padded_dim + i, sums[r]);
    }
}

static void add_values_few(Item *item, int low, int count, int head_dim, int padded_dim) {
    switch (item->num_rows) {
        case 1: add_values_few_of(item, 1, low, count, head_dim, padded_dim); break;
        case 2: add_values_few_of(item, 2, low, count, head_dim, padded_dim); break;
        case 3: add_values_few_of(item, 3, low, count, head_dim, padded_dim); break;
        case 4: add_values_few_of(item, 4, low, count, head_dim, padded_dim); break;
    }
}

/* scores[key][rows] = key . q[dim][rows] for TILE_ROWS keys and `vectors` vectors of rows, in registers. */
INLINE void score_tile(Item *item, int key, int row, int head_dim, const int vectors) {
    vf sums[TILE_ROWS][4];
    for (int k = 0; k < TILE_ROWS; k++)
        for (int v = 0; v < vectors; v++) sums[k][v] = vf_zero();
    const float *q = item->q + row;
    for (int i = 0; i < head_dim; i++, q += item->row_lanes) {
        vf queries[4];
        for (int v = 0; v < vectors; v++) queries[v] = vf_load(q + v * VF_LANES);
        for (int k = 0; k < TILE_ROWS; k++) {
            vf factor = vf_set1(item->key_rows[key + k][i]);
            for (int v = 0; v < vectors; v++) sums[k][v] = vf_fma(factor, queries[v], sums[k][v]);
        }
    }
    for (int k = 0; k < TILE_ROWS; k++)
        for (int v = 0; v < vectors; v++)
            vf_store(item->scores + (key + k) * item->row_lanes + row + v * VF_LANES, sums[k][v]);
}

static void score_many(Item *item, int low, int count, int head_dim) {
    for (int key = low; key < count; key += TILE_ROWS) {
        int row = 0;
        for (; row + TILE_VECTORS * VF_LANES <= item->row_lanes; row += TILE_VECTORS * VF_LANES)
            score_tile(item, key, row, head_dim, TILE_VECTORS);
        for (; row < item->row_lanes; row += VF_LANES) score_tile(item, key, row, head_dim, 1);
    }
}

/* output[rows][dims] += weights[key][rows] . values[key][dims] for TILE_ROWS rows and `vectors` vectors of dims. */
INLINE void add_values_tile(Item *item, int row, int dim, int low, int count, int left, int padded_dim,
                            const int vectors) {
    vf sums[TILE_ROWS][4];
    float *output = item->output + row * padded_dim + dim;
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = vf_load(output + r * padded_dim + v * VF_LANES);
    for (int key = low; key < count; key++) {
        const float *value = item->value_rows[key] + dim, *weights = item->scores + key * item->row_lanes + row;
        vf values[4];
        for (int v = 0; v < vectors; v++)
            values[v] = vectors > 1 ? vf_load(value + v * VF_LANES) : vf_load_n(value, left);
        for (int r = 0; r < TILE_ROWS; r++) {
            vf factor = vf_set1(weights[r]);
            for (int v = 0; v < vectors; v++) sums[r][v] = vf_fma(factor, values[v], sums[r][v]);
        }
    }
    for (int r = 0; r < TILE_ROWS; r++)
        for (int v = 0; v < vectors; v++) vf_store(output + r * padded_dim + v * VF_LANES, sums[r][v]);
}

static void add_values_many(Item *item, int low, int count, int head_dim, int padded_dim) {
    for (int row = 0; row < item->num_rows; row += TILE_ROWS) {
        int dim = 0;
        for (; dim + TILE_VECTORS * VF_LANES <= head_dim; dim += TILE_VECTORS * VF_LANES)
            add_values_tile(item, row, dim, low, count, VF_LANES, padded_dim, TILE_VECTORS);
        for (; dim < head_dim; dim += VF_LANES)
            add_values_tile(item, row, dim, low, count, head_dim - dim, padded_dim, 1);
    }
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

/* Hide from each row of the block at `block` what its query does not see. */
static void mask_rows(Item *item, int block, int low, int count, int window, int has_few_rows) {
    for (int r = 0; r < item->num_rows; r++) {
        int position = item->position + r / item->num_heads;
        int start = window ? position - window + 1 - block : low, end = position + 1 - block;
        float *scores = has_few_rows ? item->scores + r * BLOCK_KEYS : item->scores + r;
        int stride = has_few_rows ? 1 : item->row_lanes;
        for (int j = low; j < count && j < start; j++) scores[j * stride] = -INFINITY;
        for (int j = end > low ? end : low; j < count; j++) scores[j * stride] = -INFINITY;
        if (!has_few_rows) continue;
        for (int j = 0; j < low; j++) scores[j] = -INFINITY;
        for (int j = count; j < BLOCK_KEYS; j++) scores[j] = -INFINITY;
    }
}

/* Stands in for a maximum of -inf, where nothing was seen so far: e^(-inf - this) is 0, not NaN. */
#define LOWEST (-1e30f)

/* Turn scores into weights under the running maximum. */
static void update_few(Item *item) {
    for (int r = 0; r < item->num_rows; r++) {
        float *scores = item->scores + r * BLOCK_KEYS, before = item->maximum[r];
        vf top = vf_set1(before), sum = vf_zero();
        for (int j = 0; j < BLOCK_KEYS; j += VF_LANES) top = vf_max(top, vf_load(scores + j));
        float maximum = vf_top(top);
        vf base = vf_set1(maximum < LOWEST ? LOWEST : maximum);
        for (int j = 0; j < BLOCK_KEYS; j += VF_LANES) {
            vf weight = vf_exp(vf_sub(vf_load(scores + j), base));
            sum = vf_add(sum, weight);
            vf_store(scores + j, weight);
        }
        item->shrink[r] = before == maximum ? 1.0f : expf(before - maximum);
        item->sum[r] = item->sum[r] * item->shrink[r] + vf_sum(sum);
        item->maximum[r] = maximum;
    }
}

static void update_many(Item *item, int low, int count) {
    for (int row = 0; row < item->row_lanes; row += VF_LANES) {
        float *scores = item->scores + row;
        vf before = vf_load(item->maximum + row), maximum = before, sum = vf_zero();
        for (int j = low; j < count; j++) maximum = vf_max(maximum, vf_load(scores + j * item->row_lanes));
        vf base = vf_max(vf_set1(LOWEST), maximum);
        for (int j = low; j < count; j++) {
            vf weight = vf_exp(vf_sub(vf_load(scores + j * item->row_lanes), base));
            sum = vf_add(sum, weight);
            vf_store(scores + j * item->row_lanes, weight);
        }
        vf shrink = vf_exp(vf_sub(before, base));
        vf_store(item->shrink + row, shrink);
        vf_store(item->sum + row, vf_fma(vf_load(item->sum + row), shrink, sum));
        vf_store(item->maximum + row, maximum);
    }
}

/* What was summed under an earlier maximum counts less now. */
static void shrink_output(Item *item, int padded_dim) {
    for (int r = 0; r < item->num_rows; r++) {
        if (item->shrink[r] == 1.0f) continue;
        float *output = item->output + r * padded_dim;
        vf shrink = vf_set1(item->shrink[r]);
        for (int i = 0; i < padded_dim; i += VF_LANES) vf_store(output + i, vf_mul(vf_load(output + i), shrink));
    }
}

static void convert_row(const uint16_t *row, float *converted, int head_dim, int type) {
    for (int i = 0; i < head_dim; i += VF_LANES) {
        uint16_t part[VF_LANES] = {0};
        int left = head_dim - i;
        memcpy(part, row + i, (size_t)(left < VF_LANES ? left : VF_LANES) * 2);
        vf_store(converted + i, type == BFLOAT16 ? vf_load_bf16(part) : vf_load_f16(part));
    }
}

static const float *find_row(const AttentionArguments *in, const void *pool, int64_t offset, float *converted) {
    if (in->kv_type == FLOAT32) return (const float *)pool + offset;
    convert_row((const uint16_t *)pool + offset, converted, in->head_dim, in->kv_type);
    return converted;
}

/* Find the block's keys and values. Keys before and after those seen are stood in for by the nearest that is. */
static void find_rows(const AttentionArguments *in, Item *item, int block, int low, int count) {
    const int32_t *pages = in->page_table + item->seq * in->table_stride;
    int64_t width = (int64_t)in->num_kv_heads * in->head_dim;
    int page = (block + low) / in->page_size, offset = (block + low) % in->page_size;
    for (int j = low; j < count; j++) {
        int64_t slot = (int64_t)pages[page] * in->page_size + offset;
        int64_t place = slot * width + (int64_t)item->kv_head * in->head_dim;
        float *converted = item->converted + j * MAX_HEAD_DIM;
        item->key_rows[j] = find_row(in, in->key, place, converted);
        item->value_rows[j] = find_row(in, in->value, place, converted + BLOCK_KEYS * MAX_HEAD_DIM);
        if (++offset == in->page_size) {
            offset = 0;
            page++;
        }
    }
    for (int j = 0; j < low; j++) item->key_rows[j] = item->key_rows[low];
    for (int j = count; j < BLOCK_KEYS + TILE_ROWS; j++) item->key_rows[j] = item->key_rows[count - 1];
}

void attend_block(const AttentionArguments *in, Item *item, int block, int low, int count) {
    int head_dim = in->head_dim, padded_dim = pad_dim(head_dim), has_few_rows = item->has_few_rows;
    find_rows(in, item, block, low, count);
    if (has_few_rows) score_few(item, low, count, head_dim, padded_dim);
    else score_many(item, low, count, head_dim);
    if (in->softcap != 0.0f)
        cap_scores(item->scores, has_few_rows ? item->num_rows * BLOCK_KEYS : count * item->row_lanes, in->softcap);
    int last = item->position + item->num_tokens - 1, is_whole = low == 0 && count == BLOCK_KEYS;
    int is_seen_by_all = block + count <= item->position + 1 && (!in->window || last - in->window < block);
    if (!is_whole || !is_seen_by_all) mask_rows(item, block, low, count, in->window, has_few_rows);
    if (has_few_rows) update_few(item);
    else update_many(item, low, count);
    shrink_output(item, padded_dim);
    if (has_few_rows) add_values_few(item, low, count, head_dim, padded_dim);
    else add_values_many(item, low, count, head_dim, padded_dim);
}

void clear_part(const AttentionArguments *in, Item *item) {
    size_t num_rows = (size_t)divide_up(item->num_rows, TILE_ROWS) * TILE_ROWS;
    memset(item->output, 0, num_rows * pad_dim(in->head_dim) * sizeof(float));
    for (int r = 0; r < item->row_lanes; r++) {
        item->maximum[r] = -INFINITY;
        item->sum[r] = 0.0f;
    }
}

void load_queries(const AttentionArguments *in, Item *item) {
    int padded_dim = pad_dim(in->head_dim), has_few_rows = item->is_decode && item->num_rows <= FEW_ROWS;
    int lanes = divide_up(item->num_rows, VF_LANES) * VF_LANES;
    item->has_few_rows = has_few_rows;
    item->row_lanes = lanes;
    item->has_sums = 0;
    clear_part(in, item);
    memset(item->q, 0, (size_t)padded_dim * (has_few_rows ? item->num_rows : lanes) * sizeof(float));
    memset(item->scores, 0, (size_t)(BLOCK_KEYS + TILE_ROWS) * lanes * sizeof(float));
    for (int r = 0; r < item->num_rows; r++) {
        const float *q = in->q + (item->first_token + r / item->num_heads) * in->q_stride +
                         (int64_t)(item->first_head + r % item->num_heads) * in->head_dim;
        for (int i = 0; i < in->head_dim; i++)
            item->q[has_few_rows ? r * padded_dim + i : i * lanes + r] = q[i] * in->scale;
    }
}
