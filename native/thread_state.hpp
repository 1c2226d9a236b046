// State that a function may set in its thread: torch's, and Python's functions for tracing and
// profiling. See `farcall/runtime/threads/isolation.py`.
#pragma once

#include <Python.h>
#include <nanobind/nanobind.h>

#include "core/torch_state.hpp"

namespace farcall {

// `sys.settrace` or `sys.setprofile` of the calling thread.
class TraceHook {
 public:
  TraceHook() = default;
  TraceHook(const TraceHook&) = delete;
  TraceHook& operator=(const TraceHook&) = delete;
  ~TraceHook() { Py_XDECREF(object_); }

  void note(Py_tracefunc function, PyObject* object) {
    function_ = function;
    if (object_ == object) return;
    Py_XINCREF(object);
    PyObject* old = object_;
    object_ = object;
    Py_XDECREF(old);
  }

  bool is(Py_tracefunc function, const PyObject* object) const {
    return function_ == function && object_ == object;
  }

  // `set` is PyEval_SetTrace or PyEval_SetProfile.
  void put_back(void (*set)(Py_tracefunc, PyObject*)) const { set(function_, object_); }

 private:
  Py_tracefunc function_ = nullptr;
  PyObject* object_ = nullptr;
};

// The state of one thread. Only that thread uses it, and it holds the GIL then.
class ThreadState : public TorchState {
 public:
  using TorchState::TorchState;

  // A function begins: note what it may leave as it finds it. Returns whether something has been
  // set in this thread since `note`.
  bool begin() {
    const PyThreadState* thread = PyThreadState_Get();
    trace_.note(thread->c_tracefunc, thread->c_traceobj);
    profile_.note(thread->c_profilefunc, thread->c_profileobj);
    note_anomaly();
    return TorchState::has_changed();
  }

  // Calls a function in a copy of a context, and `put_back` before and after it where something has
  // been set. Returns and throws what the function does.
  nanobind::object run(nanobind::handle context, nanobind::handle function, nanobind::handle put_back) {
    if (begin()) put_back();
    const Context copy(context);
    nanobind::object result;
    {
      const Inside inside(is_inside_);
      result = nanobind::steal(PyObject_CallNoArgs(function.ptr()));
    }
    {
      const nanobind::error_scope error_of_the_function;
      copy.leave();
      if (has_changed() && !nanobind::steal(PyObject_CallNoArgs(put_back.ptr())))
        PyErr_WriteUnraisable(put_back.ptr());
    }
    if (!result) throw nanobind::python_error();
    return result;
  }

  // A function runs in this thread. Code of farcall's own around which `run` is called part by part
  // says that none does.
  bool is_inside() const { return is_inside_; }
  void set_inside(bool value) { is_inside_ = value; }

  // The function has ended: whether it has set something.
  bool has_changed() {
    const PyThreadState* thread = PyThreadState_Get();
    return !trace_.is(thread->c_tracefunc, thread->c_traceobj) ||
           !profile_.is(thread->c_profilefunc, thread->c_profileobj) || TorchState::has_changed();
  }

  // Trace and profile as when the function began.
  void put_back_tracing() const {
    const PyThreadState* thread = PyThreadState_Get();
    if (!trace_.is(thread->c_tracefunc, thread->c_traceobj)) trace_.put_back(PyEval_SetTrace);
    if (!profile_.is(thread->c_profilefunc, thread->c_profileobj)) profile_.put_back(PyEval_SetProfile);
  }

 private:
  // A copy of a context that this thread is in.
  class Context {
   public:
    explicit Context(nanobind::handle context) : copy_(nanobind::steal(PyContext_Copy(context.ptr()))) {
      if (!copy_ || PyContext_Enter(copy_.ptr()) != 0) throw nanobind::python_error();
    }
    void leave() const {
      if (PyContext_Exit(copy_.ptr()) != 0) PyErr_WriteUnraisable(copy_.ptr());
    }

   private:
    nanobind::object copy_;
  };

  class Inside {
   public:
    explicit Inside(bool& is_inside) : is_inside_(is_inside), before_(is_inside) { is_inside = true; }
    ~Inside() { is_inside_ = before_; }

   private:
    bool& is_inside_;
    const bool before_;
  };

  TraceHook trace_;
  TraceHook profile_;
  bool is_inside_ = false;
};

}  // namespace farcall
