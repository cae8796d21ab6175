#include "arena.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { HUGE_PAGE = 2 << 20, CHUNK_BYTES = 16 << 20, LINE = 64 };

struct chunk {
    atomic_int n_refs; /* one per piece taken, and one while it is somebody's current chunk */
    size_t size, used;
    unsigned char *memory;
};

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

static chunk *new_chunk(size_t size)
{
    chunk *c = malloc(sizeof *c);
    unsigned char *memory = c ? aligned_alloc(HUGE_PAGE, size) : NULL;
    if (!memory) {
        free(c);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    madvise(memory, size, MADV_HUGEPAGE); /* where the system declines, small pages do */
#endif
    atomic_init(&c->n_refs, 1);
    c->size = size;
    c->used = 0;
    c->memory = memory;
    return c;
}

static void *take_from(chunk *c, size_t n_bytes)
{
    void *p = c->memory + c->used;
    c->used += n_bytes;
    return p;
}

void *arena_take(chunk **current, size_t n_bytes, chunk **owner)
{
    n_bytes = round_up(n_bytes ? n_bytes : 1, LINE);
    if (n_bytes > CHUNK_BYTES / 2) {
        *owner = new_chunk(round_up(n_bytes, HUGE_PAGE));
        return *owner ? take_from(*owner, n_bytes) : NULL;
    }
    if (*current && atomic_load(&(*current)->n_refs) == 1)
        (*current)->used = 0;
    if (!*current || (*current)->used + n_bytes > (*current)->size) {
        chunk *fresh = new_chunk(CHUNK_BYTES);
        if (!fresh)
            return NULL;
        arena_release(*current);
        *current = fresh;
    }
    *owner = *current;
    atomic_fetch_add(&(*owner)->n_refs, 1);
    return take_from(*owner, n_bytes);
}

void arena_release(chunk *c)
{
    if (c && atomic_fetch_sub(&c->n_refs, 1) == 1) {
        free(c->memory);
        free(c);
    }
}
