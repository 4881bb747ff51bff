// The threads of one call. Work comes in phases of items; a phase is over when its items are done, whoever did them: a
// thread whose core the system gave to somebody else holds up the others only while it has an item, and then skips the
// phases that went by without it.
#pragma once
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>

// A wait is short when the cores are ours. When they are not, whoever waits gives its core away.
#define SPINS 500

typedef struct {
    _Atomic int64_t place;  // the phase, and in the lower 32 bits its first item that nobody took
    char apart[56];
    _Atomic int64_t done;
    int64_t size;
} Team;

typedef struct {
    Team *team;
    int64_t phase;
} Member;

// Take a run of the phase's items, larger ones first: long runs read memory in order, short ones even out the end.
static inline int take(const Member *member, int64_t items, int64_t *first, int64_t *last)
{
    Team *team = member->team;
    int64_t place = atomic_load_explicit(&team->place, memory_order_acquire);
    for (;;) {
        int64_t from = place & 0xffffffff;
        if (place >> 32 != member->phase || from >= items) return 0;
        int64_t count = (items - from) / (4 * team->size);
        if (count < 1) count = 1;
        if (atomic_compare_exchange_weak(&team->place, &place, place + count)) {
            *first = from;
            *last = from + count;
            return 1;
        }
    }
}

static inline void finish(const Member *member, int64_t items, int64_t count)
{
    Team *team = member->team;
    if (atomic_fetch_add(&team->done, count) + count < items) return;
    atomic_store(&team->done, 0);
    atomic_store(&team->place, (member->phase + 1) << 32);
}

// Wait for the end of the phase.
static inline void meet(Member *member)
{
    const Team *team = member->team;
    for (int spins = 0; atomic_load_explicit(&team->place, memory_order_acquire) >> 32 == member->phase; spins++) {
        if (spins < SPINS) _mm_pause();
        else sched_yield();
    }
    member->phase++;
}

// Run the body for the items i that fall to this thread. Every phase has at least one item.
#define SHARE(member, items, i)                                                                              \
    for (int64_t i##_all = (items), i##_from, i##_to; take(member, i##_all, &i##_from, &i##_to);              \
         finish(member, i##_all, i##_to - i##_from))                                                          \
        for (int64_t i = i##_from; i < i##_to; i++)
