/* Causal attention over a paged pool of keys and values: decodes and ragged prefill chunks alike.
 *
 * Work is cut into items: (sequence, block of its queries, part of its keys, heads of one KV head). A row
 * is one query of one head. An item walks over its keys in blocks of 64 with a running maximum and sum
 * (the online softmax of Milakov and Gimelshein, 2018). With up to 4 rows each score is a product along the head; with
 * more, rows stand in the lanes: scores are [key][row], so keys and values are broadcast or read where they are, and
 * maxima and sums need no step across lanes.
 *
 * A decode is cut by its own length alone. The keys of a chunk are summed in parts that begin at multiples of
 * CHUNK_PART_KEYS, one after the other or in items of their own, and the parts added up in order. So a row's result
 * does not depend on its neighbours in the batch, on where its prompt was cut into chunks, on the number of threads or
 * on chance. Keys that no query of an item sees are never read.
 */
#include <math.h>
#include <stdlib.h>

#include "attention.h"
#include "pool.h"

#define DECODE_PART_KEYS 128 /* a decode shares its keys between items of at least this many */
#define MAX_DECODE_PARTS 16
#define CHUNK_PART_KEYS 512 /* a multiple of BLOCK_KEYS */

/* How one sequence is cut. */
typedef struct {
    int first_item; /* among all items */
    int num_parts;  /* of its keys that are items of their own; above 1 the results are merged afterwards */
    int64_t first_partial; /* row of the first partial result */
} Cut;

typedef struct {
    const AttentionArguments *in;
    Cut *cuts; /* [num_seqs + 1]; the last one ends the list */
    float *partials; /* [rows][num_parts] of sums */
    int group, heads_per_item, items_per_part, tokens_per_item;
} Attention;

static int minimum(int a, int b) { return a < b ? a : b; }

static int seen_from(const AttentionArguments *in, int position) {
    return in->window && position >= in->window ? position - in->window + 1 : 0;
}

/* Leave an item only its part of the keys that its queries see together. */
static void take_part(Item *item, int num_parts) {
    int first_key = item->first_key, end_key = item->end_key;
    if (item->is_decode) { /* cut at whole blocks */
        int first_block = first_key / BLOCK_KEYS, num_blocks = divide_up(end_key, BLOCK_KEYS) - first_block;
        item->first_key = (first_block + num_blocks * item->part / num_parts) * BLOCK_KEYS;
        item->end_key = (first_block + num_blocks * (item->part + 1) / num_parts) * BLOCK_KEYS;
    } else {
        item->first_key = (first_key / CHUNK_PART_KEYS + item->part) * CHUNK_PART_KEYS;
        item->end_key = item->first_key + CHUNK_PART_KEYS;
    }
    if (item->first_key < first_key) item->first_key = first_key;
    if (item->end_key > end_key) item->end_key = end_key;
}

static void clear_sums(float *sums, int head_dim) {
    memset(sums, 0, (size_t)(SUMS_HEAD + head_dim) * sizeof *sums);
    sums[0] = -INFINITY;
}

/* Add what a row made of further keys to what it made of those before. */
static void add_part(float *sums, float maximum, float sum, const float *weighted, int head_dim) {
    if (maximum == -INFINITY) return; /* it sees none of them */
    float top = maximum > sums[0] ? maximum : sums[0];
    float keep = expf(sums[0] - top), take = expf(maximum - top);
    sums[0] = top;
    sums[1] = sums[1] * keep + sum * take;
    float *total = sums + SUMS_HEAD;
    for (int i = 0; i < head_dim; i += VF_LANES) {
        int left = head_dim - i;
        vf kept = vf_mul(vf_load_n(total + i, left), vf_set1(keep));
        vf_store_n(total + i, vf_fma(vf_load_n(weighted + i, left), vf_set1(take), kept), left);
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
    return job->partials + (cut->first_partial + row * cut->num_parts + part) * (SUMS_HEAD + job->in->head_dim);
}

/* Add the part that ends here to the sums of each row, and begin another. */
static void end_part(const AttentionArguments *in, Item *item) {
    for (int r = 0; r < item->num_rows; r++) {
        float *sums = row_sums(item, r, in->head_dim);
        if (!item->has_sums) clear_sums(sums, in->head_dim);
        add_part(sums, item->maximum[r], item->sum[r], item->output + r * pad_dim(in->head_dim), in->head_dim);
    }
    item->has_sums = 1;
    clear_part(in, item);
}

static void finish_item(const Attention *job, Item *item) {
    const AttentionArguments *in = job->in;
    if (item->has_sums) end_part(in, item);
    for (int r = 0; r < item->num_rows; r++) {
        int64_t token = item->first_token + r / item->num_heads;
        int head = item->first_head + r % item->num_heads;
        const float *sums = row_sums(item, r, in->head_dim), *weighted = item->output + r * pad_dim(in->head_dim);
        if (item->has_sums) {
            finish_row(in, token, head, sums[0], sums[1], sums + SUMS_HEAD);
        } else if (job->cuts[item->seq].num_parts == 1) {
            finish_row(in, token, head, item->maximum[r], item->sum[r], weighted);
        } else {
            float *partial = partial_row(job, item->seq, token, head, item->part);
            partial[0] = item->maximum[r];
            partial[1] = item->sum[r];
            memcpy(partial + SUMS_HEAD, weighted, (size_t)in->head_dim * sizeof(float));
        }
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
    item->is_decode = item->seq < in->num_decodes;
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
    item->first_key = seen_from(in, item->position);
    item->end_key = item->position + item->num_tokens;
    if (cut->num_parts > 1) take_part(item, cut->num_parts);
}

static void attend_chunk(const void *argument, int chunk) {
    const Attention *job = argument;
    int num_items = job->cuts[job->in->num_seqs].first_item;
    Item item; /* a few hundred kilobytes of stack, of which a small head touches a part */
    locate_item(job, num_items - 1 - chunk, &item); /* prefill chunks stand last and take longest: begin there */
    load_queries(job->in, &item);
    int first_block = item.first_key / BLOCK_KEYS * BLOCK_KEYS;
    for (int block = first_block; block < item.end_key; block += BLOCK_KEYS) {
        if (!item.is_decode && block > first_block && block % CHUNK_PART_KEYS == 0) end_part(job->in, &item);
        int low = item.first_key > block ? item.first_key - block : 0;
        int count = minimum(BLOCK_KEYS, item.end_key - block);
        attend_block(job->in, &item, block, low, count);
    }
    finish_item(job, &item);
}

static void merge_parts(const Attention *job, int seq) {
    const AttentionArguments *in = job->in;
    int num_parts = job->cuts[seq].num_parts;
    for (int64_t token = in->cu_query_lens[seq]; token < in->cu_query_lens[seq + 1]; token++) {
        for (int head = 0; head < in->num_heads; head++) {
            float sums[SUMS_HEAD + MAX_HEAD_DIM];
            clear_sums(sums, in->head_dim);
            for (int part = 0; part < num_parts; part++) {
                const float *partial = partial_row(job, seq, token, head, part);
                add_part(sums, partial[0], partial[1], partial + SUMS_HEAD, in->head_dim);
            }
            finish_row(in, token, head, sums[0], sums[1], sums + SUMS_HEAD);
        }
    }
}

static int num_decode_parts(int num_keys) {
    int num_parts = minimum(num_keys / DECODE_PART_KEYS, MAX_DECODE_PARTS);
    return num_parts > 1 ? num_parts : 1;
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
        if (num_blocks == 1) { /* so few items that its keys are shared between more */
            int end_key = in->key_lens[seq], first_key = seen_from(in, end_key - num_queries);
            cut->num_parts = seq < in->num_decodes ? num_decode_parts(end_key - first_key)
                                                   : divide_up(end_key, CHUNK_PART_KEYS) - first_key / CHUNK_PART_KEYS;
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
    job.cuts = malloc((size_t)(in->num_seqs + 1) * sizeof *job.cuts);
    if (!job.cuts) return -1;
    int64_t num_partials = cut_sequences(&job);
    if (num_partials) {
        job.partials = malloc((size_t)num_partials * (SUMS_HEAD + in->head_dim) * sizeof(float));
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
