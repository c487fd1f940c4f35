/* What the two halves of attention share: the caller's arguments, and an item of work. */
#ifndef ASERVE_ATTENTION_H
#define ASERVE_ATTENTION_H

#include "simd.h"

#define BLOCK_KEYS 64
#define MAX_ROWS 60       /* of an item: a multiple of TILE_ROWS */
#define ROW_LANES 64      /* that, rounded up to whole vectors */
#define TILE_ROWS 6
#define TILE_VECTORS (VF_LANES == 16 ? 4 : 2)
#define FEW_ROWS 4
#define MAX_HEAD_DIM 256
#define SUMS_HEAD 2 /* a row's sums are so many numbers, its maximum and sum, then the weighted values of a head */

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
    int32_t kv_type, page_size, num_seqs, num_decodes, num_heads, num_kv_heads, head_dim; /* decodes stand first */
    int32_t window; /* keys that a query sees, itself included; 0 for all */
    float scale, softcap; /* softcap 0: none */
} AttentionArguments;

/* One item at work. */
typedef struct {
    int seq, part, kv_head, first_head, num_heads; /* num_heads of this item, from first_head on */
    int is_decode;
    int first_token, num_tokens;                   /* in the batch */
    int position;                                  /* of the first token in its sequence */
    int first_key, end_key;
    int num_rows;                                  /* row = token * num_heads + head */
    int has_few_rows;                              /* up to FEW_ROWS, of a decode */
    int row_lanes;                                 /* with more: stride of q and scores */
    float q[MAX_HEAD_DIM * ROW_LANES] __attribute__((aligned(64)));      /* [row][dim]; many rows: [dim][row] */
    float scores[(BLOCK_KEYS + TILE_ROWS) * ROW_LANES] __attribute__((aligned(64))); /* likewise, with keys */
    float output[MAX_ROWS * MAX_HEAD_DIM] __attribute__((aligned(64)));  /* [row][dim] */
    float maximum[ROW_LANES], sum[ROW_LANES], shrink[ROW_LANES];         /* since a part of the keys began, as output is */
    int has_sums;
    float sums[MAX_ROWS * (SUMS_HEAD + MAX_HEAD_DIM)];                   /* of the parts before, if it has some */
    const float *key_rows[BLOCK_KEYS + TILE_ROWS], *value_rows[BLOCK_KEYS]; /* of this block */
    float converted[2 * BLOCK_KEYS * MAX_HEAD_DIM]; /* keys and values of this block, if the pool is not float32 */
} Item;

INLINE int divide_up(int a, int b) { return (a + b - 1) / b; }
INLINE int pad_dim(int head_dim) { return divide_up(head_dim, VF_LANES) * VF_LANES; }

INLINE float *row_sums(Item *item, int row, int head_dim) { return item->sums + row * (SUMS_HEAD + head_dim); }

/* Start an item whose place in the batch is known: load its queries, begin the first part. */
void load_queries(const AttentionArguments *in, Item *item);

/* Begin another part of the keys. */
void clear_part(const AttentionArguments *in, Item *item);

/* Attend to the keys block + low .. block + count - 1, those of the block at `block` that some row sees. */
void attend_block(const AttentionArguments *in, Item *item, int block, int low, int count);

#endif
