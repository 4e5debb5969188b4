/* The Python module _C: importing it registers the kernels; besides that, what this build is and hooks for tests. */
#include <Python.h>

#include "rope.h"
#include "torch/backend.h"
#include "torch/ops.h"

#if defined(__clang__)
#define COMPILER "Clang " __clang_version__
#else
#define COMPILER "GCC " __VERSION__
#endif

static PyObject *build_info(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    PyObject *built = PyList_New(0);
    int usable;
    for (int i = 0; built && rope_cpu_isa(i, &usable); i++) {
        PyObject *entry = Py_BuildValue("(sO)", rope_cpu_isa(i, &usable), usable ? Py_True : Py_False);
        if (!entry || PyList_Append(built, entry)) Py_CLEAR(built);
        Py_XDECREF(entry);
    }
    if (!built) return NULL;
    return Py_BuildValue("{s:s,s:N,s:s,s:z,s:O,s:K}", "compiler", COMPILER, "instruction_sets", built,
                         "instruction_set", rope_cpu_active_isa(), "cuda_built", rope_cuda_built(), "cuda_registered",
                         cuda_is_wanted() ? Py_True : Py_False, "torch_abi",
                         (unsigned long long)torch.aoti_torch_abi_version());
}

static PyObject *force_instruction_set(PyObject *module, PyObject *argument) {
    (void)module;
    const char *name = NULL;
    if (argument != Py_None && !(name = PyUnicode_AsUTF8AndSize(argument, NULL))) return NULL;
    if (rope_cpu_force_isa(name) != 0)
        return PyErr_Format(PyExc_ValueError, "this build and machine have no instruction set '%s'", name);
    Py_RETURN_NONE;
}

static PyObject *stream_from(PyObject *module, PyObject *argument) {
    (void)module;
    const long long bytes = argument == Py_None ? -1 : PyLong_AsLongLong(argument);
    if (bytes == -1 && PyErr_Occurred()) return NULL;
    rope_cpu_stream_from(bytes);
    Py_RETURN_NONE;
}

static PyObject *prepare_cuda(PyObject *module, PyObject *argument) {
    (void)module;
    const long device = PyLong_AsLong(argument);
    if (device == -1 && PyErr_Occurred()) return NULL;
    return Py_BuildValue("z", rope_cuda_prepare((int)device));
}

static PyObject *with_path(PyObject *argument, void (*use)(const char *path)) {
    const char *path = NULL;
    if (argument != Py_None && !(path = PyUnicode_AsUTF8AndSize(argument, NULL))) return NULL;
    use(path);
    Py_RETURN_NONE;
}

static PyObject *use_nvrtc(PyObject *module, PyObject *path) {
    (void)module;
    return with_path(path, rope_cuda_use_nvrtc);
}

static PyObject *use_emulated_cuda(PyObject *module, PyObject *path) {
    (void)module;
    return with_path(path, emulate_cuda);
}

static PyObject *live_handles(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromLongLong(torch_live_handles());
}

static PyMethodDef methods[] = {
    {"build_info", build_info, METH_NOARGS, "Compiler, instruction sets as (name, usable here), CUDA, torch's ABI."},
    {"force_instruction_set", force_instruction_set, METH_O, "Use this instruction set from now on; None: the best."},
    {"stream_from", stream_from, METH_O, "Write results of so many bytes past the caches; None: as the caches are."},
    {"prepare_cuda", prepare_cuda, METH_O, "Load the kernels of this CUDA device: None, or why there are none."},
    {"use_nvrtc", use_nvrtc, METH_O, "Where NVRTC's library is, for a build that has the kernels as source."},
    {"emulate_cuda", use_emulated_cuda, METH_O, "CPU tensors take CUDA's way, with this driver; None: no more."},
    {"live_handles", live_handles, METH_NOARGS, "Tensor handles that the kernels hold now; 0 between calls."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__C(void) {
    static int registered; /* once per process, also where the module object is made again */
    char message[512];
    if (!registered) {
        if (torch_abi_load(message, sizeof message) != 0) {
            PyErr_SetString(PyExc_ImportError, message);
            return NULL;
        }
        if (torch_ops_register() != 0) {
            PyErr_SetString(PyExc_ImportError, "torch refused the kernels of nd_rotary_encodings");
            return NULL;
        }
        registered = 1;
    }
    return PyModule_Create(&definition);
}
