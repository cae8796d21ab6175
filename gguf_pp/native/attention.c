/* Queries, keys and values of a ubatch: norm, rotation, cache, attention.
 *
 * Keys lie as [slot][kv head][cell / 8][D][8], so that lanes are cells; values as
 * [slot][kv head][cell][D up to a multiple of 8], so that lanes are elements. Cells are written
 * before they are read, and never read by a row that does not see them. */
#include "module.h"
#include "lanes.h"

#include <float.h>

enum {
    MAX_HEAD_SIZE = 512,
    BLOCK = 64,     /* cells per step of the running maximum, from a multiple of itself */
    TILE_ROWS = 24, /* rows that share a pass over the cells */
    TILE_STEP = 6,  /* rows that share a load */
    ROWS_PER_STORE = 8,
    SMALL = 1 << 16 /* multiply-adds that are not worth waking a thread for */
};

typedef struct {
    int64_t slot, position, span_end;
} row;

typedef struct {
    const float *qkv, *cosine, *sine, *q_norm, *k_norm;
    float *out, *q;
    void *k, *v;
    row *rows;
    Py_ssize_t n_slots, n_cells, n_positions;
    Py_ssize_t n_rows, n_heads, n_kv_heads, head_size, padded_head_size, n_rot, window, tile_rows;
    int neox, k_is_half, v_is_half;
    float scale, softcap;
    double eps;
} attention_call;

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t key_offset(const attention_call *c, int64_t slot, int64_t i_head,
                                 int64_t i_group)
{
    return ((slot * c->n_kv_heads + i_head) * ((c->n_cells + 7) / 8) + i_group) * c->head_size * 8;
}

static inline int64_t value_offset(const attention_call *c, int64_t slot, int64_t i_head,
                                   int64_t cell)
{
    return ((slot * c->n_kv_heads + i_head) * c->n_cells + cell) * c->padded_head_size;
}

static inline const void *at_element(const void *p, int64_t at, int is_half)
{
    return (const char *)p + at * (is_half ? 2 : 4);
}

static inline void prefetch(const void *p, int64_t n, int is_half)
{
    for (int64_t at = 0; at < n * (is_half ? 2 : 4); at += 64)
        __builtin_prefetch((const char *)p + at);
}

#define FN(name) name##_portable
#define VEC_AVX2 0
#include "attention_body.h"
#undef FN
#undef VEC_AVX2

#if ISA_X86
#define FN(name) name##_avx2
#define VEC_AVX2 1
ISA_BEGIN_AVX2
#include "attention_body.h"
ISA_END
#undef FN
#define CHOOSE(name) (isa_active >= ISA_AVX2 ? name##_avx2 : name##_portable)
#else
#define CHOOSE(name) name##_portable
#endif

/* Fill c->rows from (slot, start, n_rows); -1 with an exception if they do not fit. */
static int place_rows(attention_call *c, PyObject *spans)
{
    Py_ssize_t t = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(spans); i++) {
        Py_ssize_t slot, start, n;
        PyObject *span = PyTuple_GET_ITEM(spans, i);
        if (!PyTuple_Check(span)) {
            PyErr_SetString(PyExc_TypeError, "a span is not a tuple");
            return -1;
        }
        if (!PyArg_ParseTuple(span, "nnn", &slot, &start, &n))
            return -1;
        const Py_ssize_t room = min_of(c->n_cells, c->n_positions);
        if (slot < 0 || slot >= c->n_slots || start < 0 || n < 1 || start > room - n ||
            n > c->n_rows - t) {
            PyErr_Format(PyExc_ValueError,
                         "span (slot %zd, start %zd, n_rows %zd) does not fit %zd slots, "
                         "%zd cells, %zd positions and %zd rows left",
                         slot, start, n, c->n_slots, c->n_cells, c->n_positions, c->n_rows - t);
            return -1;
        }
        for (Py_ssize_t r = 0; r < n; r++)
            c->rows[t + r] = (row){slot, start + r, t + n};
        t += n;
    }
    if (t != c->n_rows) {
        PyErr_Format(PyExc_ValueError, "spans hold %zd of %zd rows", t, c->n_rows);
        return -1;
    }
    return 0;
}

static int64_t n_multiply_adds(const attention_call *c)
{
    int64_t n_seen = 0;
    for (int64_t t = 0; t < c->n_rows; t++)
        n_seen += c->window ? min_of(c->rows[t].position + 1, c->window) : c->rows[t].position + 1;
    return 2 * n_seen * c->n_heads * c->head_size;
}

static void run_jobs(team *t, team_fn *fn, attention_call *c, int64_t n_jobs, int is_small)
{
    if (!is_small) {
        team_run(t, fn, c, (int)n_jobs);
        return;
    }
    for (int i = 0; i < n_jobs; i++)
        fn(c, i);
}

static void attention(team *t, attention_call *c)
{
    const int64_t n_flat = c->n_rows * (c->n_heads / c->n_kv_heads);
    const int64_t n_stored = c->n_rows * (c->n_heads + 2 * c->n_kv_heads) * c->head_size;
    run_jobs(t, CHOOSE(prepare), c, (c->n_rows + ROWS_PER_STORE - 1) / ROWS_PER_STORE,
             n_stored < SMALL);
    int64_t n_tiles;
    for (c->tile_rows = TILE_ROWS;; c->tile_rows = (c->tile_rows + 1) / 2) {
        n_tiles = (n_flat + c->tile_rows - 1) / c->tile_rows;
        if (n_tiles * c->n_kv_heads >= team_size(t) || c->tile_rows == 1)
            break;
    }
    run_jobs(t, CHOOSE(attend_tile), c, n_tiles * c->n_kv_heads, n_multiply_adds(c) < SMALL);
}

static int is_sane(const attention_call *c)
{
    return c->n_rows >= 1 && c->n_kv_heads >= 1 && c->n_heads >= 1 &&
           c->n_heads % c->n_kv_heads == 0 && c->head_size >= 1 && c->head_size <= MAX_HEAD_SIZE &&
           c->n_rot >= 0 && c->n_rot <= c->head_size && c->n_rot % 2 == 0 && c->window >= 0;
}

static int parse(PyObject *args, PyObject **team_object, PyObject **spans, attention_call *c)
{
    Py_ssize_t p[8];
    if (!PyArg_ParseTuple(args, "OO!nnn(nnppnn)(nnn)(nnpnn)(nnd)nff", team_object, &PyTuple_Type,
                          spans, &p[0], &p[1], &c->n_rows, &p[2], &p[3], &c->k_is_half,
                          &c->v_is_half, &c->n_slots, &c->n_cells, &c->n_heads, &c->n_kv_heads,
                          &c->head_size, &p[4], &p[5], &c->neox, &c->n_positions, &c->n_rot, &p[6],
                          &p[7], &c->eps, &c->window, &c->scale, &c->softcap))
        return -1;
    c->qkv = (const float *)p[0];
    c->out = (float *)p[1];
    c->k = (void *)p[2];
    c->v = (void *)p[3];
    c->cosine = (const float *)p[4];
    c->sine = (const float *)p[5];
    c->q_norm = (const float *)p[6];
    c->k_norm = (const float *)p[7];
    c->padded_head_size = (c->head_size + 7) / 8 * 8;
    if (!is_sane(c)) {
        PyErr_Format(PyExc_ValueError,
                     "attention of %zd rows, %zd heads on %zd, of %zd (%zd rotated)", c->n_rows,
                     c->n_heads, c->n_kv_heads, c->head_size, c->n_rot);
        return -1;
    }
    if (c->softcap > 0)
        c->scale /= c->softcap;
    return 0;
}

static PyObject *py_attention(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *team_object, *spans;
    attention_call c = {0};
    if (parse(args, &team_object, &spans, &c))
        return NULL;
    team *t = team_from(team_object);
    if (!t)
        return NULL;
    const size_t q_bytes = (size_t)(c.n_rows * c.n_heads * c.head_size) * sizeof *c.q;
    char *scratch = team_scratch(t, (size_t)c.n_rows * sizeof *c.rows + q_bytes);
    if (!scratch)
        return PyErr_NoMemory();
    c.rows = (row *)scratch;
    c.q = (float *)(scratch + (size_t)c.n_rows * sizeof *c.rows);
    if (place_rows(&c, spans))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    attention(t, &c);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

PyMethodDef attention_methods[] = {
    {"attention", py_attention, METH_VARARGS,
     "attention(team, spans, qkv, out, n_rows, (k, v, k_is_half, v_is_half, n_slots, n_cells),\n"
     "(n_heads, n_kv_heads, head_size), (cos, sin, neox, n_positions, n_rot),\n"
     "(q_norm or 0, k_norm or 0, eps), window, scale, softcap): addresses;\n"
     "spans of (slot, start, n_rows)."},
    {NULL, NULL, 0, NULL},
};
