/* What is done to each row by itself: RMS norm and gated activations. */
#include "module.h"
#include "lanes.h"

enum activation { SILU, GELU_TANH, GELU_ERF };
enum { ELEMENTS_PER_JOB = 16384 }; /* some 10 µs: waking a sleeping thread costs as much */

typedef struct {
    const float *x, *weight, *add;
    float *out;
    int64_t n_rows, n_cols, rows_per_job;
    double eps;
} rms_norm_call;

typedef struct {
    const float *x;
    float *out;
    int64_t n_rows, n_cols, rows_per_job;
    int activation;
} gated_call;

static inline int64_t end_of_job(int i_job, int64_t rows_per_job, int64_t n_rows)
{
    const int64_t end = (i_job + 1) * rows_per_job;
    return end < n_rows ? end : n_rows;
}

#define FN(name) name##_portable
#define VEC_AVX2 0
#include "rows_body.h"
#undef FN
#undef VEC_AVX2

#if ISA_X86
#define FN(name) name##_avx2
#define VEC_AVX2 1
ISA_BEGIN_AVX2
#include "rows_body.h"
ISA_END
#undef FN
#define CHOOSE(name) (isa_active >= ISA_AVX2 ? name##_avx2 : name##_portable)
#else
#define CHOOSE(name) name##_portable
#endif

static int64_t job_size(int64_t n_cols)
{
    return n_cols < ELEMENTS_PER_JOB ? ELEMENTS_PER_JOB / n_cols : 1;
}

static void run_rows(team *t, team_fn *fn, void *call, int64_t n_rows, int64_t rows_per_job)
{
    Py_BEGIN_ALLOW_THREADS
    team_run(t, fn, call, (int)((n_rows + rows_per_job - 1) / rows_per_job));
    Py_END_ALLOW_THREADS
}

static PyObject *py_rms_norm(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *team_object;
    Py_ssize_t x, weight, add, out, n_rows, n_cols;
    double eps;
    if (!PyArg_ParseTuple(args, "Onnnnnnd", &team_object, &x, &weight, &add, &out, &n_rows, &n_cols,
                          &eps))
        return NULL;
    team *t = team_from(team_object);
    if (!t)
        return NULL;
    if (n_rows < 1 || n_cols < 1)
        return PyErr_Format(PyExc_ValueError, "rms_norm of [%zd, %zd]", n_rows, n_cols);
    rms_norm_call call = {(const float *)x, (const float *)weight, (const float *)add, (float *)out,
                          n_rows, n_cols, job_size(n_cols), eps};
    run_rows(t, CHOOSE(rms_norm), &call, n_rows, call.rows_per_job);
    Py_RETURN_NONE;
}

static PyObject *py_gated(PyObject *Py_UNUSED(self), PyObject *args)
{
    PyObject *team_object;
    Py_ssize_t x, out, n_rows, n_cols;
    int activation;
    if (!PyArg_ParseTuple(args, "Onnnni", &team_object, &x, &out, &n_rows, &n_cols, &activation))
        return NULL;
    team *t = team_from(team_object);
    if (!t)
        return NULL;
    if (n_rows < 1 || n_cols < 1 || activation < SILU || activation > GELU_ERF)
        return PyErr_Format(PyExc_ValueError, "gated of [%zd, 2 * %zd], activation %d", n_rows,
                            n_cols, activation);
    gated_call call = {(const float *)x, (float *)out, n_rows, n_cols, job_size(2 * n_cols),
                       activation};
    run_rows(t, CHOOSE(gated), &call, n_rows, call.rows_per_job);
    Py_RETURN_NONE;
}

PyMethodDef rows_methods[] = {
    {"rms_norm", py_rms_norm, METH_VARARGS,
     "rms_norm(team, x, weight, add or 0, out, n_rows, n_cols, eps): addresses of float32."},
    {"gated", py_gated, METH_VARARGS,
     "gated(team, x, out, n_rows, n_cols, activation): addresses of float32;\n"
     "x is [n_rows, 2 n_cols], activation 0 silu, 1 gelu_tanh, 2 gelu_erf."},
    {NULL, NULL, 0, NULL},
};
