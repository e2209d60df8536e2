// A repeated call at inference: one C function from the arguments of a public function to its
// result.
//
// Python describes, recalls and dispatches a call in several times the time of a small problem.
// Here a plan, the params of a call without its pointers, stands in a dict of Python's. Its key is
// all that the params depend on: sizes, strides and dtypes of tensors, and the other arguments.
// Values of limits are checked at every call. Whatever is unusual gives None, and the ordinary way
// then computes or raises. fastattn/backends/direct.py has the conditions that are not of the
// arguments.
#pragma once

#include <Python.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "binding/dlpack.h"
#include "binding/lines.h"
#include "binding/on_cpu.h"
#include "binding/views.h"

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

// What a tensor among the arguments is to the kernels. Fields of other names hold no tensor.
enum Role {
  kQuery,
  kKey,
  kValue,
  kWeight,
  kBias,
  kKeep,
  kKvLen,
  kKvBegin,
  kSlopes,
  kTable,
  kBuckets,
  kRoles,
  kByDtype,
  kOffset,
  kNone
};
constexpr const char* kRoleNames[] = {"query",   "key",    "value",     "weight", "bias",
                                      "keep",    "kv_len", "kv_begin",  "slopes", "table",
                                      "buckets", "",       "attn_mask", "offset"};

// A field of call_cache.Call, or of a class that holds arguments: Mask, ALiBi, RelativeBias.
struct Field {
  PyObject* name;
  int role;
};
struct Record {
  PyObject* type;
  std::vector<Field> fields;
};

// What Python says once, by set_up().
struct Python {
  const dlpack::Exchange* exchange;
  PyObject *tensor, *parameter;  // types
  PyObject* take;                // makes tensors of a list of handles, and owns these
  std::vector<Field> call;
  std::vector<Record> records;
  PyObject *requires_grad, *is_neg;  // names
};
inline Python python;

// ---- describing a call ----

class Description {
 public:
  // False if a call is unusual; a Python exception may then be set.
  bool take(PyObject* call) {
    text_.reserve(512);
    for (size_t n = 0; n < python.call.size(); ++n)
      if (!add(PyTuple_GetItem(call, static_cast<Py_ssize_t>(n)), python.call[n].role))
        return false;
    return true;
  }

  // A new reference.
  PyObject* key() const {
    return PyBytes_FromStringAndSize(text_.data(), static_cast<Py_ssize_t>(text_.size()));
  }

  // nullptr if there is none.
  const dlpack::Tensor* operator[](Role role) const {
    return tensors_[role].data == nullptr ? nullptr : &tensors_[role];
  }
  void* data(Role role) const { return tensors_[role].data; }
  LineParts line() const { return {(*this)[kSlopes], (*this)[kTable], (*this)[kBuckets], offset_}; }

 private:
  bool add(PyObject* x, int role) {
    PyObject* const type = reinterpret_cast<PyObject*>(Py_TYPE(x));
    if (type == python.tensor || type == python.parameter) return add_tensor(x, role);
    for (const Record& record : python.records)
      if (type == record.type) return add_record(x, record);
    if (role == kOffset && PyLong_CheckExact(x)) offset_ = PyLong_AsLongLong(x);
    return add_plain(x);
  }

  bool add_record(PyObject* record, const Record& kind) {
    append('r', kind.type);
    for (const Field& field : kind.fields) {
      PyObject* const x = PyObject_GetAttr(record, field.name);
      const bool added = x != nullptr && add(x, field.role);
      Py_XDECREF(x);  // the record has it
      if (!added) return false;
    }
    return true;
  }

  // 1 == True == 1.0, and they are not the same argument.
  bool add_plain(PyObject* x) {
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
    } else if (PyTuple_CheckExact(x)) {
      const Py_ssize_t size = PyTuple_Size(x);
      append('(', size);
      for (Py_ssize_t n = 0; n < size; ++n)
        if (!add_plain(PyTuple_GetItem(x, n))) return false;
    } else {
      return false;
    }
    return true;
  }

  bool add_tensor(PyObject* x, int role) {
    dlpack::Tensor t;
    if (python.exchange->describe(x, &t) != 0) return false;  // not dense, or a tracer's
    if (role == kByDtype) role = t.dtype.code == dlpack::kBool ? kKeep : kBias;
    if (role >= kRoles) return false;
    tensors_[role] = t;
    if (t.data == nullptr || t.device_type != dlpack::kCpu || t.byte_offset != 0) return false;
    append('T', t.dtype);
    append(static_cast<char>('0' + role), t.ndim);
    const size_t bytes = static_cast<size_t>(t.ndim) * sizeof(int64_t);
    text_.append(reinterpret_cast<const char*>(t.shape), bytes);
    text_.append(reinterpret_cast<const char*>(t.strides), bytes);
    if (grad_ && !is_false(PyObject_GetAttr(x, python.requires_grad))) return false;
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
  dlpack::Tensor tensors_[kRoles] = {};
  int64_t offset_ = 0;
  const bool grad_ = aoti_torch_grad_mode_is_enabled();
};

// ---- plans ----

// A tensor of PyTorch's, which is deleted unless somebody takes it.
struct Deleter {
  void operator()(AtenTensorOpaque* handle) const { aoti_torch_delete_tensor_object(handle); }
};
using Handle = std::unique_ptr<AtenTensorOpaque, Deleter>;

struct Plan {
  ForwardParams p;                      // without pointers
  std::vector<int64_t> sizes, strides;  // of the result
};
constexpr const char* kPlan = "fastattn.Plan";

// Limits that read_limits() can read; others are no part of a plan.
inline bool are_readable(const dlpack::Tensor& t) {
  if (!t.dtype.is(dlpack::kInt, 32) && !t.dtype.is(dlpack::kInt, 64)) return false;
  int64_t stride = 1;
  for (int32_t d = t.ndim; d-- > 0; stride *= t.shape[d])
    if (t.shape[d] != 1 && t.strides[d] != stride) return false;
  return true;
}

inline int64_t count_of(const dlpack::Tensor* t) {
  int64_t count = t != nullptr;
  for (int32_t d = 0; t != nullptr && d < t->ndim; ++d) count *= t->shape[d];
  return count;
}

// False if a value is outside of [0, most].
template <typename T>
bool read_limits(const dlpack::Tensor& t, int64_t most, int32_t* to) {
  const T* const from = static_cast<const T*>(t.data);
  for (int64_t n = 0, count = count_of(&t); n < count; ++n) {
    if (from[n] < 0 || from[n] > most) return false;
    to[n] = static_cast<int32_t>(from[n]);
  }
  return true;
}

// Sets the pointer of a limit to `*memory`, and moves that behind the values.
inline bool set_limit(const dlpack::Tensor* t, int64_t N, int32_t** memory, KeyLimit* limit) {
  if (t == nullptr) return true;
  const bool read = t->dtype.bits == 32 ? read_limits<int32_t>(*t, N, *memory)
                                        : read_limits<int64_t>(*t, N, *memory);
  limit->data = *memory;
  *memory += count_of(t);
  return read;
}

// All pointers to memory of the arguments, except for those to limits. A line is no argument.
inline void set_pointers(const Description& given, ForwardParams* p) {
  p->q.data = given.data(kQuery), p->k.data = given.data(kKey), p->v.data = given.data(kValue);
  p->w.data = given.data(kWeight);
  if (!given.line().given()) p->bias.data = given.data(kBias);
  p->mask.keep = static_cast<const uint8_t*>(given.data(kKeep));
}

// The result; none if a limit has a wrong value.
inline Handle compute(const Plan& plan, const Description& given) {
  ForwardParams p = plan.p;
  set_pointers(given, &p);

  constexpr int64_t kAlign = 64;
  const int64_t rows = p.B * p.H * p.M, workspace = device::forward_workspace_bytes(p);
  const int64_t limits = count_of(given[kKvLen]) + count_of(given[kKvBegin]);
  const LineParts line = given.line();
  const int64_t bytes = workspace + 4 * (3 * rows + limits + (line.given() ? line.count(p) : 0));
  const std::unique_ptr<char, decltype(&std::free)> memory(
      static_cast<char*>(std::aligned_alloc(kAlign, (bytes / kAlign + 1) * kAlign)), &std::free);
  if (memory == nullptr) return {};
  p.workspace = memory.get();
  p.stats = reinterpret_cast<float*>(memory.get() + workspace);
  p.lse = p.stats + 2 * rows;
  int32_t* next = reinterpret_cast<int32_t*>(p.lse + rows);
  if (!set_limit(given[kKvLen], p.N, &next, &p.mask.kv_len)) return {};
  if (!set_limit(given[kKvBegin], p.N, &next, &p.mask.kv_begin)) return {};
  if (line.given()) {
    float* const own = reinterpret_cast<float*>(next);
    if (!line.write(p, own)) return {};
    p.bias.data = own + p.M - 1;  // line_view()
  }

  AtenTensorHandle made = nullptr;
  const auto dims = static_cast<int64_t>(plan.sizes.size());
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dims, plan.sizes.data(), plan.strides.data(),
                                                  static_cast<int32_t>(scalar_type_of(p.out.dtype)),
                                                  aoti_torch_device_type_cpu(), 0, &made));
  Handle out(made);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(out.get(), &p.out.data));
  device::expect_writes(p.out.data, rows * p.E * (p.out.dtype == DType::kFloat32 ? 4 : 2));
  device::Current::compute(p);
  return out;
}

// ---- functions of the module _C ----

inline PyObject* answer(PyObject* x) {
  PyErr_Clear();  // the ordinary way says what is wrong
  return Py_NewRef(x);
}

// As a tensor of Python's.
inline PyObject* take(Handle tensor) {
  PyObject* const list = PyList_New(1);
  PyObject* const capsule = PyCapsule_New(tensor.get(), nullptr, nullptr);
  if (list == nullptr || capsule == nullptr) return nullptr;
  PyList_SetItem(list, 0, capsule);
  tensor.release();
  PyObject* const taken = PyObject_CallFunctionObjArgs(python.take, list, nullptr);
  PyObject* const result = taken == nullptr ? nullptr : PyList_GetItem(taken, 0);
  Py_XINCREF(result);
  Py_XDECREF(taken);
  Py_DECREF(list);
  return result;
}

// (table, call) -> the result of a call with a plan; None of a call
// that can have none; NotImplemented where there is none yet.
inline PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t) {
  Description given;
  if (!given.take(args[1])) return answer(Py_None);
  PyObject* const key = given.key();
  PyObject* const found = key == nullptr ? nullptr : PyDict_GetItemWithError(args[0], key);
  Py_XDECREF(key);
  if (found == nullptr) return answer(Py_NotImplemented);
  if (!PyCapsule_IsValid(found, kPlan)) return answer(Py_None);
  const auto& plan = *static_cast<const Plan*>(PyCapsule_GetPointer(found, kPlan));
  Py_INCREF(found);  // another thread may forget it
  Handle out;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    out = compute(plan, given);
  } catch (...) {  // no memory
  }
  PyEval_RestoreThread(state);
  Py_DECREF(found);
  if (out.get() == nullptr) return answer(Py_None);
  return take(std::move(out));
}

// (call, its result) -> (key, plan) of the call that the CPU kernels of this thread computed last;
// (key, None) if it can have none; None where it cannot be told from others.
inline PyObject* plan(PyObject*, PyObject* const* args, Py_ssize_t) {
  Description given;
  dlpack::Tensor out;
  if (!given.take(args[0]) || python.exchange->describe(args[1], &out) != 0) return answer(Py_None);
  const ForwardParams& p = device::Current::last();
  const auto plain = [](const dlpack::Tensor* t) { return t == nullptr || are_readable(*t); };
  ForwardParams filled = p;
  set_pointers(given, &filled);
  const LineParts line = given.line();
  const bool same = std::memcmp(&filled, &p, sizeof p) == 0 && out.data == p.out.data;
  const bool possible = same && !p.dropout.enabled && p.weights_mode == WeightsMode::kNone &&
                        plain(given[kKvLen]) && plain(given[kKvBegin]) &&
                        (!line.given() || (given[kBias] == nullptr && line.usual(p)));
  PyObject* found = nullptr;
  if (possible) {
    auto made = std::make_unique<Plan>(
        Plan{p, {out.shape, out.shape + out.ndim}, {out.strides, out.strides + out.ndim}});
    found = PyCapsule_New(made.get(), kPlan, [](PyObject* capsule) {
      delete static_cast<Plan*>(PyCapsule_GetPointer(capsule, kPlan));
    });
    if (found != nullptr) made.release();
  } else {
    found = Py_NewRef(Py_None);
  }
  PyObject* const key = given.key();
  PyObject* const pair = key && found ? PyTuple_Pack(2, key, found) : nullptr;
  Py_XDECREF(key);
  Py_XDECREF(found);
  return pair;
}

inline std::vector<Field> fields_of(PyObject* names) {
  std::vector<Field> fields;
  for (Py_ssize_t n = 0; n < PyTuple_Size(names); ++n) {
    PyObject* const name = Py_NewRef(PyTuple_GetItem(names, n));
    int role = 0;
    while (role < kNone && PyUnicode_CompareWithASCIIString(name, kRoleNames[role]) != 0) ++role;
    fields.push_back({name, role});
  }
  return fields;
}

// (the capsule of DLPack, the types of tensors and of parameters, the names of fields of calls,
// other types with the names of their fields, what makes tensors of handles) -> whether plans can
// be made
inline PyObject* set_up(PyObject*, PyObject* const* args, Py_ssize_t) {
  const void* const found = PyCapsule_GetPointer(args[0], dlpack::kExchange);
  if (found == nullptr) return nullptr;
  python.exchange = static_cast<const dlpack::Exchange*>(found);
  python.tensor = Py_NewRef(args[1]), python.parameter = Py_NewRef(args[2]);
  python.call = fields_of(args[3]), python.take = Py_NewRef(args[5]);
  python.records.clear();
  for (Py_ssize_t n = 0; n < PyTuple_Size(args[4]); ++n) {
    PyObject* const pair = PyTuple_GetItem(args[4], n);
    python.records.push_back(
        {Py_NewRef(PyTuple_GetItem(pair, 0)), fields_of(PyTuple_GetItem(pair, 1))});
  }
  python.requires_grad = PyUnicode_InternFromString("requires_grad");
  python.is_neg = PyUnicode_InternFromString("is_neg");
  const bool known = python.exchange->major == 1 && python.exchange->describe != nullptr;
  return Py_NewRef(known ? Py_True : Py_False);
}

// As a PyCFunction, which every kind of function is to Python.
inline PyCFunction as_function(PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}
inline PyMethodDef functions[] = {{"run", as_function(run), METH_FASTCALL, nullptr},
                                  {"plan", as_function(plan), METH_FASTCALL, nullptr},
                                  {"set_up", as_function(set_up), METH_FASTCALL, nullptr},
                                  {nullptr, nullptr, 0, nullptr}};

}  // namespace fastattn::binding
