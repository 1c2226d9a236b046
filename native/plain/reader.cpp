#include <bit>
#include <optional>
#include <utility>
#include <vector>

#include "plain.hpp"
#include "reductions.hpp"

namespace farcall {

namespace {

using Kind = Item::Kind;

constexpr std::size_t kMaxStack = 4096;

// A stack machine, as pickle describes it. Every step that gives false leaves the pickle to Python.
class Reader {
 public:
  Reader(const Context& context, const std::uint8_t* data, std::size_t size, nb::handle buffers,
         nb::handle references)
      : context_(context),
        at_(data),
        end_(data + size),
        frame_end_(data),
        buffers_(buffers),
        references_(references) {
    stack_.reserve(16);
  }

  bool run() {
    std::uint8_t code;
    while (take(code)) {
      if (code == op::kStop) {
        return at_ == end_ && marks_.empty() && stack_.size() == 1 && is_object(stack_[0]);
      }
      const bool in_frame = at_ <= frame_end_;
      if (!step(code) || stack_.size() > kMaxStack) return false;
      // Python's own reader makes different things of a frame inside of another.
      if (in_frame && (code == op::kFrame || at_ > frame_end_)) return false;
    }
    return false;
  }

  // After `run`. Only now do tensors get a history: values that are left to Python have none of this.
  nb::object result(nb::handle attach) {
    for (const nb::object& tensor : to_attach_) {
      if (attach.is_none()) {
        call_method(tensor.ptr(), context_.set_requires_grad);
      } else {
        checked(PyObject_CallOneArg(attach.ptr(), tensor.ptr()));
      }
    }
    return std::move(stack_[0].object);
  }

 private:
  bool step(std::uint8_t code) {
    std::uint8_t byte;
    std::uint64_t number;
    switch (code) {
      case op::kProto:
        return take(byte) && byte <= kProtocol;
      case op::kFrame:
        return take_little(number, 8) && begin_frame(number);
      case op::kNone:
        return push(nb::none());
      case op::kTrue:
        return push(nb::borrow(Py_True));
      case op::kFalse:
        return push(nb::borrow(Py_False));
      case op::kInt1:
        return take_little(number, 1) && push_int(static_cast<std::int64_t>(number));
      case op::kInt2:
        return take_little(number, 2) && push_int(static_cast<std::int64_t>(number));
      case op::kInt4:
        return take_little(number, 4) &&
               push_int(static_cast<std::int32_t>(static_cast<std::uint32_t>(number)));
      case op::kLong1:
        return read_long();
      case op::kFloat:
        return read_float();
      case op::kUnicode1:
        return take_little(number, 1) && read_text(number);
      case op::kUnicode4:
        return take_little(number, 4) && read_text(number);
      case op::kBytes1:
        return take_little(number, 1) && read_bytes(number);
      case op::kBytes4:
        return take_little(number, 4) && read_bytes(number);
      case op::kByteArray:
        return take_little(number, 8) && read_raw(number);
      case op::kNextBuffer:
        return read_buffer();
      case op::kMark:
        marks_.push_back(stack_.size());
        return marks_.size() <= kMaxStack;
      case op::kTuple:
        return take_mark() && make_tuple(stack_.size() - mark_);
      case op::kTuple0:
        return make_tuple(0);
      case op::kTuple1:
        return make_tuple(1);
      case op::kTuple2:
        return make_tuple(2);
      case op::kTuple3:
        return make_tuple(3);
      case op::kList:
        return push(nb::list());
      case op::kAppend:
        return append_from(stack_.size() - 1);
      case op::kAppends:
        return take_mark() && append_from(mark_);
      case op::kDict:
        return push(nb::dict());
      case op::kSetItem:
        return set_items_from(stack_.size() - 2);
      case op::kSetItems:
        return take_mark() && set_items_from(mark_);
      case op::kMemoize:
        return memoize();
      case op::kGet1:
        return take_little(number, 1) && recall(number);
      case op::kGet4:
        return take_little(number, 4) && recall(number);
      case op::kGlobal:
        return read_global();
      case op::kReduce:
        return reduce();
      default:
        return false;
    }
  }

  // Bytes.

  bool take(std::uint8_t& byte) {
    if (at_ == end_) return false;
    byte = *at_++;
    return true;
  }

  bool take_little(std::uint64_t& number, int bytes) {
    if (end_ - at_ < bytes) return false;
    number = 0;
    for (int i = 0; i < bytes; ++i) number |= static_cast<std::uint64_t>(*at_++) << (8 * i);
    return true;
  }

  bool take(const std::uint8_t*& data, std::uint64_t size) {
    if (static_cast<std::uint64_t>(end_ - at_) < size) return false;
    data = at_;
    at_ += size;
    return true;
  }

  // Pickle reads ahead to the end of a frame, so nothing lies across that.
  bool begin_frame(std::uint64_t size) {
    if (at_ < frame_end_ || size > static_cast<std::uint64_t>(end_ - at_)) return false;
    frame_end_ = at_ + size;
    return true;
  }

  // Values.

  bool push(nb::object object) {
    stack_.push_back({Kind::kObject, std::move(object)});
    return true;
  }

  bool push_int(std::int64_t number) { return push(checked(PyLong_FromLongLong(number))); }

  bool read_long() {
    std::uint64_t size, number;
    if (!take_little(size, 1) || size == 0 || size > 8) return false;
    if (!take_little(number, static_cast<int>(size))) return false;
    const int unused = static_cast<int>(64 - 8 * size);  // the highest bit is the sign
    return push_int(static_cast<std::int64_t>(number << unused) >> unused);
  }

  bool read_float() {
    if (end_ - at_ < 8) return false;
    std::uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | *at_++;
    return push(checked(PyFloat_FromDouble(std::bit_cast<double>(bits))));
  }

  bool read_text(std::uint64_t size) {
    const std::uint8_t* data;
    if (!take(data, size)) return false;
    return push(checked(PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(data),
                                             static_cast<Py_ssize_t>(size), "surrogatepass")));
  }

  bool read_bytes(std::uint64_t size) {
    const std::uint8_t* data;
    return take(data, size) &&
           push(checked(PyBytes_FromStringAndSize(reinterpret_cast<const char*>(data),
                                                  static_cast<Py_ssize_t>(size))));
  }

  bool read_raw(std::uint64_t size) {
    const std::uint8_t* data;
    if (!take(data, size)) return false;
    stack_.push_back({Kind::kRaw, {}, data, static_cast<std::size_t>(size)});
    return true;
  }

  bool read_buffer() { return push(checked(PySequence_GetItem(buffers_.ptr(), next_buffer_++))); }

  // Containers.

  bool take_mark() {
    if (marks_.empty()) return false;
    mark_ = marks_.back();
    marks_.pop_back();
    return mark_ <= stack_.size();
  }

  // Whether the items from there on are above the last mark, as every opcode's operands must be.
  bool has(std::size_t first) const {
    return first <= stack_.size() && (marks_.empty() || first >= marks_.back());
  }

  bool make_tuple(std::size_t size) {
    if (size > stack_.size() || !has(stack_.size() - size)) return false;
    const std::size_t first = stack_.size() - size;
    if (first > 0 && stack_[first - 1].kind == Kind::kRebuild && at_ != end_ && *at_ == op::kReduce &&
        has(first - 1)) {
      ++at_;
      return put(first - 1, make_tensor(context_, &stack_[first], size));
    }
    nb::object tuple = checked(PyTuple_New(static_cast<Py_ssize_t>(size)));
    for (std::size_t i = 0; i < size; ++i) {
      if (!is_object(stack_[first + i])) return false;
      PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i),
                       stack_[first + i].object.release().ptr());
    }
    stack_.resize(first);
    return push(std::move(tuple));
  }

  bool append_from(std::size_t first) {
    if (first == 0 || first > stack_.size() || !has(first - 1)) return false;
    PyObject* list = stack_[first - 1].object.ptr();
    if (stack_[first - 1].kind != Kind::kObject || !PyList_CheckExact(list)) return false;
    for (std::size_t i = first; i < stack_.size(); ++i) {
      if (!is_object(stack_[i])) return false;
      if (PyList_Append(list, stack_[i].object.ptr()) != 0) throw nb::python_error();
    }
    stack_.resize(first);
    return true;
  }

  bool set_items_from(std::size_t first) {
    if (first == 0 || first > stack_.size() || !has(first - 1)) return false;
    PyObject* dict = stack_[first - 1].object.ptr();
    if (stack_[first - 1].kind != Kind::kObject || !PyDict_CheckExact(dict)) return false;
    if ((stack_.size() - first) % 2 != 0) return false;
    for (std::size_t i = first; i < stack_.size(); i += 2) {
      if (!is_object(stack_[i]) || !is_object(stack_[i + 1])) return false;
      if (PyDict_SetItem(dict, stack_[i].object.ptr(), stack_[i + 1].object.ptr()) != 0) {
        throw nb::python_error();
      }
    }
    stack_.resize(first);
    return true;
  }

  bool memoize() {
    if (stack_.empty() || !has(stack_.size() - 1)) return false;
    Item& top = stack_.back();
    if (top.kind == Kind::kRaw && !is_object(top)) return false;
    memo_.push_back(top);
    return true;
  }

  bool recall(std::uint64_t index) {
    if (index >= memo_.size()) return false;
    stack_.push_back(memo_[index]);
    return true;
  }

  // Makes what it is an object of Python's; false for a function, which is no plain value.
  static bool is_object(Item& item) {
    if (item.kind == Kind::kRaw) {
      item.object = checked(PyByteArray_FromStringAndSize(reinterpret_cast<const char*>(item.data),
                                                          static_cast<Py_ssize_t>(item.size)));
      item.kind = Kind::kObject;
    }
    return item.kind == Kind::kObject;
  }

  // Names and calls.

  bool read_global() {
    const std::size_t count = stack_.size();
    if (count < 2 || !has(count - 2)) return false;
    const std::optional<std::string_view> module = text_of(stack_[count - 2]);
    const std::optional<std::string_view> qualname = text_of(stack_[count - 1]);
    if (!module || !qualname) return false;
    Item item;
    if (!look_up({*module, *qualname}, item)) return false;
    stack_.resize(count - 2);
    stack_.push_back(std::move(item));
    return true;
  }

  bool reduce() {
    const std::size_t count = stack_.size();
    if (count < 2 || !has(count - 2)) return false;
    const Item& top = stack_[count - 1];
    if (top.kind != Kind::kObject || !PyTuple_CheckExact(top.object.ptr())) return false;
    return put(count - 2, call(context_, stack_[count - 2], top.object.ptr(), references_));
  }

  // In place of the items from there on.
  bool put(std::size_t first, Made made) {
    if (!made.object.is_valid()) return false;
    if (made.requires_grad) to_attach_.push_back(made.object);
    stack_.resize(first);
    return push(std::move(made.object));
  }

  const Context& context_;
  const std::uint8_t* at_;
  const std::uint8_t* const end_;
  const std::uint8_t* frame_end_;
  const nb::handle buffers_;
  const nb::handle references_;
  Py_ssize_t next_buffer_ = 0;
  std::vector<Item> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Item> memo_;
  std::size_t mark_ = 0;  // the last that was taken
  std::vector<nb::object> to_attach_;
};

// The bytes of a body, while it is read.
class View {
 public:
  explicit View(nb::handle body) {
    if (PyObject_GetBuffer(body.ptr(), &view_, PyBUF_SIMPLE) != 0) throw nb::python_error();
  }
  View(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  const std::uint8_t* data() const { return static_cast<const std::uint8_t*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_;
};

}  // namespace

nb::object load_plain(const Context& context, nb::handle body, nb::handle buffers,
                      nb::handle references, nb::handle attach) {
  const View view(body);
  Reader reader(context, view.data(), view.size(), buffers, references);
  bool is_plain = false;
  try {
    is_plain = reader.run();
  } catch (const nb::python_error& error) {
    if (!error.matches(PyExc_Exception)) throw;
    // Python will come across it, too, and knows better what to say.
  }
  return is_plain ? reader.result(attach) : nb::borrow(Py_NotImplemented);
}

}  // namespace farcall
