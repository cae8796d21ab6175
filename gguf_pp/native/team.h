/* A team of threads that belongs to one device.
 *
 * A team is used from one thread at a time; that thread takes part in the work. Which member runs
 * which index is not fixed, so `fn` must not care. With one member there are no threads at all.
 */
#ifndef GGUF_PP_TEAM_H
#define GGUF_PP_TEAM_H

#include "arena.h"

typedef struct team team;
typedef void team_fn(void *arg, int i);

/* NULL if memory or threads are lacking. Members inherit the affinity of the caller. */
team *team_new(int n_threads);
void team_free(team *t);
int team_size(const team *t);

/* Call fn(arg, i) once for each i in [0, n), and return when all calls have returned. */
void team_run(team *t, team_fn *fn, void *arg, int n);

/* At least n_bytes on a 64-byte boundary, valid until the next call; NULL if memory is lacking.
 * The content is not kept. */
void *team_scratch(team *t, size_t n_bytes);

/* Where the team's device takes memory for weights from; see arena.h. */
chunk **team_chunk(team *t);

#endif
