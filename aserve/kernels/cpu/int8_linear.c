/* y = x w^T + b for int8 weights, one scale per output channel, and float32 activations that are
 * quantised here to int8, one scale per 32 values.
 *
 *   y[row][n] = bias[n] + weight_scale[n] * sum over groups g of  scale[row][g] * S(row, n, g)
 *
 * S is an exact integer sum of 32 products, and the groups are added in order with fused
 * multiply-adds, so a row's result depends on nothing but that row, and is the same for every
 * variant with fused multiply-adds.
 *
 * Weights: bytes w + 128 as [blocks of 16 channels][quads of 4 inputs][16 channels][4 inputs], both
 * dimensions padded. One 64-byte line holds a quad for 16 channels, which is what VNNI multiplies
 * at once; the offset of 128 makes them unsigned, as it wants them. Each group's sum starts at
 * -128 * (sum of its activations), which takes the offset out again.
 */
#include <stdlib.h>

#include "pool.h"
#include "simd.h"

#define GROUP 32
#define QUADS (GROUP / 4)
#define BLOCK 16          /* channels */
#define LINE (BLOCK * 4)  /* bytes of one quad of a block */
#define VECTORS (BLOCK / VF_LANES) /* of accumulators per block */

#if VF_LANES == 16

#define QUAD_BYTES 4 /* activations: int8 */
#define MAX_ROWS 3   /* rows and vectors of channels in one tile; chosen by timing, the sums must fit the registers */
#define TILE_VECTORS 4
typedef __m512i vi;
typedef __m512i Weights;
typedef __m512i Quad;
INLINE vi vi_set1(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vf vi_to_float(vi x) { return _mm512_cvtepi32_ps(x); }
INLINE Weights load_weights(const uint8_t *p) { return _mm512_loadu_si512(p); }
INLINE Quad load_quad(const int8_t *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return _mm512_set1_epi32(bits);
}
INLINE vi add_products(vi sum, Weights w, Quad a) { return _mm512_dpbusd_epi32(sum, w, a); }

#elif (defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))) && VF_LANES == 8

#define QUAD_BYTES 4
#define MAX_ROWS 4
#define TILE_VECTORS 2
typedef __m256i vi;
typedef __m256i Weights;
typedef __m256i Quad;
INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vf vi_to_float(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE Weights load_weights(const uint8_t *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE Quad load_quad(const int8_t *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return _mm256_set1_epi32(bits);
}
#ifdef __AVXVNNI__
INLINE vi add_products(vi sum, Weights w, Quad a) { return _mm256_dpbusd_avx_epi32(sum, w, a); }
#else
INLINE vi add_products(vi sum, Weights w, Quad a) { return _mm256_dpbusd_epi32(sum, w, a); }
#endif

#elif VF_LANES == 8

/* Without VNNI: products of 16-bit numbers, which cannot saturate. The bytes of a quad are split
 * into the even and the odd ones by a mask and a shift; the activations stand in the same order. */
#define QUAD_BYTES 8 /* activations: int16 in the order 0 2 1 3 */
#define MAX_ROWS 3
#define TILE_VECTORS 2
typedef __m256i vi;
typedef struct { __m256i even, odd; } Weights;
typedef struct { __m256i even, odd; } Quad;
INLINE vi vi_set1(int32_t x) { return _mm256_set1_epi32(x); }
INLINE vf vi_to_float(vi x) { return _mm256_cvtepi32_ps(x); }
INLINE Weights load_weights(const uint8_t *p) {
    __m256i bytes = _mm256_loadu_si256((const __m256i *)p);
    return (Weights){_mm256_and_si256(bytes, _mm256_set1_epi16(255)), _mm256_srli_epi16(bytes, 8)};
}
INLINE Quad load_quad(const int8_t *p) {
    int32_t bits[2];
    memcpy(bits, p, 8);
    return (Quad){_mm256_set1_epi32(bits[0]), _mm256_set1_epi32(bits[1])};
}
INLINE vi add_products(vi sum, Weights w, Quad a) {
    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(w.even, a.even));
    return _mm256_add_epi32(sum, _mm256_madd_epi16(w.odd, a.odd));
}

#else

#define QUAD_BYTES 4
#define MAX_ROWS 4
#define TILE_VECTORS 4
typedef int32_t vi __attribute__((vector_size(4 * VF_LANES)));
typedef struct { uint8_t bytes[VF_LANES][4]; } Weights;
typedef struct { int8_t bytes[4]; } Quad;
INLINE vi vi_set1(int32_t x) {
    vi result;
    for (int i = 0; i < VF_LANES; i++) result[i] = x;
    return result;
}
INLINE vf vi_to_float(vi x) { VF_EACH((float)x[i]); }
INLINE Weights load_weights(const uint8_t *p) {
    Weights w;
    memcpy(&w, p, sizeof w);
    return w;
}
INLINE Quad load_quad(const int8_t *p) {
    Quad a;
    memcpy(&a, p, sizeof a);
    return a;
}
INLINE vi add_products(vi sum, Weights w, Quad a) {
    for (int i = 0; i < VF_LANES; i++)
        for (int j = 0; j < 4; j++) sum[i] += w.bytes[i][j] * a.bytes[j];
    return sum;
}

#endif

typedef struct {
    const float *x;
    int64_t x_stride;
    int num_rows, num_inputs, num_groups, num_channels;
    const uint8_t *weight;
    const float *weight_scale;
    const float *bias; /* or NULL */
    float *y;          /* [num_rows][num_channels] */
    int8_t *quantised; /* [num_rows][num_groups][QUADS][QUAD_BYTES] */
    float *scale;      /* [num_rows][num_groups] */
    int32_t *start;    /* [num_rows][num_groups]: -128 * sum of the group */
    int rows_per_chunk, tiles_per_chunk;
} Linear;

INLINE void store_quantised(int8_t *out, int i, int value) {
#if QUAD_BYTES == 8
    static const int place[4] = {0, 2, 1, 3};
    ((int16_t *)out)[(i & ~3) + place[i & 3]] = (int16_t)value;
#else
    out[i] = (int8_t)value;
#endif
}

/* Quantise up to GROUP values; a NaN or an infinity makes the scale NaN. */
static void quantise_group(const float *x, int n, int8_t *out, float *scale, int32_t *start) {
    float values[GROUP] = {0};
    memcpy(values, x, (size_t)n * sizeof *x);
    vf top = vf_zero(), poison = vf_zero();
    for (int i = 0; i < GROUP; i += VF_LANES) {
        vf v = vf_load(values + i);
        top = vf_max(top, vf_max(v, vf_sub(vf_zero(), v)));
        poison = vf_fma(v, vf_zero(), poison);
    }
    float nothing = vf_sum(poison), largest = vf_top(top);
    if (nothing != 0.0f) { /* NaN */
        memset(out, 0, QUADS * QUAD_BYTES);
        *scale = nothing;
        *start = 0;
        return;
    }
    float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    int32_t whole[GROUP], sum = 0;
    for (int i = 0; i < GROUP; i += VF_LANES)
        vf_store(values + i, vf_round(vf_mul(vf_load(values + i), vf_set1(inverse))));
    for (int i = 0; i < GROUP; i++) whole[i] = (int32_t)values[i];
    for (int i = 0; i < GROUP; i++) sum += whole[i];
    for (int i = 0; i < GROUP; i++) store_quantised(out, i, whole[i]);
    *scale = largest / 127.0f;
    *start = -128 * sum;
}

static void quantise_row(const Linear *job, int row) {
    const float *x = job->x + row * job->x_stride;
    int64_t first = (int64_t)row * job->num_groups;
    for (int g = 0; g < job->num_groups; g++) {
        int left = job->num_inputs - g * GROUP;
        quantise_group(x + g * GROUP, left < GROUP ? left : GROUP, job->quantised + (first + g) * QUADS * QUAD_BYTES,
                       job->scale + first + g, job->start + first + g);
    }
}

static void quantise_chunk(const void *argument, int chunk) {
    const Linear *job = argument;
    int end = (chunk + 1) * job->rows_per_chunk;
    if (end > job->num_rows) end = job->num_rows;
    for (int row = chunk * job->rows_per_chunk; row < end; row++) quantise_row(job, row);
}

/* Multiply `rows` rows from `row` with `vectors` vectors of channels from `vector`. Both counts are
 * constants where this is called, so that all sums live in registers. */
INLINE void multiply_tile(const Linear *job, int row, const int rows, int vector, const int vectors) {
    int num_groups = job->num_groups;
    int64_t block_bytes = (int64_t)num_groups * QUADS * LINE;
    const uint8_t *weights[TILE_VECTORS];
    for (int c = 0; c < vectors; c++)
        weights[c] = job->weight + (vector + c) / VECTORS * block_bytes + (vector + c) % VECTORS * VF_LANES * 4;
    const int8_t *activations[MAX_ROWS];
    for (int r = 0; r < rows; r++)
        activations[r] = job->quantised + (int64_t)(row + r) * num_groups * QUADS * QUAD_BYTES;
    const float *scale = job->scale + (int64_t)row * num_groups;
    const int32_t *start = job->start + (int64_t)row * num_groups;

    vf total[MAX_ROWS][TILE_VECTORS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < vectors; c++) total[r][c] = vf_zero();
    for (int g = 0; g < num_groups; g++) {
        vi sum[MAX_ROWS][TILE_VECTORS];
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++) sum[r][c] = vi_set1(start[r * num_groups + g]);
        for (int j = 0; j < QUADS; j++) {
            Weights w[TILE_VECTORS];
            for (int c = 0; c < vectors; c++) w[c] = load_weights(weights[c] + (g * QUADS + j) * LINE);
            for (int r = 0; r < rows; r++) {
                Quad a = load_quad(activations[r] + (g * QUADS + j) * QUAD_BYTES);
                for (int c = 0; c < vectors; c++) sum[r][c] = add_products(sum[r][c], w[c], a);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < vectors; c++)
                total[r][c] = vf_fma(vi_to_float(sum[r][c]), vf_set1(scale[r * num_groups + g]), total[r][c]);
    }
    for (int c = 0; c < vectors; c++) {
        int channel = (vector + c) * VF_LANES, left = job->num_channels - channel;
        if (left <= 0) break;
        vf weight_scale = vf_load_n(job->weight_scale + channel, left);
        vf bias = job->bias ? vf_load_n(job->bias + channel, left) : vf_zero();
        for (int r = 0; r < rows; r++)
            vf_store_n(job->y + (int64_t)(row + r) * job->num_channels + channel,
                       vf_fma(total[r][c], weight_scale, bias), left);
    }
}

/* All rows against one tile of channels, whose weights stay in the cache meanwhile. */
INLINE void multiply_rows(const Linear *job, int vector, const int vectors) {
    int tiles = (job->num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int tile = 0; tile < tiles; tile++) {
        int row = (int)((int64_t)job->num_rows * tile / tiles);
        int rows = (int)((int64_t)job->num_rows * (tile + 1) / tiles) - row; /* as even as can be */
        switch (rows) {
            case 1: multiply_tile(job, row, 1, vector, vectors); break;
            case 2: multiply_tile(job, row, 2, vector, vectors); break;
            case 3: multiply_tile(job, row, 3, vector, vectors); break;
#if MAX_ROWS == 4
            case 4: multiply_tile(job, row, 4, vector, vectors); break;
#endif
        }
    }
}

static int num_vectors(const Linear *job) { return (job->num_channels + BLOCK - 1) / BLOCK * VECTORS; }

static void multiply_chunk(const void *argument, int chunk) {
    const Linear *job = argument;
    int end = num_vectors(job), width = job->tiles_per_chunk * TILE_VECTORS;
    if ((chunk + 1) * width < end) end = (chunk + 1) * width;
    int vector = chunk * width;
    for (; vector + TILE_VECTORS <= end; vector += TILE_VECTORS) multiply_rows(job, vector, TILE_VECTORS);
    for (; vector < end; vector++) multiply_rows(job, vector, 1);
}

static int divide_up(int a, int b) { return (a + b - 1) / b; }
static size_t round_to_line(size_t bytes) { return (bytes + 63) & ~(size_t)63; }

static void run_linear(Pool *pool, Linear *job) {
    int threads = pool_num_threads(pool);
    job->rows_per_chunk = divide_up(16384, job->num_inputs); /* about 10 us of work */
    pool_run(pool, quantise_chunk, job, divide_up(job->num_rows, job->rows_per_chunk));
    int tiles = divide_up(num_vectors(job), TILE_VECTORS);
    job->tiles_per_chunk = divide_up(tiles, 8 * threads); /* several each: a thread may be slower or come late */
    pool_run(pool, multiply_chunk, job, divide_up(tiles, job->tiles_per_chunk));
}

/* Returns 0, or -1 if there is no memory for the quantised activations. */
int int8_linear(Pool *pool, const float *x, int64_t x_stride, int num_rows, int num_inputs, const uint8_t *weight,
                const float *weight_scale, const float *bias, float *y, int num_channels) {
    Linear job = {.x = x, .x_stride = x_stride, .num_rows = num_rows, .num_inputs = num_inputs,
                  .num_groups = divide_up(num_inputs, GROUP), .num_channels = num_channels, .weight = weight,
                  .weight_scale = weight_scale, .bias = bias, .y = y};
    size_t num_groups = (size_t)num_rows * job.num_groups;
    size_t group_bytes = QUADS * QUAD_BYTES, numbers_bytes = round_to_line(num_groups * 4);
    char *memory = aligned_alloc(64, round_to_line(num_groups * group_bytes) + 2 * numbers_bytes);
    if (!memory) return -1;
    job.scale = (float *)memory;
    job.start = (int32_t *)(memory + numbers_bytes);
    job.quantised = (int8_t *)(memory + 2 * numbers_bytes);
    run_linear(pool, &job);
    free(memory);
    return 0;
}

/* Write rows `row_ids` of the weight as float32: out [num_rows][num_inputs]. */
void int8_rows(const uint8_t *weight, const float *weight_scale, const int64_t *row_ids, int num_rows, int num_inputs,
               float *out) {
    int64_t block_bytes = (int64_t)divide_up(num_inputs, GROUP) * QUADS * LINE;
    for (int i = 0; i < num_rows; i++) {
        const uint8_t *row = weight + row_ids[i] / BLOCK * block_bytes + row_ids[i] % BLOCK * 4;
        float scale = weight_scale[row_ids[i]];
        for (int k = 0; k < num_inputs; k++)
            out[(int64_t)i * num_inputs + k] = (float)(row[k / 4 * LINE + k % 4] - 128) * scale;
    }
}

/* What this library was compiled to. */
const char *kernel_variant(void) {
#if VF_LANES == 16
    return "avx512-vnni";
#elif VF_LANES == 8
    return QUAD_BYTES == 4 ? "avx2-vnni" : "avx2";
#else
    return "portable";
#endif
}
