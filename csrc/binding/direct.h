// A repeated call: one C function from the arguments of a public function to its result. Another
// leads from the gradient of the result to those of the arguments.
//
// Python describes, recalls and dispatches a call in several times the time of a small problem.
// Here a plan, the params of an earlier call, stands in a dict of Python's. Its key is all that the
// params depend on but memory: sizes, strides and dtypes of tensors, and the other arguments. Some
// calls have a plan for all lengths (description.h): their sizes and strides fill it in.
// Values of limits are checked at every call. Whatever is unusual gives None, and the ordinary way
// then computes or raises. fastattn/backends/direct.py has the conditions that are not of the
// arguments.
#pragma once

#include <Python.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "binding/description.h"
#include "binding/plan.h"

namespace fastattn::binding {

inline PyObject* answer(PyObject* x) {
  PyErr_Clear();  // the ordinary way says what is wrong
  return Py_NewRef(x);
}

// A list of tensors of Python's.
inline PyObject* tensors_of(std::vector<Handle> handles) {
  PyObject* const list = PyList_New(static_cast<Py_ssize_t>(handles.size()));
  if (list == nullptr) return nullptr;
  for (size_t n = 0; n < handles.size(); ++n) {
    PyObject* const capsule = PyCapsule_New(handles[n].get(), nullptr, nullptr);
    if (capsule == nullptr) {
      Py_DECREF(list);
      return nullptr;
    }
    PyList_SetItem(list, static_cast<Py_ssize_t>(n), capsule);
  }
  for (Handle& handle : handles) handle.release();
  PyObject* const taken = PyObject_CallFunctionObjArgs(python.adopt, list, nullptr);
  Py_DECREF(list);
  return taken;
}

template <typename Params>
const Plan<Params>& plan_of(PyObject* capsule) {
  return *static_cast<const Plan<Params>*>(PyCapsule_GetPointer(capsule, kName<Params>));
}

// The results of a plan that lives, as a list; nullptr if there are none.
template <typename Params>
PyObject* results_of(const Plan<Params>& plan, const Description& given) {
  std::vector<Handle> results;
  PyThreadState* const state = PyEval_SaveThread();
  try {
    results = compute(plan, given);
  } catch (...) {  // no memory
    results.clear();
  }
  PyEval_RestoreThread(state);
  return results.empty() ? nullptr : tensors_of(std::move(results));
}

template <typename Params>
PyObject* as_capsule(std::unique_ptr<Plan<Params>> plan) {
  PyObject* const capsule = PyCapsule_New(plan.get(), kName<Params>, [](PyObject* x) {
    delete static_cast<Plan<Params>*>(PyCapsule_GetPointer(x, kName<Params>));
  });
  if (capsule != nullptr) plan.release();
  return capsule;
}

inline bool describe_backward(PyObject* forward, PyObject* call, Description* given) {
  if (!given->describe(call)) return false;
  const auto& plan = plan_of<ForwardParams>(forward);
  if (plan.any_length) given->forget_lengths([&](auto* arguments) { set_roles(plan, arguments); });
  return true;
}

// What a dict has for a call, a borrowed reference; nullptr if nothing.
inline PyObject* look_up(PyObject* table, const Description& given) {
  PyObject* const key = given.key();
  PyObject* const found = key == nullptr ? nullptr : PyDict_GetItemWithError(table, key);
  Py_XDECREF(key);
  return found;
}

// A tuple of objects whose references it takes; nullptr if one is.
inline PyObject* pack(const std::vector<PyObject*>& objects) {
  bool whole = true;
  for (PyObject* x : objects) whole = whole && x != nullptr;
  PyObject* const tuple = whole ? PyTuple_New(static_cast<Py_ssize_t>(objects.size())) : nullptr;
  for (size_t n = 0; n < objects.size(); ++n) {
    if (tuple != nullptr) {
      PyTuple_SetItem(tuple, static_cast<Py_ssize_t>(n), objects[n]);
    } else {
      Py_XDECREF(objects[n]);
    }
  }
  return tuple;
}

// The first `count` tensors of a list: one, or a tuple of them.
inline PyObject* first_of(PyObject* list, size_t count) {
  if (count == 1) return Py_NewRef(PyList_GetItem(list, 0));
  std::vector<PyObject*> first;
  for (size_t n = 0; n < count; ++n)
    first.push_back(Py_NewRef(PyList_GetItem(list, static_cast<Py_ssize_t>(n))));
  return pack(first);
}

// (table, call) -> the result of a call with a plan, of which the table has (plan, trained). If it
// needs a gradient, a list: (trained, result, stats) and the tensors among its arguments, or their
// copies. None of a call that can have no plan; NotImplemented where there is none yet.
inline PyObject* run(PyObject*, PyObject* const* args, Py_ssize_t) {
  Description given;
  if (!given.describe_forward(args[1])) return answer(Py_None);
  PyObject* const found = look_up(args[0], given);
  if (found == nullptr) return answer(Py_NotImplemented);
  if (!PyTuple_Check(found)) return answer(Py_None);
  PyObject *const capsule = PyTuple_GetItem(found, 0), *const trained = PyTuple_GetItem(found, 1);
  if (given.needs_grad() && trained == Py_None) return answer(Py_None);
  Py_INCREF(found);  // another thread may forget it
  const auto& plan = plan_of<ForwardParams>(capsule);
  const size_t count = plan.results.size();
  PyObject* const results = results_of(plan, given);
  PyObject* answered = nullptr;
  if (results == nullptr) {
    answered = answer(Py_None);
  } else if (!given.needs_grad()) {
    answered = first_of(results, count);
  } else {
    auto next = static_cast<Py_ssize_t>(count);
    PyObject* const stats = PyList_GetItem(results, next++);
    std::vector<PyObject*> all{nullptr};
    for (const Argument& x : given.arguments()) all.push_back(x.object);
    each_copied(plan, given, [&](int n, int64_t) { all[1 + n] = PyList_GetItem(results, next++); });
    for (size_t n = 1; n < all.size(); ++n) Py_INCREF(all[n]);
    all[0] = pack({Py_NewRef(trained), first_of(results, count), Py_NewRef(stats)});
    PyObject* const tuple = pack(all);
    answered = tuple == nullptr ? nullptr : PySequence_List(tuple);
    Py_XDECREF(tuple);
  }
  Py_XDECREF(results);
  Py_DECREF(found);
  return answered;
}

// (plan of the forward pass, table, what backward got) -> the gradients, None for the first
// argument of run()'s result and one for each other. That of a weight or a sink has a row for each
// sample. None and NotImplemented as run().
inline PyObject* run_backward(PyObject*, PyObject* const* args, Py_ssize_t) {
  Description given;
  if (!describe_backward(args[0], args[2], &given) || given.needs_grad()) return answer(Py_None);
  PyObject* const found = look_up(args[1], given);
  if (found == nullptr) return answer(Py_NotImplemented);
  if (found == Py_None) return answer(Py_None);
  Py_INCREF(found);  // another thread may forget it
  const auto& plan = plan_of<BackwardParams>(found);
  PyObject* const results = results_of(plan, given);
  PyObject* grads = nullptr;
  if (results == nullptr) {
    grads = answer(Py_None);
  } else {
    std::vector<PyObject*> all(1 + count_arguments(plan), Py_None);
    Py_ssize_t next = 0;
    const int* input = plan.inputs.data();
    BackwardParams p = plan.p;
    each_gradient(&p, [&](auto* pointer) {
      const int n = *input++;
      if (*pointer != nullptr) all[1 + n] = PyList_GetItem(results, next++);
    });
    if (plan.sink >= 0) all[1 + plan.sink] = PyList_GetItem(results, next);
    for (PyObject* x : all) Py_INCREF(x);
    grads = pack(all);
  }
  Py_XDECREF(results);
  Py_DECREF(found);
  return grads;
}

// (call, its result, whether it is the first such call) -> (key, plan, tensors among the arguments)
// of the call that the CPU kernels of this thread computed last. The plan is None if the call can
// have none. None alone where it cannot be told from others. A first call gets a plan for all
// lengths or None: a call of its lengths may never come back.
inline PyObject* plan(PyObject*, PyObject* const* args, Py_ssize_t count) {
  Description given;
  if (count != 3 || !given.describe_forward(args[0])) return answer(Py_None);
  if (args[2] == Py_True && !given.any_length()) return answer(Py_None);
  auto made = std::make_unique<Plan<ForwardParams>>();
  const ForwardParams& p = made->p = device::Current::last<ForwardParams>();
  made->any_length = given.any_length();
  bool possible = find_arguments(given, made.get());
  const auto add_result = [&](PyObject* x, const View& view) {
    const std::optional<Result> result = result_of(x, view.data);
    possible = possible && result;
    if (possible) made->results.push_back(*result);
  };
  if (p.weights_mode == WeightsMode::kNone) {
    add_result(args[1], p.out);
  } else if (PyTuple_Check(args[1])) {
    add_result(PyTuple_GetItem(args[1], 0), p.out);
    add_result(PyTuple_GetItem(args[1], 1), p.weights);
  }
  possible = possible && !made->results.empty();
  PyErr_Clear();
  std::vector<PyObject*> tensors;
  for (const Argument& x : given.arguments()) tensors.push_back(Py_NewRef(x.object));
  return pack(
      {given.key(), possible ? as_capsule(std::move(made)) : Py_NewRef(Py_None), pack(tensors)});
}

// (plan of the forward pass, what backward got, its gradients) -> (key, plan) of the backward pass
// that the CPU kernels of this thread computed last, as plan().
inline PyObject* plan_backward(PyObject*, PyObject* const* args, Py_ssize_t) {
  Description given;
  if (!describe_backward(args[0], args[1], &given)) return answer(Py_None);
  const auto& forward = plan_of<ForwardParams>(args[0]);
  auto made = std::make_unique<Plan<BackwardParams>>();
  const BackwardParams& p = made->p = device::Current::last<BackwardParams>();
  made->inputs = forward.inputs, made->limits = forward.limits, made->sink = forward.sink;
  bool possible = has_arguments(given, made.get()) && p.grad_lse == nullptr;
  const int64_t sizes[] = {p.B, p.H, p.D};
  const Result of_heads{contiguous(3, sizes), ScalarType::Float};
  const int* input = made->inputs.data();
  each_gradient(&made->p, [&](auto* pointer) {
    const int n = *input++;
    if (!possible || *pointer == nullptr) return;
    const std::optional<Result> result =
        *pointer == p.grad_w ? of_heads : result_of(PyTuple_GetItem(args[2], 1 + n), *pointer);
    possible = result.has_value();
    if (possible) made->results.push_back(*result);
  });
  if (made->sink >= 0) made->results.push_back({contiguous(2, sizes), ScalarType::Float});
  PyErr_Clear();
  return pack({given.key(), possible ? as_capsule(std::move(made)) : Py_NewRef(Py_None)});
}

inline int part_of(PyObject* name) {
  const auto is = [&](const char* other) {
    return PyUnicode_CompareWithASCIIString(name, other) == 0;
  };
  int part = is("slopes")    ? kSlopes
             : is("table")   ? kTable
             : is("buckets") ? kBuckets
             : is("offset")  ? kOffset
                             : kWhole;
  MaskParams mask;
  each_limit(&mask, [&, number = 0](const char* limit, KeyLimit*) mutable {
    if (is(limit)) part = number;
    ++number;
  });
  return part;
}

// (the capsule of DLPack, the types of tensors and of parameters, types of records with the names
// of their fields, what makes tensors of handles) -> whether plans can be made
inline PyObject* set_up(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 5) return answer(Py_False);  // Python is of another version than the library
  const void* const found = PyCapsule_GetPointer(args[0], dlpack::kExchange);
  if (found == nullptr) return answer(Py_False);  // of a later torch
  python.exchange = static_cast<const dlpack::Exchange*>(found);
  python.tensor = Py_NewRef(args[1]), python.parameter = Py_NewRef(args[2]);
  python.adopt = Py_NewRef(args[4]);
  python.requires_grad = PyUnicode_InternFromString("requires_grad");
  python.is_neg = PyUnicode_InternFromString("is_neg");
  python.records.clear();
  for (Py_ssize_t n = 0; n < PyTuple_Size(args[3]); ++n) {
    PyObject* const pair = PyTuple_GetItem(args[3], n);
    PyObject* const names = PyTuple_GetItem(pair, 1);
    Record record{Py_NewRef(PyTuple_GetItem(pair, 0)), {}};
    for (Py_ssize_t m = 0; m < PyTuple_Size(names); ++m) {
      PyObject* const name = PyTuple_GetItem(names, m);
      record.fields.push_back({Py_NewRef(name), part_of(name)});
    }
    python.records.push_back(record);
  }
  const bool known = python.exchange->major == 1 && python.exchange->describe != nullptr;
  return Py_NewRef(known ? Py_True : Py_False);
}

// No exception may pass through Python's frames: there is no memory then.
template <PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* guarded(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  try {
    return f(self, args, count);
  } catch (...) {
    return PyErr_NoMemory();
  }
}

// As a PyCFunction, which every kind of function is to Python.
template <PyObject* (*f)(PyObject*, PyObject* const*, Py_ssize_t)>
PyCFunction as_function() {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(guarded<f>));
}
inline PyMethodDef functions[] = {
    {"run", as_function<run>(), METH_FASTCALL, nullptr},
    {"run_backward", as_function<run_backward>(), METH_FASTCALL, nullptr},
    {"plan", as_function<plan>(), METH_FASTCALL, nullptr},
    {"plan_backward", as_function<plan_backward>(), METH_FASTCALL, nullptr},
    {"set_up", as_function<set_up>(), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace fastattn::binding
