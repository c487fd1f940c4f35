/* A few threads that share the chunks of one job at a time. */
#ifndef ASERVE_POOL_H
#define ASERVE_POOL_H

typedef struct Pool Pool;
typedef void (*ChunkFunction)(const void *job, int chunk);

/* Start num_threads - 1 workers, which live as long as the process; NULL if memory runs out. */
Pool *pool_create(int num_threads);

int pool_num_threads(const Pool *pool);

/* Call run(job, i) once for each i below num_chunks and return when all are done.
 *
 * The caller takes chunks too and never waits for a worker that has not begun one, so a sleeping,
 * descheduled or (after a fork) absent worker costs nothing but its help. While another thread's job is in the pool,
 * the caller runs all chunks alone. Results must not depend on who runs a chunk, or when.
 */
void pool_run(Pool *pool, ChunkFunction run, const void *job, int num_chunks);

#endif
