/* Memory of weights, side by side in huge pages: with pages of 4 KiB, address translation takes a
 * third of the speed at which one row of activations streams a matrix. */
#ifndef GGUF_PP_ARENA_H
#define GGUF_PP_ARENA_H

#include <stddef.h>

typedef struct chunk chunk;

/* n_bytes on a 64-byte boundary, or NULL if memory is lacking. They come from `*current` or from a
 * new chunk that replaces it; `*owner` is the chunk, to be released once the bytes are not needed.
 * Calls with the same `current` must not overlap. */
void *arena_take(chunk **current, size_t n_bytes, chunk **owner);

/* From any thread; NULL is nothing. */
void arena_release(chunk *c);

#endif
