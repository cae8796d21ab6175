#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

enum { SPIN_NS = 50000, SPINS_PER_LOOK = 64 };

/* `ticket` is run << 32 | next index. An index is claimed by adding one to the whole word, so a
 * member that wakes late, with an old run in mind, can claim nothing of the new one: nobody waits
 * for sleepers. `fn`, `arg` and `n` stay put while a claimed index of their run is unfinished. */
struct team {
    _Atomic uint64_t ticket;
    _Atomic int n_done;
    _Atomic(team_fn *) fn;
    _Atomic(void *) arg;
    _Atomic int n;
    _Atomic int n_asleep;
    _Atomic int stop;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    int n_threads;
    void *scratch;
    size_t scratch_bytes;
    chunk *weights;
    pthread_t threads[];
};

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static int64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (int64_t)ts.tv_sec * 1000000000 + ts.tv_nsec;
}

static uint32_t run_of(uint64_t ticket) { return (uint32_t)(ticket >> 32); }

/* Work on the current run until its indexes are used up; returns the run last seen. */
static uint32_t take_part(team *t)
{
    uint64_t ticket = atomic_load(&t->ticket);
    for (;;) {
        team_fn *fn = atomic_load(&t->fn);
        void *arg = atomic_load(&t->arg);
        int n = atomic_load(&t->n), i = (int)(uint32_t)ticket;
        if (i >= n)
            return run_of(ticket);
        if (atomic_compare_exchange_weak(&t->ticket, &ticket, ticket + 1)) {
            fn(arg, i);
            atomic_fetch_add(&t->n_done, 1);
            ticket = atomic_load(&t->ticket);
        }
    }
}

static void sleep_until_run_differs(team *t, uint32_t seen)
{
    pthread_mutex_lock(&t->mutex);
    atomic_fetch_add(&t->n_asleep, 1);
    while (run_of(atomic_load(&t->ticket)) == seen && !atomic_load(&t->stop))
        pthread_cond_wait(&t->wake, &t->mutex);
    atomic_fetch_sub(&t->n_asleep, 1);
    pthread_mutex_unlock(&t->mutex);
}

static void wait_until_run_differs(team *t, uint32_t seen)
{
    int64_t deadline = now_ns() + SPIN_NS;
    do {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if (run_of(atomic_load(&t->ticket)) != seen || atomic_load(&t->stop))
                return;
            relax();
        }
    } while (now_ns() < deadline);
    sleep_until_run_differs(t, seen);
}

static void *member(void *arg)
{
    team *t = arg;
    uint32_t seen = 0;
    while (!atomic_load(&t->stop)) {
        wait_until_run_differs(t, seen);
        seen = take_part(t);
    }
    return NULL;
}

static void wake_all(team *t)
{
    pthread_mutex_lock(&t->mutex);
    pthread_cond_broadcast(&t->wake);
    pthread_mutex_unlock(&t->mutex);
}

team *team_new(int n_threads)
{
    team *t = calloc(1, sizeof *t + (size_t)n_threads * sizeof(pthread_t));
    if (!t)
        return NULL;
    pthread_mutex_init(&t->mutex, NULL);
    pthread_cond_init(&t->wake, NULL);
    /* Signals are for the interpreter's main thread; members inherit the mask. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0;
    for (t->n_threads = 1; t->n_threads < n_threads && !failed; t->n_threads += !failed)
        failed = pthread_create(&t->threads[t->n_threads], NULL, member, t);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        team_free(t);
        return NULL;
    }
    return t;
}

void team_free(team *t)
{
    atomic_store(&t->stop, 1);
    wake_all(t);
    for (int i = 1; i < t->n_threads; i++)
        pthread_join(t->threads[i], NULL);
    pthread_cond_destroy(&t->wake);
    pthread_mutex_destroy(&t->mutex);
    free(t->scratch);
    arena_release(t->weights);
    free(t);
}

int team_size(const team *t) { return t->n_threads; }

void team_run(team *t, team_fn *fn, void *arg, int n)
{
    if (t->n_threads == 1 || n == 1) {
        for (int i = 0; i < n; i++)
            fn(arg, i);
        return;
    }
    /* Moving the index first fails every claim that a late member prepared with the old ticket. */
    uint32_t last = run_of(atomic_load(&t->ticket));
    atomic_store(&t->ticket, (uint64_t)last << 32 | INT32_MAX);
    atomic_store(&t->fn, fn);
    atomic_store(&t->arg, arg);
    atomic_store(&t->n, n);
    atomic_store(&t->n_done, 0);
    atomic_store(&t->ticket, (uint64_t)(last + 1) << 32);
    if (atomic_load(&t->n_asleep))
        wake_all(t);
    take_part(t);
    for (int spins = 0; atomic_load(&t->n_done) < n; spins++) {
        if (spins < 4096)
            relax();
        else
            sched_yield();
    }
}

chunk **team_chunk(team *t) { return &t->weights; }

void *team_scratch(team *t, size_t n_bytes)
{
    if (n_bytes > t->scratch_bytes) {
        free(t->scratch);
        t->scratch_bytes = (n_bytes + n_bytes / 4 + 63) / 64 * 64;
        t->scratch = aligned_alloc(64, t->scratch_bytes);
        if (!t->scratch)
            t->scratch_bytes = 0;
    }
    return t->scratch;
}
