/* The small operators between the linear layers, for float32. Strides count elements. */
#include "pool.h"
#include "simd.h"

#define CHUNK_VALUES 16384 /* about 5 us of work: less is not worth another thread */

typedef struct {
    const float *x, *weight;
    float *residual; /* NULL, or updated to x + residual, which is then normalised */
    float *y;
    int num_rows, width, rows_per_chunk;
    float eps;
} Norm;

static void norm_row(const Norm *job, int64_t row) {
    const float *x = job->x + row * job->width;
    float *y = job->y + row * job->width;
    vf squares = vf_zero();
    if (job->residual) {
        float *residual = job->residual + row * job->width;
        for (int i = 0; i < job->width; i += VF_LANES) {
            int left = job->width - i;
            vf sum = vf_add(vf_load_n(x + i, left), vf_load_n(residual + i, left));
            vf_store_n(residual + i, sum, left);
            squares = vf_fma(sum, sum, squares);
        }
        x = residual;
    } else {
        for (int i = 0; i < job->width; i += VF_LANES) {
            vf v = vf_load_n(x + i, job->width - i);
            squares = vf_fma(v, v, squares);
        }
    }
    vf factor = vf_set1(1.0f / sqrtf(vf_sum(squares) / (float)job->width + job->eps));
    for (int i = 0; i < job->width; i += VF_LANES) {
        int left = job->width - i;
        vf_store_n(y + i, vf_mul(vf_mul(vf_load_n(x + i, left), factor), vf_load_n(job->weight + i, left)), left);
    }
}

static int chunk_end(int chunk, int rows_per_chunk, int num_rows) {
    int end = (chunk + 1) * rows_per_chunk;
    return end < num_rows ? end : num_rows;
}

static void norm_chunk(const void *argument, int chunk) {
    const Norm *job = argument;
    int end = chunk_end(chunk, job->rows_per_chunk, job->num_rows);
    for (int row = chunk * job->rows_per_chunk; row < end; row++) norm_row(job, row);
}

static int rows_in_chunk(int width) { return width < CHUNK_VALUES ? CHUNK_VALUES / width : 1; }

/* y = norm of x, or of residual += x if there is one. All [num_rows][width]; y may be x. */
void rms_norm(Pool *pool, const float *x, float *residual, const float *weight, float *y, int num_rows, int width,
              float eps) {
    Norm job = {x, weight, residual, y, num_rows, width, rows_in_chunk(width), eps};
    pool_run(pool, norm_chunk, &job, (num_rows + job.rows_per_chunk - 1) / job.rows_per_chunk);
}

typedef struct {
    const float *gate_up; /* [num_rows][2][width] */
    float *y;
    int num_rows, width, rows_per_chunk;
} GateMul;

/* The tanh approximation of GELU is x * sigmoid(gelu_argument(x)), as SiLU is x * sigmoid(x). */
INLINE vf gelu_argument(vf x) {
    vf slope = vf_fma(vf_mul(x, x), vf_set1(0.07135481627f), vf_set1(1.5957691216f)); /* sqrt(8 / pi), times 0.044715 */
    return vf_mul(x, slope);
}

INLINE void gate_rows(const GateMul *job, int chunk, int is_gelu) {
    int end = chunk_end(chunk, job->rows_per_chunk, job->num_rows), width = job->width;
    for (int64_t row = chunk * job->rows_per_chunk; row < end; row++) {
        const float *gate = job->gate_up + row * 2 * width, *up = gate + width;
        for (int i = 0; i < width; i += VF_LANES) {
            vf g = vf_load_n(gate + i, width - i);
            vf argument = is_gelu ? gelu_argument(g) : g;
            vf denominator = vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), argument)));
            vf_store_n(job->y + row * width + i, vf_mul(vf_div(g, denominator), vf_load_n(up + i, width - i)),
                       width - i);
        }
    }
}

static void silu_mul_chunk(const void *argument, int chunk) { gate_rows(argument, chunk, 0); }
static void gelu_mul_chunk(const void *argument, int chunk) { gate_rows(argument, chunk, 1); }

void silu_mul(Pool *pool, const float *gate_up, float *y, int num_rows, int width) {
    GateMul job = {gate_up, y, num_rows, width, rows_in_chunk(4 * width)}; /* an exponential costs as much as four */
    pool_run(pool, silu_mul_chunk, &job, (num_rows + job.rows_per_chunk - 1) / job.rows_per_chunk);
}

void gelu_mul(Pool *pool, const float *gate_up, float *y, int num_rows, int width) {
    GateMul job = {gate_up, y, num_rows, width, rows_in_chunk(4 * width)};
    pool_run(pool, gelu_mul_chunk, &job, (num_rows + job.rows_per_chunk - 1) / job.rows_per_chunk);
}

/* Rotate pairs (i, i + head_dim / 2) of each head of one token in place. */
static void rotate_token(float *heads, int num_heads, int head_dim, const float *cos_sin) {
    int half = head_dim / 2;
    for (int h = 0; h < num_heads; h++) {
        float *first = heads + h * head_dim, *second = first + half;
        for (int i = 0; i < half; i += VF_LANES) {
            int left = half - i;
            vf a = vf_load_n(first + i, left), b = vf_load_n(second + i, left);
            vf cos = vf_load_n(cos_sin + i, left), sin = vf_load_n(cos_sin + half + i, left);
            vf_store_n(first + i, vf_sub(vf_mul(a, cos), vf_mul(b, sin)), left);
            vf_store_n(second + i, vf_add(vf_mul(b, cos), vf_mul(a, sin)), left);
        }
    }
}

/* q [num_tokens][num_heads][head_dim] and k [num_tokens][num_kv_heads][head_dim], both rotated in place. */
void rope(float *q, int64_t q_stride, int num_heads, float *k, int64_t k_stride, int num_kv_heads, int head_dim,
          const float *cos_sin, const int64_t *positions, int num_tokens) {
    for (int t = 0; t < num_tokens; t++) {
        const float *row = cos_sin + positions[t] * head_dim;
        rotate_token(q + t * q_stride, num_heads, head_dim, row);
        rotate_token(k + t * k_stride, num_kv_heads, head_dim, row);
    }
}

/* Copy `width` values of each token to its slot of the pool [slots][width]. */
void store_kv(const float *k, int64_t k_stride, const float *v, int64_t v_stride, float *key, float *value,
              const int64_t *slots, int num_tokens, int width) {
    size_t bytes = (size_t)width * sizeof(float);
    for (int t = 0; t < num_tokens; t++) {
        memcpy(key + slots[t] * width, k + t * k_stride, bytes);
        memcpy(value + slots[t] * width, v + t * v_stride, bytes);
    }
}
