// What Python sees of the transport: bytes in, bytes out. `farcall/transport/native/endpoint.py` gives it
// meaning.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/bell.hpp"
#include "core/crypto.hpp"
#include "core/endpoint.hpp"
#include "core/forks.hpp"
#include "core/ring_channel.hpp"
#include "core/watch.hpp"
#include "plain/plain.hpp"
#include "thread_state.hpp"

namespace nb = nanobind;
using namespace farcall;

namespace {

// How a send ended.
enum Status : int { kSent = 0, kNotSent = 1, kTimedOut = 2, kLost = 3, kTooLarge = 4 };

constexpr std::size_t kCopiedBody = 64 << 10;  // larger ones are handed out as they arrived

// Received memory, for Python's buffer protocol.
class Memory {
 public:
  Memory(BlockRef block, std::size_t offset, std::size_t size)
      : block_(std::move(block)), offset_(offset), size_(size) {}

  static int get_buffer(PyObject* self, Py_buffer* view, int flags) {
    const Memory* memory = nb::inst_ptr<Memory>(self);
    return PyBuffer_FillInfo(view, self, memory->block_->data() + memory->offset_,
                             static_cast<Py_ssize_t>(memory->size_), 0, flags);
  }

 private:
  BlockRef block_;
  std::size_t offset_;
  std::size_t size_;
};

PyType_Slot memory_slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(Memory::get_buffer)},
    {0, nullptr},
};

nb::object steal(PyObject* object) {
  if (object == nullptr) throw nb::python_error();
  return nb::steal(object);
}

nb::object view_of(BlockRef block, std::size_t offset, std::size_t size) {
  nb::object memory = nb::cast(Memory(std::move(block), offset, size));
  return steal(PyMemoryView_FromObject(memory.ptr()));
}

nb::object bytes_of(const std::uint8_t* data, std::size_t size) {
  return steal(
      PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data), static_cast<Py_ssize_t>(size)));
}

// Memory that is sent stays where it is for as long as this lives.
class Held {
 public:
  Held() = default;
  Held(const Held&) = delete;
  ~Held() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
  }

  Part part(nb::handle object) {
    if (PyBytes_CheckExact(object.ptr())) {
      return {reinterpret_cast<const std::uint8_t*>(PyBytes_AS_STRING(object.ptr())),
              static_cast<std::size_t>(PyBytes_GET_SIZE(object.ptr()))};
    }
    Py_buffer view;
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
    views_.push_back(view);
    return {static_cast<const std::uint8_t*>(view.buf), static_cast<std::size_t>(view.len)};
  }

 private:
  std::vector<Py_buffer> views_;
};

// A buffer; or (buffer, descriptor, address) if it lies in a file, mapped at that address, which the
// peer may map, too.
OutBuffer out_buffer(Held& held, PyObject* object) {
  if (!PyTuple_CheckExact(object)) return held.part(object);
  const auto in_file = nb::borrow<nb::tuple>(object);
  const Part part = held.part(in_file[0]);
  return {part, nb::cast<int>(in_file[1]),
          reinterpret_cast<std::uintptr_t>(part.data) - nb::cast<std::uintptr_t>(in_file[2])};
}

OutFrame out_frame(Held& held, int kind, std::uint64_t call_id, nb::handle meta, nb::handle body,
                   nb::handle buffers) {
  OutFrame frame;
  frame.kind = static_cast<std::uint8_t>(kind);
  frame.call_id = call_id;
  frame.meta = held.part(meta);
  frame.body = held.part(body);
  const nb::object fast = steal(PySequence_Fast(buffers.ptr(), "buffers must be a sequence"));
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(fast.ptr());
  frame.buffers.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    frame.buffers.push_back(out_buffer(held, PySequence_Fast_GET_ITEM(fast.ptr(), i)));
  }
  return frame;
}

// (kind, call id, meta, body, buffers), behind `link_id` if that is not 0.
nb::object in_frame(InFrame frame, std::uint64_t link_id) {
  const std::uint8_t* front = frame.front->data();
  nb::object meta = bytes_of(front + frame.meta_offset, frame.meta_size);
  nb::object body = frame.body_size <= kCopiedBody
                        ? bytes_of(front + frame.body_offset, frame.body_size)
                        : view_of(frame.front, frame.body_offset, frame.body_size);
  nb::object buffers = steal(PyList_New(static_cast<Py_ssize_t>(frame.buffers.size())));
  nb::object empty;  // one view for all buffers without content: there may be thousands
  for (std::size_t i = 0; i < frame.buffers.size(); ++i) {
    const std::size_t size = frame.buffers[i]->size();
    nb::object view = size == 0 && empty.is_valid() ? empty
                                                    : view_of(std::move(frame.buffers[i]), 0, size);
    if (size == 0) empty = view;
    PyList_SET_ITEM(buffers.ptr(), static_cast<Py_ssize_t>(i), view.release().ptr());
  }
  const int first = link_id != 0;
  nb::object tuple = steal(PyTuple_New(5 + first));
  const auto set = [&](int index, PyObject* item) {
    if (item == nullptr) throw nb::python_error();
    PyTuple_SET_ITEM(tuple.ptr(), index, item);
  };
  if (first) set(0, PyLong_FromUnsignedLongLong(link_id));
  set(first, PyLong_FromLong(frame.kind));
  set(first + 1, PyLong_FromUnsignedLongLong(frame.call_id));
  set(first + 2, meta.release().ptr());
  set(first + 3, body.release().ptr());
  set(first + 4, buffers.release().ptr());
  return tuple;
}

// A signal may have come while a thread slept without the GIL.
void check_signals() {
  nb::gil_scoped_acquire acquire;
  if (PyErr_CheckSignals() != 0) throw Interrupted();
}

// Python runs the handlers of signals in its main thread only.
Interrupt interrupt_of_thread() { return gettid() == getpid() ? check_signals : no_interrupt; }

// Runs `work` without the GIL.
template <class Work>
Status without_interpreter(Work work) {
  try {
    nb::gil_scoped_release release;
    work();
    return kSent;
  } catch (const NotSent&) {
    return kNotSent;
  } catch (const TimedOut&) {
    return kTimedOut;
  } catch (const LinkFailure&) {
    return kLost;
  } catch (const Interrupted&) {
    throw nb::python_error();  // what the signal's handler raised
  }
}

int send_frame(Link& link, int kind, std::uint64_t call_id, nb::handle meta, nb::handle body,
               nb::handle buffers, double deadline) {
  Held held;
  const OutFrame frame = out_frame(held, kind, call_id, meta, body, buffers);
  if (!link.may_send(frame)) return kTooLarge;
  // Releasing the GIL for less than a microsecond costs more than it gives: another
  // thread takes it, and has to be waited for.
  if (link.send_at_once(frame)) return kSent;
  return without_interpreter(
      [&] { link.send(frame, deadline_from_seconds(deadline), interrupt_of_thread()); });
}

nb::object exchange(Link& link, int kind, std::uint64_t call_id, nb::handle meta, nb::handle body,
                    nb::handle buffers, double deadline, nb::handle meanwhile) {
  Held held;
  const OutFrame frame = out_frame(held, kind, call_id, meta, body, buffers);
  if (!link.may_send(frame)) return nb::int_(static_cast<int>(kTooLarge));
  std::function<void()> then;
  if (!meanwhile.is_none()) {
    then = [meanwhile] {
      nb::gil_scoped_acquire acquire;
      if (PyObject* result = PyObject_CallNoArgs(meanwhile.ptr())) {
        Py_DECREF(result);
      } else {
        throw Interrupted();
      }
    };
  }
  InFrame answer;
  const Status status = without_interpreter([&] {
    answer = link.exchange(frame, deadline_from_seconds(deadline), interrupt_of_thread(), then);
  });
  if (status != kSent) return nb::int_(static_cast<int>(status));
  return in_frame(std::move(answer), 0);
}

nb::object receive(Link& link, std::uint64_t kinds, int alarm, double deadline) {
  std::optional<InFrame> frame;
  without_interpreter([&] {
    frame = link.receive(kinds, alarm, deadline_from_seconds(deadline), interrupt_of_thread());
  });
  return frame ? in_frame(std::move(*frame), 0) : nb::none();
}

// (link id, kind, call id, meta, body, buffers), or (link id, why the link ended), or (link id,): it
// wants its further streams.
nb::object event_of(std::optional<Event> event) {
  if (!event) return nb::none();
  if (event->wants_streams) return nb::make_tuple(event->link->id());
  if (!event->frame) return nb::make_tuple(event->link->id(), event->cause);
  return in_frame(std::move(*event->frame), event->link->id());
}

nb::object next_event(Endpoint& endpoint, double timeout) {
  std::optional<Event> event;
  without_interpreter([&] {
    const Nanoseconds wait = deadline_from_seconds(timeout);
    event = endpoint.next(wait == 0 || wait == kNever ? wait : now() + wait, interrupt_of_thread());
  });
  return event_of(std::move(event));
}

nb::object poll_event(Endpoint& endpoint) { return event_of(endpoint.poll()); }

bool wait_for_bell(Bell& bell, double seconds) {
  bool has_rung = false;
  without_interpreter(
      [&] { has_rung = bell.wait(now() + deadline_from_seconds(seconds), interrupt_of_thread()); });
  return has_rung;
}

Limits limits_of(const nb::tuple& limits) {
  return {nb::cast<std::uint64_t>(limits[0]), nb::cast<std::uint64_t>(limits[1]),
          nb::cast<std::uint64_t>(limits[2]), nb::cast<std::uint64_t>(limits[3]),
          nb::cast<std::uint64_t>(limits[4]), nb::cast<std::uint8_t>(limits[5])};
}

Key key_of(nb::handle object) {
  const auto bytes = nb::cast<nb::bytes>(object);
  if (bytes.size() != kKeySize) throw nb::value_error("a key has 32 bytes");
  Key key;
  std::memcpy(key.data(), bytes.c_str(), kKeySize);
  return key;
}

// (sending, receiving, whether they encrypt), or None.
std::optional<Keys> keys_of(nb::handle keys) {
  if (keys.is_none()) return std::nullopt;
  const auto fields = nb::cast<nb::tuple>(keys);
  return std::optional<Keys>(std::in_place, key_of(fields[0]), key_of(fields[1]),
                             nb::cast<bool>(fields[2]));
}

std::shared_ptr<Link> open_stream(Endpoint& endpoint, int fd, nb::tuple limits, unsigned streams,
                                  std::size_t threshold, std::size_t chunk, bool dialled,
                                  nb::handle keys) {
  Descriptor socket(fd);
  const Limits checked = limits_of(limits);
  const std::optional<Keys> opened = keys_of(keys);
  return endpoint.open_stream(std::move(socket), checked, {streams, threshold, chunk, dialled},
                              opened ? &*opened : nullptr);
}

std::shared_ptr<Link> open_rings(Endpoint& endpoint, int fd, nb::tuple limits, int side, bool zero_copy,
                                 double deadline) {
  Descriptor socket(fd);
  const Limits checked = limits_of(limits);
  RingBounds bounds;
  bounds.zero_copy = zero_copy;
  nb::gil_scoped_release release;
  return endpoint.open_rings(std::move(socket), checked, side, bounds, deadline_from_seconds(deadline));
}

void join_link(Link& link, int fd, nb::handle keys) {
  Descriptor socket(fd);
  const std::optional<Keys> opened = keys_of(keys);
  nb::gil_scoped_release release;
  link.join(std::move(socket), opened ? &*opened : nullptr);
}

}  // namespace

NB_MODULE(_native, module) {
  // A worker that is not shut down is still there when the interpreter ends. That is no leak.
  nb::set_leak_warnings(false);
  module.attr("SHM_VERSION") = 2;
  module.attr("SENT") = static_cast<int>(kSent);
  module.attr("NOT_SENT") = static_cast<int>(kNotSent);
  module.attr("TIMED_OUT") = static_cast<int>(kTimedOut);
  module.attr("LOST") = static_cast<int>(kLost);
  module.attr("TOO_LARGE") = static_cast<int>(kTooLarge);

  nb::class_<Memory>(module, "Memory", nb::type_slots(memory_slots));

  nb::class_<Link>(module, "Link")
      .def_prop_ro("id", &Link::id)
      .def_prop_ro("is_lost", &Link::is_lost)
      .def_prop_ro("is_stream", &Link::is_stream)
      .def_prop_ro("loss_cause", &Link::loss_cause)
      .def("send", &send_frame, nb::arg("kind"), nb::arg("call_id"), nb::arg("meta"), nb::arg("body"),
           nb::arg("buffers"), nb::arg("deadline"))
      .def("exchange", &exchange, nb::arg("kind"), nb::arg("call_id"), nb::arg("meta"), nb::arg("body"),
           nb::arg("buffers"), nb::arg("deadline"), nb::arg("meanwhile").none())
      .def("receive", &receive, nb::arg("kinds"), nb::arg("alarm"), nb::arg("deadline"))
      .def_prop_ro("streams", &Link::streams)
      .def_prop_ro("striped_buffers", &Link::striped_buffers)
      .def("start", &Link::start)
      .def("set_reading", &Link::set_reading, nb::arg("is_on"))
      .def("join", &join_link, nb::arg("fd"), nb::arg("keys").none())
      .def("fail", &Link::fail, nb::arg("cause"), nb::call_guard<nb::gil_scoped_release>())
      .def("close_after_fork", &Link::close_after_fork);

  nb::class_<Watch>(module, "Watch")
      .def(nb::init<>())
      .def("begin", &Watch::begin)
      .def("end", &Watch::end)
      .def("is_overdue", &Watch::is_overdue)
      .def("set_queue", &Watch::set_queue, nb::arg("is_there"))
      .def(
          "wait", [](Watch& watch) { return static_cast<int>(watch.wait()); },
          nb::call_guard<nb::gil_scoped_release>())
      .def("stop", &Watch::stop);

  // Rung without the GIL: the thread that wakes up needs it.
  nb::class_<Bell>(module, "Bell")
      .def(nb::init<>())
      .def("ring", &Bell::ring, nb::call_guard<nb::gil_scoped_release>())
      .def("wait", &wait_for_bell, nb::arg("seconds"));

  nb::class_<ThreadState>(module, "ThreadState")
      .def(nb::init<const std::vector<int>&, std::uint64_t>(), nb::arg("autocast_devices"),
           nb::arg("float_control"))
      .def_static("is_available", &ThreadState::is_available)
      .def_static("float_control", &read_float_control)
      .def("note", &ThreadState::note)
      .def("begin", &ThreadState::begin)
      .def_prop_ro("anomaly_was_enabled", &ThreadState::anomaly_was_enabled)
      .def("has_changed", &ThreadState::has_changed)
      .def_prop_ro("watched_bytes", &ThreadState::watched_bytes)
      .def("run", &ThreadState::run, nb::arg("context"), nb::arg("function"), nb::arg("put_back"))
      .def_prop_rw("is_inside", &ThreadState::is_inside, &ThreadState::set_inside)
      .def("put_back_floats", &ThreadState::put_back_floats)
      .def("put_back_tracing", &ThreadState::put_back_tracing);

  nb::class_<Endpoint>(module, "Endpoint")
      .def(nb::new_([](int spin_threads, std::size_t shared_memory, bool move_threads, bool keep_awake,
                       const nb::tuple& sending) {
             return std::make_shared<Endpoint>(spin_threads, shared_memory, move_threads, keep_awake,
                                               limits_of(sending));
           }),
           nb::arg("spin_threads"), nb::arg("shared_memory"), nb::arg("move_threads"),
           nb::arg("keep_awake"), nb::arg("sending"))
      .def_prop_ro("shared_memory", &Endpoint::shared_memory)
      .def("open_stream", &open_stream, nb::arg("fd"), nb::arg("limits"), nb::arg("streams"),
           nb::arg("threshold"), nb::arg("chunk"), nb::arg("dialled"), nb::arg("keys").none())
      .def("open_rings", &open_rings, nb::arg("fd"), nb::arg("limits"), nb::arg("side"),
           nb::arg("zero_copy"), nb::arg("deadline"))
      .def("next", &next_event, nb::arg("timeout"))
      .def("poll", &poll_event)
      .def("wake", &Endpoint::wake)
      .def("close", &Endpoint::close, nb::call_guard<nb::gil_scoped_release>())
      .def("close_after_fork", &Endpoint::close_after_fork);

  module.def("has_crypto", &has_crypto);
  module.def("close_in_forked_children", &close_in_forked_children, nb::arg("fd"));

  bind_plain(module);
}
