// Calls the C++ library's functions, and mixes keys: for a small tensor `ctypes` and Python take
// longer than the kernel.
//
// A module of Python's own, within its stable ABI: one build serves every CPython from 3.11 on.
// Where it was not built, `ctypes` and Python do the same.

#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <array>
#include <cstdint>
#include <utility>

namespace {

constexpr size_t MOST = 20;  // arguments of a function

// An address or an integer: both are passed alike.
using Word = int64_t;
using Invoke = void (*)(void* address, const Word* values);

struct Function {
  void* address;
  size_t count;
  Invoke invoke;
};

template <size_t... I>
Invoke invoke_with(std::index_sequence<I...>) {
  return [](void* address, const Word* values) {
    reinterpret_cast<void (*)(decltype(Word(I))...)>(address)(values[I]...);
  };
}

template <size_t... N>
std::array<Invoke, MOST + 1> invokes(std::index_sequence<N...>) {
  return {invoke_with(std::make_index_sequence<N>())...};
}

void forget(PyObject* capsule) {
  delete static_cast<Function*>(PyCapsule_GetPointer(capsule, nullptr));
}

// The 64 bits of an integer, signed or not; of a longer one `ctypes` would pass some.
bool word_of(PyObject* given, Word* word) {
  *word = PyLong_AsLongLong(given);
  if (*word != -1 || PyErr_Occurred() == nullptr) return true;
  if (PyErr_ExceptionMatches(PyExc_OverflowError) == 0) return false;
  PyErr_Clear();
  const uint64_t whole = PyLong_AsUnsignedLongLong(given);
  if (PyErr_Occurred() == nullptr) {
    *word = static_cast<Word>(whole);
    return true;
  }
  if (PyErr_ExceptionMatches(PyExc_OverflowError) != 0) {
    PyErr_Clear();
    PyErr_Format(PyExc_OverflowError, "%S; allowed: integers of 64 bits, signed or not", given);
  }
  return false;
}

PyObject* call(PyObject* capsule, PyObject* const* given, Py_ssize_t count) {
  const auto* function = static_cast<Function*>(PyCapsule_GetPointer(capsule, nullptr));
  if (function == nullptr) return nullptr;
  if (static_cast<size_t>(count) != function->count) {
    return PyErr_Format(PyExc_TypeError, "%zd arguments; allowed: %zu", count, function->count);
  }
  Word values[MOST];
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!word_of(given[i], &values[i])) return nullptr;
  }
  Py_BEGIN_ALLOW_THREADS;
  function->invoke(function->address, values);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyMethodDef CALL = {"call", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call)),
                    METH_FASTCALL, "Call it with that many addresses and integers."};

PyObject* function(PyObject*, PyObject* args) {
  static const auto table = invokes(std::make_index_sequence<MOST + 1>());
  unsigned long long address;
  Py_ssize_t count;
  if (!PyArg_ParseTuple(args, "Kn:function", &address, &count)) return nullptr;
  if (count < 0 || static_cast<size_t>(count) > MOST) {
    return PyErr_Format(PyExc_ValueError, "%zd arguments; allowed: up to %zu", count, MOST);
  }
  auto* made = new Function{reinterpret_cast<void*>(address), static_cast<size_t>(count),
                            table[static_cast<size_t>(count)]};
  PyObject* capsule = PyCapsule_New(made, nullptr, forget);
  if (capsule == nullptr) {
    delete made;
    return nullptr;
  }
  PyObject* found = PyCFunction_NewEx(&CALL, capsule, nullptr);
  Py_DECREF(capsule);
  return found;
}

// As `Key.bits` in compressors/base.py: splitmix64 over each field in turn.
PyObject* mixed(PyObject*, PyObject* const* given, Py_ssize_t count) {
  uint64_t state = 0;
  for (Py_ssize_t i = 0; i < count; ++i) {
    const uint64_t field = PyLong_AsUnsignedLongLongMask(given[i]);
    if (field == UINT64_MAX && PyErr_Occurred() != nullptr) return nullptr;
    state += field + 0x9E3779B97F4A7C15u;
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9u;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EBu;
    state ^= state >> 31;
  }
  return PyLong_FromLongLong(static_cast<int64_t>(state));
}

PyMethodDef METHODS[] = {
    {"function", function, METH_VARARGS,
     "A callable of the function at an address that takes so many addresses and integers."},
    {"mixed", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(mixed)), METH_FASTCALL,
     "Integers mixed to a signed one of 64 bits."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "calls", nullptr, 0, METHODS,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_calls() { return PyModule_Create(&MODULE); }
