// The threads of one call: they share out items of work and wait for each other between phases.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

// A wait is short when the cores are ours. When they are not, whoever waits gives its core away.
#define SPINS 20000

typedef struct {
    _Atomic int64_t next;  // the first item of the phase that nobody took
    char apart[56];
    _Atomic int arrived;
    _Atomic int phase;
    int size;
} Team;

// Take a run of the phase's items, larger ones first: long runs read memory in order, short ones even out the end.
static inline int take(Team *team, int64_t items, int64_t *first, int64_t *last)
{
    int64_t from = atomic_load_explicit(&team->next, memory_order_relaxed);
    for (;;) {
        if (from >= items) return 0;
        int64_t count = (items - from) / (2 * team->size);
        if (count < 1) count = 1;
        if (atomic_compare_exchange_weak(&team->next, &from, from + count)) {
            *first = from;
            *last = from + count;
            return 1;
        }
    }
}

// All threads have done the phase's items before any goes on.
static inline void meet(Team *team)
{
    int phase = atomic_load(&team->phase);
    if (atomic_fetch_add(&team->arrived, 1) == team->size - 1) {
        atomic_store(&team->arrived, 0);
        atomic_store(&team->next, 0);
        atomic_store(&team->phase, phase + 1);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->phase, memory_order_acquire) == phase; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
}

#define SHARE(team, items, i)                                                      \
    for (int64_t i##_from, i##_to; take(team, items, &i##_from, &i##_to);)          \
        for (int64_t i = i##_from; i < i##_to; i++)
