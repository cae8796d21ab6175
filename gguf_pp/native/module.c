#include "module.h"

enum isa isa_active;

typedef struct {
    PyObject_HEAD
    team *team;
} team_object;

static PyTypeObject *team_type;

team *team_from(PyObject *object)
{
    if (!PyObject_TypeCheck(object, team_type)) {
        PyErr_Format(PyExc_TypeError, "expected a Team, not %s", Py_TYPE(object)->tp_name);
        return NULL;
    }
    team *t = ((team_object *)object)->team;
    if (!t)
        PyErr_SetString(PyExc_ValueError, "the team is closed");
    return t;
}

static PyObject *team_object_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"n_threads", NULL};
    int n_threads;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i", names, &n_threads))
        return NULL;
    if (n_threads < 1 || n_threads > 1024)
        return PyErr_Format(PyExc_ValueError, "n_threads %d is not in 1..1024", n_threads);
    team_object *self = (team_object *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->team = team_new(n_threads);
    if (!self->team) {
        Py_DECREF(self);
        return PyErr_Format(PyExc_OSError, "could not start %d threads", n_threads);
    }
    return (PyObject *)self;
}

static PyObject *team_object_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    team *t = ((team_object *)self)->team;
    ((team_object *)self)->team = NULL;
    if (t) {
        Py_BEGIN_ALLOW_THREADS
        team_free(t);
        Py_END_ALLOW_THREADS
    }
    Py_RETURN_NONE;
}

static void team_object_dealloc(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    team *t = ((team_object *)self)->team;
    if (t)
        team_free(t);
    type->tp_free(self);
    Py_DECREF(type);
}

static PyObject *team_object_n_threads(PyObject *self, void *Py_UNUSED(closure))
{
    team *t = team_from(self);
    return t ? PyLong_FromLong(team_size(t)) : NULL;
}

static PyMethodDef team_object_methods[] = {
    {"close", team_object_close, METH_NOARGS, "End the threads; a second call does nothing."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef team_object_getset[] = {
    {"n_threads", team_object_n_threads, NULL, "Members, the calling thread included.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot team_slots[] = {
    {Py_tp_doc, "Team(n_threads): threads that share the work of one device's kernels."},
    {Py_tp_new, team_object_new},
    {Py_tp_dealloc, team_object_dealloc},
    {Py_tp_methods, team_object_methods},
    {Py_tp_getset, team_object_getset},
    {0, NULL},
};

static PyType_Spec team_spec = {
    .name = "gguf_pp.native._kernels.Team",
    .basicsize = sizeof(team_object),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = team_slots,
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernels",
    .m_doc = "C kernels of the CPU.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__kernels(void)
{
    PyMethodDef *const tables[] = {rows_methods, attention_methods};
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    isa_active = isa_level();
    team_type = (PyTypeObject *)PyType_FromSpec(&team_spec);
    if (!team_type || PyModule_AddObjectRef(module, "Team", (PyObject *)team_type) ||
        PyModule_AddStringConstant(module, "isa", isa_name(isa_active)) ||
        planes_register(module))
        goto fail;
    for (size_t i = 0; i < sizeof tables / sizeof *tables; i++)
        if (PyModule_AddFunctions(module, tables[i]))
            goto fail;
    return module;
fail:
    Py_DECREF(module);
    return NULL;
}
