/* `Planes`: the Python object around a matrix. Everything is checked here or in
 * gguf_pp/quants/planes.py; the kernels trust their arguments. */
#include "matrix.h"
#include "module.h"

#include <limits.h>
#include <stdlib.h>

typedef struct {
    PyObject_HEAD
    struct matrix *matrix;
    PyObject *owner; /* of the planes, if they belong to another object */
    size_t n_bytes;
} planes_object;

static int kind_of_type(long type)
{
    for (int kind = 0; kind < N_KINDS; kind++)
        if (LAYOUTS[kind].type == type)
            return kind;
    return -1;
}

/* Fill a part from (type, first_row, n_rows, data); the view keeps `data` in place. */
static int read_part(PyObject *item, int n_cols, struct part *part, Py_buffer *view,
                     size_t *row_bytes)
{
    long type;
    PyObject *data;
    if (!PyArg_ParseTuple(item, "liiO", &type, &part->first_row, &part->n_rows, &data))
        return -1;
    int kind = kind_of_type(type);
    if (kind < 0) {
        PyErr_Format(PyExc_ValueError, "type %ld has no planes", type);
        return -1;
    }
    if (codebook_is_missing((enum kind)kind)) {
        PyErr_Format(PyExc_ValueError, "the codebook of type %ld was not set", type);
        return -1;
    }
    struct layout l = LAYOUTS[kind];
    int block = l.scale == SCALE_NONE ? 1 : l.n_groups * GROUP;
    if (n_cols % block || part->n_rows < 1 || part->first_row < 0 ||
        part->n_rows > INT_MAX - part->first_row - LANES) {
        PyErr_Format(PyExc_ValueError, "%d rows of %d columns do not fit type %ld", part->n_rows,
                     n_cols, type);
        return -1;
    }
    *row_bytes = (size_t)(n_cols / block) * (size_t)l.block_bytes;
    if (PyObject_GetBuffer(data, view, PyBUF_C_CONTIGUOUS))
        return -1;
    if ((size_t)view->len != (size_t)part->n_rows * *row_bytes) {
        PyErr_Format(PyExc_ValueError, "%zd bytes for %d rows of %zu", view->len, part->n_rows,
                     *row_bytes);
        return -1;
    }
    part->kind = (enum kind)kind;
    part->n_blocks = (part->n_rows + LANES - 1) / LANES;
    part->block_bytes = row_block_bytes(l, (size_t)n_cols);
    return 0;
}

static int allocate_part(planes_object *self, struct part *part, team *t)
{
    size_t n_bytes = (size_t)part->n_blocks * part->block_bytes;
    part->planes = arena_take(team_chunk(t), n_bytes, &part->owner);
    if (!part->planes) {
        PyErr_NoMemory();
        return -1;
    }
    self->n_bytes += n_bytes;
    return 0;
}

static int fill(planes_object *self, int n_cols, PyObject *items, team *t)
{
    Py_ssize_t n = PyTuple_GET_SIZE(items);
    struct matrix *m = self->matrix = calloc(1, sizeof *m + (size_t)n * sizeof *m->parts);
    Py_buffer *views = calloc((size_t)n + 1, sizeof *views);
    const uint8_t **rows = calloc((size_t)n + 1, sizeof *rows);
    size_t *row_bytes = calloc((size_t)n + 1, sizeof *row_bytes);
    int status = m && views && rows && row_bytes ? 0 : -1;
    if (status)
        PyErr_NoMemory();
    else
        m->n_cols = n_cols;
    for (Py_ssize_t i = 0; i < n && !status; i++) {
        struct part *part = &m->parts[i];
        status = read_part(PyTuple_GET_ITEM(items, i), n_cols, part, &views[i], &row_bytes[i]);
        if (!status)
            status = allocate_part(self, part, t);
        if (!status) {
            rows[i] = views[i].buf;
            part->first_block = m->n_blocks;
            m->n_blocks += part->n_blocks;
            m->n_parts++;
        }
    }
    if (!status) {
        Py_BEGIN_ALLOW_THREADS
        matrix_pack(m, rows, row_bytes, t);
        Py_END_ALLOW_THREADS
    }
    for (Py_ssize_t i = 0; views && i < n; i++)
        PyBuffer_Release(&views[i]);
    free(views);
    free(rows);
    free(row_bytes);
    return status;
}

static PyObject *planes_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n_cols", "parts", "team", NULL};
    int n_cols;
    PyObject *parts, *team_arg;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iO!O", names, &n_cols, &PyTuple_Type, &parts,
                                     &team_arg))
        return NULL;
    team *t = team_from(team_arg);
    if (!t)
        return NULL;
    if (n_cols < 1)
        return PyErr_Format(PyExc_ValueError, "%d columns", n_cols);
    planes_object *self = (planes_object *)type->tp_alloc(type, 0);
    if (self && fill(self, n_cols, parts, t))
        Py_CLEAR(self);
    return (PyObject *)self;
}

static void planes_dealloc(PyObject *object)
{
    planes_object *self = (planes_object *)object;
    PyTypeObject *type = Py_TYPE(object);
    for (int i = 0; self->matrix && !self->owner && i < self->matrix->n_parts; i++)
        arena_release(self->matrix->parts[i].owner);
    free(self->matrix);
    Py_XDECREF(self->owner);
    type->tp_free(object);
    Py_DECREF(type);
}

/* linear(team, x, n_rows, out, stride, exact, bias, add); addresses as integers, 0 for none. */
static PyObject *planes_linear(PyObject *object, PyObject *const *args, Py_ssize_t n_args)
{
    if (n_args != 8)
        return PyErr_Format(PyExc_TypeError, "linear takes 8 arguments, not %zd", n_args);
    team *t = team_from(args[0]);
    if (!t)
        return NULL;
    struct product p = {
        .matrix = ((planes_object *)object)->matrix,
        .x = PyLong_AsVoidPtr(args[1]),
        .n_rows = (int)PyLong_AsLong(args[2]),
        .out = PyLong_AsVoidPtr(args[3]),
        .stride = (int)PyLong_AsLong(args[4]),
        .exact = PyObject_IsTrue(args[5]),
        .bias = PyLong_AsVoidPtr(args[6]),
        .add = PyLong_AsVoidPtr(args[7]),
    };
    if (PyErr_Occurred())
        return NULL;
    for (int i = 0; i < p.matrix->n_parts; i++)
        if (p.matrix->parts[i].first_row + p.matrix->parts[i].n_rows > p.stride)
            return PyErr_Format(PyExc_ValueError, "part %d does not fit %d columns", i, p.stride);
    if (p.n_rows < 0 || !p.x || !p.out)
        return PyErr_Format(PyExc_ValueError, "%d rows, x %p, out %p", p.n_rows, p.x, p.out);
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = matrix_multiply(&p, t);
    Py_END_ALLOW_THREADS
    if (status)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

/* rows(ids, n_rows, out): ids is the address of int64, out of float [n_rows][n_cols]. */
static PyObject *planes_rows(PyObject *object, PyObject *args)
{
    struct matrix *m = ((planes_object *)object)->matrix;
    unsigned long long ids_address, out_address;
    int n_rows;
    if (!PyArg_ParseTuple(args, "KiK", &ids_address, &n_rows, &out_address))
        return NULL;
    const int64_t *ids = (const int64_t *)(uintptr_t)ids_address;
    for (int i = 0; i < n_rows; i++)
        if (!matrix_part(m, ids[i]))
            return PyErr_Format(PyExc_IndexError, "no row %lld", (long long)ids[i]);
    Py_BEGIN_ALLOW_THREADS
    matrix_rows(m, ids, n_rows, (float *)(uintptr_t)out_address);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Rows [first, stop) of `from`, if they are whole row blocks: 1 if any, 0 if none, -1 if not. */
static int cut(const struct part *from, int first, int stop, struct part *to)
{
    int from_stop = from->first_row + from->n_rows;
    int start = first > from->first_row ? first : from->first_row;
    int end = stop < from_stop ? stop : from_stop, skipped = start - from->first_row;
    if (start >= end)
        return 0;
    if (skipped % LANES || (end != from_stop && (end - from->first_row) % LANES))
        return -1;
    *to = *from;
    to->planes += (size_t)(skipped / LANES) * from->block_bytes;
    to->first_row = start - first;
    to->n_rows = end - start;
    to->n_blocks = (to->n_rows + LANES - 1) / LANES;
    return 1;
}

static PyObject *planes_slice(PyObject *object, PyObject *args)
{
    planes_object *from = (planes_object *)object;
    int first, stop;
    if (!PyArg_ParseTuple(args, "ii", &first, &stop))
        return NULL;
    planes_object *self = (planes_object *)Py_TYPE(object)->tp_alloc(Py_TYPE(object), 0);
    if (!self)
        return NULL;
    Py_INCREF(self->owner = object);
    struct matrix *m = self->matrix =
        calloc(1, sizeof *m + (size_t)from->matrix->n_parts * sizeof *m->parts);
    if (!m) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    m->n_cols = from->matrix->n_cols;
    for (int i = 0; i < from->matrix->n_parts; i++) {
        struct part *part = &m->parts[m->n_parts];
        int found = cut(&from->matrix->parts[i], first, stop, part);
        if (found < 0) {
            Py_DECREF(self);
            return PyErr_Format(PyExc_ValueError, "rows [%d, %d) are not whole blocks of %d rows",
                                first, stop, LANES);
        }
        if (found) {
            m->n_parts++;
            part->first_block = m->n_blocks;
            m->n_blocks += part->n_blocks;
            self->n_bytes += (size_t)part->n_blocks * part->block_bytes;
        }
    }
    return (PyObject *)self;
}

static PyObject *planes_set_codebook(PyObject *Py_UNUSED(unused), PyObject *args)
{
    long type;
    Py_buffer entries;
    if (!PyArg_ParseTuple(args, "ly*", &type, &entries))
        return NULL;
    int kind = kind_of_type(type);
    int status = kind < 0 ? -1 : codebook_set((enum kind)kind, entries.buf, (size_t)entries.len);
    Py_ssize_t n_bytes = entries.len;
    PyBuffer_Release(&entries);
    if (status)
        return PyErr_Format(PyExc_ValueError, "type %ld has no codebook of %zd bytes", type,
                            n_bytes);
    Py_RETURN_NONE;
}

static PyObject *planes_n_bytes(PyObject *object, void *Py_UNUSED(closure))
{
    return PyLong_FromSize_t(((planes_object *)object)->n_bytes);
}

static PyMethodDef planes_methods[] = {
    {"linear", (PyCFunction)(void (*)(void))planes_linear, METH_FASTCALL,
     "linear(team, x, n_rows, out, stride, exact, bias, add): out = x Wᵀ + bias + add."},
    {"rows", planes_rows, METH_VARARGS, "rows(ids, n_rows, out): exactly dequantized rows."},
    {"slice", planes_slice, METH_VARARGS, "slice(first, stop): a view of whole row blocks."},
    {"set_codebook", planes_set_codebook, METH_VARARGS | METH_STATIC,
     "set_codebook(type, entries): int8, those of IQ1 eight-fold; needed before a part of `type`."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef planes_getset[] = {
    {"n_bytes", planes_n_bytes, NULL, "Size of the planes.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot planes_slots[] = {
    {Py_tp_doc, "Planes(n_cols, parts, team): parts are (type, first_row, n_rows, data)."},
    {Py_tp_new, planes_new},
    {Py_tp_dealloc, planes_dealloc},
    {Py_tp_methods, planes_methods},
    {Py_tp_getset, planes_getset},
    {0, NULL},
};

static PyType_Spec planes_spec = {
    .name = "gguf_pp.native._kernels.Planes",
    .basicsize = sizeof(planes_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = planes_slots,
};

int planes_register(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&planes_spec), *types = PyTuple_New(0);
    int status = type && types ? 0 : -1;
    for (int kind = 0; kind < N_KINDS && !status; kind++) {
        PyObject *one = Py_BuildValue("(i)", LAYOUTS[kind].type), *joined = NULL;
        if (one)
            joined = PySequence_Concat(types, one);
        Py_XDECREF(one);
        Py_XSETREF(types, joined);
        status = joined ? 0 : -1;
    }
    if (!status)
        status = PyModule_AddObjectRef(module, "PLANE_TYPES", types) ||
                 PyModule_AddObjectRef(module, "Planes", type);
    Py_XDECREF(types);
    Py_XDECREF(type);
    return status;
}
