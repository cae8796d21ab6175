/* How a C file adds functions to gguf_pp.native._kernels: it defines a table of methods, which
 * module.c lists. Sizes and types are checked before a pointer reaches a kernel. */
#ifndef GGUF_PP_MODULE_H
#define GGUF_PP_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "isa.h"
#include "team.h"

extern PyMethodDef rows_methods[], attention_methods[];

/* Add the type Planes; 0, or -1 with an exception set. */
int planes_register(PyObject *module);

/* The team in a Team object, or NULL with an exception set. */
team *team_from(PyObject *object);

/* The level chosen when the module was loaded. */
extern enum isa isa_active;

#endif
