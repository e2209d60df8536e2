// The arguments of a call, described in C: the bytes that its params depend on, and its tensors.
#pragma once

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <string>
#include <vector>

#include "binding/dlpack.h"
#include "binding/four_dims.h"

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

// What an argument is, if not memory that params point to as it lies: numbers from 0 on are those
// of each_limit(), the others parts of a line, dropout's seed, and sinks.
enum Part {
  kWhole = -1,
  kSlopes = -2,
  kTable = -3,
  kBuckets = -4,
  kOffset = -5,
  kSeed = -6,
  kSink = -7
};

// A class that holds arguments, as Mask does, and its fields.
struct Field {
  PyObject* name;
  int part;
};
struct Record {
  PyObject* type;
  std::vector<Field> fields;
};

// What Python says once, by set_up() of direct.h.
struct Python {
  const dlpack::Exchange* exchange;
  PyObject *tensor, *parameter;  // types
  PyObject* adopt;               // makes tensors of a list of handles, and owns these
  std::vector<Record> records;
  PyObject *requires_grad, *is_neg;  // names
};
inline Python python;

constexpr size_t kFirst = 3;  // queries, keys and values, which may be one tensor

// What an argument is to plans for any length: not of M or N, [..., M or N, D], [..., M, N], or the
// mean of such over heads. `kStats`: [B, H, M, 2] of any call.
enum class Role { kOther, kPoints, kPairs, kMean, kStats };

// A tensor among the arguments.
struct Argument {
  dlpack::Tensor tensor;
  PyObject* object;
  int part;
  size_t place;  // of its sizes and strides in the description
  Role role;
  FourDims dims;  // if there is a plan for any length
};

class Description {
 public:
  // False if a call is unusual; a Python exception may then be set. `sink`: the place of sinks.
  bool describe(PyObject* call, Py_ssize_t sink = -1) {
    text_.reserve(512);
    arguments_.reserve(8);
    return add_all(call, sink);
  }
  // The same of a forward call, which may have a plan for any length.
  bool describe_forward(PyObject* call) {
    constexpr Py_ssize_t kWeight = 3;  // of the additive score, which has plans for each length
    constexpr Py_ssize_t kSinks = 7;   // of Call in fastattn/problem/call_cache.py
    if (!describe(call, kSinks)) return false;
    if (PyTuple_GetItem(call, kWeight) != Py_None || has_alignment_) return true;
    forget_lengths([](auto*) {});
    return true;
  }

  // Takes M, N and strides out of the key, if all tensors have the four dims of the kernels in
  // memory. `set_roles` sets those of other passes than a forward one.
  template <typename F>
  void forget_lengths(F set_roles) {
    if (arguments_.size() < kFirst) return;
    Argument* const first = arguments_.data();
    if (!lead_.set({&first[0].tensor, &first[1].tensor, &first[2].tensor})) return;
    set_roles(&arguments_);
    for (Argument& x : arguments_)
      if (!suits_any_length(&x)) return;
    lead_.match(&first[0].dims, &first[1].dims, &first[2].dims);
    any_length_ = true;
    text_ += '*';
    for (const Argument& x : arguments_) {
      if (x.role == Role::kOther) continue;
      const bool pairs = x.role == Role::kPairs || x.role == Role::kMean;
      const int32_t dims = x.tensor.ndim;
      forget(x, dims - 2, pairs ? dims : dims - 1);
      forget(x, dims, 2 * dims);  // the strides
    }
  }

  // A new reference.
  PyObject* key() const {
    return PyBytes_FromStringAndSize(text_.data(), static_cast<Py_ssize_t>(text_.size()));
  }
  bool needs_grad() const { return needs_grad_; }
  // Whether the key has no M, no N and no strides of queries, keys, values, a mask and a bias.
  bool any_length() const { return any_length_; }
  const Lead& lead() const { return lead_; }
  // In the order of the call; the tensors of a record are in its place.
  const std::vector<Argument>& arguments() const { return arguments_; }
  // nullptr if there is none.
  const dlpack::Tensor* find(int part) const {
    for (const Argument& x : arguments_)
      if (x.part == part) return &x.tensor;
    return nullptr;
  }
  int64_t offset() const { return offset_; }

 private:
  bool add_all(PyObject* tuple, Py_ssize_t sink = -1) {
    const Py_ssize_t size = PyTuple_Size(tuple);
    append('(', size);
    for (Py_ssize_t n = 0; n < size; ++n)
      if (!add(PyTuple_GetItem(tuple, n), n == sink ? kSink : kWhole)) return false;
    return true;
  }

  // Of a forward pass.
  Role role_of(int part) const {
    if (part != kWhole) return Role::kOther;
    return arguments_.size() < kFirst ? Role::kPoints : Role::kPairs;
  }

  // Limits of samples have no length. Limits of rows and parts of a line have one: they get plans
  // for each length.
  bool suits_any_length(Argument* x) const {
    const dlpack::Tensor& t = x->tensor;
    if (x->part == kSeed || x->part == kSink) return true;
    if (x->role == Role::kOther)
      return x->part >= kWhole && t.ndim == 1 && t.shape[0] == lead_.samples;
    if (x->role == Role::kStats) return true;
    return t.ndim > 1 && lead_.as_four(t, lead_.has_heads && x->role != Role::kMean, &x->dims);
  }

  // Sizes and strides of a tensor, by number.
  void forget(const Argument& x, int32_t from, int32_t to) {
    const size_t size = sizeof(int64_t), bytes = static_cast<size_t>(to - from) * size;
    text_.replace(x.place + static_cast<size_t>(from) * size, bytes, bytes, '*');
  }

  // 1 == True == 1.0, and they are not the same argument.
  bool add(PyObject* x, int part) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
    if (type == python.tensor || type == python.parameter) return add_tensor(x, part);
    for (const Record& record : python.records)
      if (type == record.type) return add_record(x, record);
    if (x == Py_None || x == Py_True || x == Py_False) {
      text_ += x == Py_None ? 'n' : x == Py_True ? 't' : 'f';
    } else if (PyFloat_CheckExact(x)) {
      append('d', PyFloat_AsDouble(x));
    } else if (PyLong_CheckExact(x)) {
      int overflow = 0;
      const int64_t value = PyLong_AsLongLongAndOverflow(x, &overflow);
      append('i', value);
      if (part == kOffset) offset_ = value;
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

  bool add_record(PyObject* record, const Record& kind) {
    append('r', kind.type);
    for (const Field& field : kind.fields) {
      PyObject* const x = PyObject_GetAttr(record, field.name);
      const bool added = x != nullptr && add(x, field.part);
      has_alignment_ = has_alignment_ || (added && PyUnicode_CheckExact(x));
      Py_XDECREF(x);  // the record has it
      if (!added) return false;
    }
    return true;
  }

  bool add_tensor(PyObject* x, int part) {
    dlpack::Tensor t;
    if (python.exchange->describe(x, &t) != 0) return false;  // not dense, or a tracer's
    if (t.data == nullptr || t.device_type != dlpack::kCpu || t.byte_offset != 0) return false;
    if (part == kWhole && t.ndim == 0 && t.dtype.is(dlpack::kInt, 64)) part = kSeed;
    append('T', t.dtype);
    append('d', t.ndim);
    arguments_.push_back({t, x, part, text_.size(), role_of(part), {}});
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
  int64_t offset_ = 0;
  const bool grad_ = aoti_torch_grad_mode_is_enabled();
  bool needs_grad_ = false, any_length_ = false;
  Lead lead_;
  bool has_alignment_ = false;  // of a diagonal, which may depend on M and N
};

}  // namespace fastattn::binding
