// The arguments of a call, described in C: the bytes that its params depend on, and its tensors.
#pragma once

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>
#include <vector>

#include "binding/dlpack.h"

// Exported programs load the library into processes that have no Python.
#pragma weak PyFloat_Type
#pragma weak PyLong_Type
#pragma weak PyTuple_Type
#pragma weak PyUnicode_Type
#pragma weak _Py_FalseStruct
#pragma weak _Py_NoneStruct
#pragma weak _Py_NotImplementedStruct
#pragma weak _Py_TrueStruct

namespace fastattn::binding {

// A field of Mask, and its number among each_limit() if it is one.
struct Field {
  PyObject* name;
  int limit;
};

// What Python says once, by set_up() of direct.h.
struct Python {
  const dlpack::Exchange* exchange;
  PyObject *tensor, *parameter, *mask;  // types
  PyObject* take;                       // makes tensors of a list of handles, and owns these
  std::vector<Field> fields;            // of masks
  PyObject *requires_grad, *is_neg;     // names
};
inline Python python;

// A tensor among the arguments, and its number among each_limit(), or -1.
struct Argument {
  dlpack::Tensor tensor;
  PyObject* object;
  int limit;
};

class Description {
 public:
  // False if a call is unusual; a Python exception may then be set.
  bool take(PyObject* call) {
    text_.reserve(512);
    arguments_.reserve(8);
    return add_all(call);
  }

  // A new reference.
  PyObject* key() const {
    return PyBytes_FromStringAndSize(text_.data(), static_cast<Py_ssize_t>(text_.size()));
  }
  bool needs_grad() const { return needs_grad_; }
  // In the order of the call; the tensors of a mask are in its place.
  const std::vector<Argument>& arguments() const { return arguments_; }

 private:
  bool add_all(PyObject* tuple) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    append('(', size);
    for (Py_ssize_t n = 0; n < size; ++n)
      if (!add(PyTuple_GetItem(tuple, n), -1)) return false;
    return true;
  }

  // 1 == True == 1.0, and they are not the same argument.
  bool add(PyObject* x, int limit) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
    if (type == python.tensor || type == python.parameter) return add_tensor(x, limit);
    if (type == python.mask) return add_mask(x);
    if (x == Py_None || x == Py_True || x == Py_False) {
      text_ += x == Py_None ? 'n' : x == Py_True ? 't' : 'f';
    } else if (PyFloat_CheckExact(x)) {
      append('d', PyFloat_AsDouble(x));
    } else if (PyLong_CheckExact(x)) {
      int overflow = 0;
      append('i', PyLong_AsLongLongAndOverflow(x, &overflow));
      return overflow == 0;
    } else if (PyUnicode_CheckExact(x)) {
      Py_ssize_t size = 0;
      const char* const content = PyUnicode_AsUTF8AndSize(x, &size);
      if (content == nullptr) return false;
      append('s', size);
      text_.append(content, static_cast<size_t>(size));
    } else {
      return PyTuple_CheckExact(x) && add_all(x);
    }
    return true;
  }

  bool add_mask(PyObject* mask) {
    text_ += 'm';
    for (const Field& field : python.fields) {
      PyObject* const x = PyObject_GetAttr(mask, field.name);
      const bool added = x != nullptr && add(x, field.limit);
      Py_XDECREF(x);  // the mask has it
      if (!added) return false;
    }
    return true;
  }

  bool add_tensor(PyObject* x, int limit) {
    dlpack::Tensor t;
    if (python.exchange->describe(x, &t) != 0) return false;  // not dense, or a tracer's
    if (t.data == nullptr || t.device_type != dlpack::kCpu || t.byte_offset != 0) return false;
    arguments_.push_back({t, x, limit});
    append('T', t.dtype);
    append('d', t.ndim);
    const size_t bytes = static_cast<size_t>(t.ndim) * sizeof(int64_t);
    text_.append(reinterpret_cast<const char*>(t.shape), bytes);
    text_.append(reinterpret_cast<const char*>(t.strides), bytes);
    if (grad_ && !is_false(PyObject_GetAttr(x, python.requires_grad))) needs_grad_ = true;
    return is_false(PyObject_CallMethodObjArgs(x, python.is_neg, nullptr));
  }

  // Takes the reference.
  static bool is_false(PyObject* x) {
    Py_XDECREF(x);  // there is one False
    return x == Py_False;
  }

  template <typename T>
  void append(char kind, const T& x) {
    text_ += kind;
    text_.append(reinterpret_cast<const char*>(&x), sizeof x);
  }

  std::string text_;
  std::vector<Argument> arguments_;
  const bool grad_ = aoti_torch_grad_mode_is_enabled();
  bool needs_grad_ = false;
};

}  // namespace fastattn::binding
