#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

/* How long a worker looks for the next job before it sleeps: longer than the Python code between
 * two layers of a step, shorter than the time between two steps. */
#define SPIN_NS 60000
#define MAX_CHUNKS ((1 << 20) - 1)

struct Pool {
    /* The job's number (24 bits), its chunks (20) and the next chunk that nobody has taken (20). One word, so that
     * a thread that comes late cannot take a chunk of a job other than the one it saw. */
    _Atomic uint64_t ticket;
    _Atomic int num_done;
    ChunkFunction run; /* this and `job` are stable while a chunk is taken and not done */
    const void *job;
    atomic_flag busy;
    int num_threads;
    _Atomic int num_asleep;
    pthread_mutex_t mutex;
    pthread_cond_t wake_up;
};

static inline int ticket_count(uint64_t ticket) { return (int)(ticket >> 20) & MAX_CHUNKS; }
static inline int ticket_next(uint64_t ticket) { return (int)ticket & MAX_CHUNKS; }
static inline int has_chunks(uint64_t ticket) { return ticket_next(ticket) < ticket_count(ticket); }

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void take_chunks(Pool *pool) {
    uint64_t ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    while (has_chunks(ticket)) {
        if (!atomic_compare_exchange_weak_explicit(
                &pool->ticket, &ticket, ticket + 1, memory_order_acq_rel, memory_order_acquire))
            continue;
        pool->run(pool->job, ticket_next(ticket));
        atomic_fetch_add_explicit(&pool->num_done, 1, memory_order_release);
        ticket = atomic_load_explicit(&pool->ticket, memory_order_acquire);
    }
}

static void sleep_until_job(Pool *pool) {
    pthread_mutex_lock(&pool->mutex);
    atomic_fetch_add(&pool->num_asleep, 1);
    while (!has_chunks(atomic_load(&pool->ticket))) pthread_cond_wait(&pool->wake_up, &pool->mutex);
    atomic_fetch_sub(&pool->num_asleep, 1);
    pthread_mutex_unlock(&pool->mutex);
}

static void *work(void *argument) {
    Pool *pool = argument;
    for (;;) {
        int64_t deadline = now_ns() + SPIN_NS;
        while (!has_chunks(atomic_load_explicit(&pool->ticket, memory_order_acquire))) {
            for (int i = 0; i < 32; i++) pause_cpu();
            if (now_ns() > deadline) {
                sleep_until_job(pool);
                break;
            }
        }
        take_chunks(pool);
    }
    return NULL;
}

Pool *pool_create(int num_threads) {
    Pool *pool = calloc(1, sizeof *pool);
    if (!pool) return NULL;
    atomic_flag_clear(&pool->busy);
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->wake_up, NULL);
    pool->num_threads = 1;
    for (; pool->num_threads < num_threads; pool->num_threads++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, work, pool)) break; /* fewer threads are slower, not wrong */
        pthread_detach(thread);
    }
    return pool;
}

int pool_num_threads(const Pool *pool) { return pool->num_threads; }

static void publish(Pool *pool, ChunkFunction run, const void *job, int num_chunks) {
    pool->run = run;
    pool->job = job;
    atomic_store_explicit(&pool->num_done, 0, memory_order_relaxed);
    uint64_t number = (atomic_load_explicit(&pool->ticket, memory_order_relaxed) >> 40) + 1;
    /* Sequentially consistent, like the worker's counting before it looks for the last time: one of the two sees the other. */
    atomic_store(&pool->ticket, number << 40 | (uint64_t)num_chunks << 20);
    if (atomic_load(&pool->num_asleep)) {
        pthread_mutex_lock(&pool->mutex);
        pthread_cond_broadcast(&pool->wake_up);
        pthread_mutex_unlock(&pool->mutex);
    }
}

void pool_run(Pool *pool, ChunkFunction run, const void *job, int num_chunks) {
    if (num_chunks <= 1 || num_chunks > MAX_CHUNKS || pool->num_threads == 1 ||
        atomic_flag_test_and_set_explicit(&pool->busy, memory_order_acquire)) {
        for (int chunk = 0; chunk < num_chunks; chunk++) run(job, chunk);
        return;
    }
    publish(pool, run, job, num_chunks);
    take_chunks(pool);
    for (int spins = 0; atomic_load_explicit(&pool->num_done, memory_order_acquire) < num_chunks; spins++) {
        if (spins < 2000) pause_cpu();
        else sched_yield(); /* the worker lost its core: give ours away */
    }
    atomic_flag_clear_explicit(&pool->busy, memory_order_release);
}
