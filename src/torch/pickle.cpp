#include "torch/pickle.hpp"

#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <ranges>
#include <unordered_map>

namespace oscar::torch {
namespace {

constexpr std::string_view kRebuildTensor = "torch._utils._rebuild_tensor_v2";
constexpr std::string_view kOrderedDict = "collections.OrderedDict";
constexpr std::array<std::pair<std::string_view, io::Dtype>, 4> kStorages{{
    {"torch.FloatStorage", io::Dtype::kF32},
    {"torch.DoubleStorage", io::Dtype::kF64},
    {"torch.HalfStorage", io::Dtype::kF16},
    {"torch.BFloat16Storage", io::Dtype::kBf16},
}};

std::optional<io::Dtype> storage_dtype(std::string_view name) {
  for (const auto& [candidate, dtype] : kStorages) {
    if (candidate == name) return dtype;
  }
  return std::nullopt;
}

bool is_allowed(std::string_view name) {
  return name == kRebuildTensor || name == kOrderedDict || storage_dtype(name).has_value();
}

tl::unexpected<Error> bad(std::string reason) { return make_error(ErrorCode::kBadInput, std::move(reason)); }

// The integers of a sequence, each in 0..kMaxElements; empty when `value` is anything else.
std::optional<io::Shape> extents(const Value& value) {
  const auto* sequence = value.as<Sequence>();
  if (sequence == nullptr || sequence->items.size() > Pickle::kMaxRank) return std::nullopt;
  io::Shape out;
  for (const Value* item : sequence->items) {
    const auto* number = item->as<std::int64_t>();
    if (number == nullptr || *number < 0 || *number > Pickle::kMaxElements) return std::nullopt;
    out.push_back(*number);
  }
  return out;
}

// Whether all that the view reaches lies in its storage, and its elements can be counted.
bool fits(const Tensor& tensor) {
  std::int64_t num_elements = 1;
  for (const std::int64_t extent : tensor.shape) {
    if (extent == 0) return true;
    if (num_elements > Pickle::kMaxElements / extent) return false;
    num_elements *= extent;
  }
  std::int64_t last = tensor.offset;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    const std::int64_t steps = tensor.shape[i] - 1;
    if (steps > 0 && tensor.strides[i] > Pickle::kMaxElements / steps) return false;
    last += steps * tensor.strides[i];  // at most 9 terms of 2^40
  }
  return last < tensor.storage.num_elements;
}

}  // namespace

const Value* Value::find(std::string_view name) const {
  const auto* dict = as<Dict>();
  if (dict == nullptr) return nullptr;
  for (const auto& [key, value] : std::views::reverse(dict->entries)) {
    if (const auto* text = key->as<std::string>(); text != nullptr && *text == name) return value;
  }
  return nullptr;
}

std::string describe(const Value& value) {
  if (value.as<std::monostate>() != nullptr) return "None";
  if (value.as<bool>() != nullptr) return "a truth value";
  if (const auto* number = value.as<std::int64_t>()) return "the number " + std::to_string(*number);
  if (value.as<double>() != nullptr) return "a real number";
  if (const auto* text = value.as<std::string>()) return "the text " + io::quote(*text);
  if (value.as<Sequence>() != nullptr) return "a list";
  if (value.as<Dict>() != nullptr) return "a dictionary";
  if (const auto* tensor = value.as<Tensor>()) return "a tensor " + io::shape_text(tensor->shape);
  return "a name";
}

// The stack machine. Each method handles one group of opcodes.
class Machine {
 public:
  explicit Machine(std::string_view bytes) : bytes_(bytes) {}

  Result<Pickle> run() {
    if (bytes_.size() > Pickle::kMaxBytes) {
      return bad("the pickle has " + std::to_string(bytes_.size()) + " bytes, at most " +
                 std::to_string(Pickle::kMaxBytes) + " are read");
    }
    while (true) {
      OSCAR_ASSIGN(const std::uint8_t opcode, number<std::uint8_t>());
      if (opcode == '.') break;
      OSCAR_TRY(step(opcode));
      if (stack_.size() > Pickle::kMaxStack || marks_.size() > Pickle::kMaxMarks ||
          pickle_.values_.size() > Pickle::kMaxValues) {
        return bad("the pickle nests too deep or holds too many values");
      }
    }
    OSCAR_ASSIGN(pickle_.root_, pop());
    if (!stack_.empty() || !marks_.empty()) return damaged();
    return std::move(pickle_);
  }

 private:
  Status step(std::uint8_t opcode) {
    switch (opcode) {
      case 0x80: return protocol();
      case 'N': return push({});
      case 0x88: return push({true});
      case 0x89: return push({false});
      case 'K': return push_integer<std::uint8_t>();
      case 'M': return push_integer<std::uint16_t>();
      case 'J': return push_integer<std::int32_t>();
      case 0x8A: return long_integer();
      case 'G': return real();
      case 'X': return text();
      case ')':
      case ']': return push({Sequence{}});
      case '}': return push({Dict{}});
      case '(': marks_.push_back(stack_.size()); return {};
      case 't': return tuple_from_mark();
      case 0x85: return tuple(1);
      case 0x86: return tuple(2);
      case 0x87: return tuple(3);
      case 'a': return append(1);
      case 'e': return append_from_mark();
      case 's': return set_items(2);
      case 'u': return set_items_from_mark();
      case 'q': return put<std::uint8_t>();
      case 'r': return put<std::uint32_t>();
      case 'h': return get<std::uint8_t>();
      case 'j': return get<std::uint32_t>();
      case 'c': return global();
      case 'Q': return persistent_id();
      case 'R': return reduce();
      default: return unknown(opcode);
    }
  }

  tl::unexpected<Error> damaged() const {
    return bad("the pickle is damaged at byte " + std::to_string(at_) + " of " + std::to_string(bytes_.size()));
  }

  tl::unexpected<Error> unknown(std::uint8_t opcode) const {
    return bad("the pickle has opcode " + std::to_string(opcode) + " at byte " + std::to_string(at_ - 1) +
               ", which no file of plain tensors, numbers, texts, lists and dictionaries needs; nothing is executed");
  }

  // Input.
  Result<std::string_view> take(std::size_t count) {
    if (count > bytes_.size() - at_) return damaged();
    at_ += count;
    return bytes_.substr(at_ - count, count);
  }
  template <typename T>
  Result<T> number() {  // little-endian, as this machine
    static_assert(std::endian::native == std::endian::little);
    OSCAR_ASSIGN(const std::string_view raw, take(sizeof(T)));
    T value;
    std::memcpy(&value, raw.data(), sizeof(T));
    return value;
  }
  Result<std::string_view> line() {
    const std::size_t end = bytes_.find('\n', at_);
    if (end == std::string_view::npos) return damaged();
    const std::string_view text = bytes_.substr(at_, end - at_);
    at_ = end + 1;
    return text;
  }

  // Stack. What lies below the innermost mark is out of reach.
  Status push(Value value) {
    pickle_.values_.push_back(std::move(value));
    stack_.push_back(&pickle_.values_.back());
    return {};
  }
  std::size_t num_reachable() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  Result<Value*> pop() {
    if (num_reachable() == 0) return damaged();
    Value* value = stack_.back();
    stack_.pop_back();
    return value;
  }
  Result<std::vector<Value*>> pop(std::size_t count) {
    if (num_reachable() < count) return damaged();
    const auto begin = stack_.end() - static_cast<std::ptrdiff_t>(count);
    std::vector<Value*> values(begin, stack_.end());
    stack_.erase(begin, stack_.end());
    return values;
  }
  // How many values lie above the innermost mark, which goes.
  Result<std::size_t> pop_mark() {
    if (marks_.empty()) return damaged();
    const std::size_t count = num_reachable();
    marks_.pop_back();
    return count;
  }

  // Opcodes.
  Status protocol() {
    constexpr std::uint8_t kProtocol = 2;
    OSCAR_ASSIGN(const std::uint8_t version, number<std::uint8_t>());
    if (version == kProtocol) return {};
    return bad("the pickle has protocol " + std::to_string(version) + ", expected 2, the default of torch.save");
  }

  template <typename T>
  Status push_integer() {
    OSCAR_ASSIGN(const T value, number<T>());
    return push({static_cast<std::int64_t>(value)});
  }

  Status long_integer() {  // two's complement of up to 8 bytes
    OSCAR_ASSIGN(const std::uint8_t size, number<std::uint8_t>());
    OSCAR_ASSIGN(const std::string_view raw, take(size));
    if (size > sizeof(std::int64_t)) return bad("the pickle holds an integer of more than 64 bits");
    const bool negative = size > 0 && (static_cast<std::uint8_t>(raw.back()) & 0x80) != 0;
    std::int64_t value = negative ? -1 : 0;
    std::memcpy(&value, raw.data(), size);
    return push({value});
  }

  Status real() {  // big-endian
    OSCAR_ASSIGN(const std::uint64_t raw, number<std::uint64_t>());
    return push({std::bit_cast<double>(__builtin_bswap64(raw))});
  }

  Status text() {
    OSCAR_ASSIGN(const std::uint32_t size, number<std::uint32_t>());
    OSCAR_ASSIGN(const std::string_view raw, take(size));
    return push({std::string(raw)});
  }

  Status tuple(std::size_t count) {
    OSCAR_ASSIGN(const std::vector<Value*> items, pop(count));
    return push({Sequence{{items.begin(), items.end()}}});
  }
  Status tuple_from_mark() {
    OSCAR_ASSIGN(const std::size_t count, pop_mark());
    return tuple(count);
  }

  Status append(std::size_t count) {
    OSCAR_ASSIGN(const std::vector<Value*> items, pop(count));
    auto* list = num_reachable() > 0 ? std::get_if<Sequence>(&stack_.back()->content) : nullptr;
    if (list == nullptr) return damaged();
    list->items.insert(list->items.end(), items.begin(), items.end());
    return {};
  }
  Status append_from_mark() {
    OSCAR_ASSIGN(const std::size_t count, pop_mark());
    return append(count);
  }

  Status set_items(std::size_t count) {
    OSCAR_ASSIGN(const std::vector<Value*> items, pop(count));
    auto* dict = num_reachable() > 0 ? std::get_if<Dict>(&stack_.back()->content) : nullptr;
    if (dict == nullptr || count % 2 != 0) return damaged();
    for (std::size_t i = 0; i < count; i += 2) dict->entries.emplace_back(items[i], items[i + 1]);
    return {};
  }
  Status set_items_from_mark() {
    OSCAR_ASSIGN(const std::size_t count, pop_mark());
    return set_items(count);
  }

  template <typename T>
  Status put() {
    OSCAR_ASSIGN(const T index, number<T>());
    if (num_reachable() == 0) return damaged();
    memo_[index] = stack_.back();
    return {};
  }
  template <typename T>
  Status get() {
    OSCAR_ASSIGN(const T index, number<T>());
    const auto found = memo_.find(index);
    if (found == memo_.end()) return damaged();
    stack_.push_back(found->second);
    return {};
  }

  Status global() {
    OSCAR_ASSIGN(const std::string_view module, line());
    OSCAR_ASSIGN(const std::string_view member, line());
    const std::string name = std::string(module) + "." + std::string(member);
    if (is_allowed(name)) return push({Global{name}});
    return bad("the pickle refers to " + io::quote(name) +
               ", which is not among the names that a rotation file needs; nothing was executed. Save the file again "
               "with plain tensors, numbers and texts only");
  }

  // ("storage", torch.FloatStorage, key, device, number of elements). Where the tensor lived plays no part.
  Status persistent_id() {
    OSCAR_ASSIGN(const Value* id, pop());
    const auto* parts = id->as<Sequence>();
    if (parts == nullptr || parts->items.size() != 5) return damaged();
    const auto* kind = parts->items[0]->as<std::string>();
    const auto* type = parts->items[1]->as<Global>();
    const auto* key = parts->items[2]->as<std::string>();
    const auto* count = parts->items[4]->as<std::int64_t>();
    if (kind == nullptr || *kind != "storage" || type == nullptr || key == nullptr || count == nullptr) {
      return damaged();
    }
    const std::optional<io::Dtype> dtype = storage_dtype(type->name);
    if (!dtype || *count < 0 || *count > Pickle::kMaxElements) return damaged();
    return push({Storage{*dtype, *key, *count}});
  }

  Status reduce() {
    OSCAR_ASSIGN(const Value* arguments, pop());
    OSCAR_ASSIGN(const Value* callee, pop());
    const auto* name = callee->as<Global>();
    const auto* items = arguments->as<Sequence>();
    if (name == nullptr || items == nullptr) return damaged();
    if (name->name == kOrderedDict && items->items.empty()) return push({Dict{}});
    if (name->name == kRebuildTensor) return tensor(items->items);
    return bad("the pickle makes an object of " + io::quote(name->name) +
               " from arguments that no rotation file has; nothing was executed");
  }

  // (storage, offset, sizes, strides, requires_grad, hooks[, metadata]); the last ones play no part.
  Status tensor(const std::vector<const Value*>& arguments) {
    if (arguments.size() < 6 || arguments.size() > 7) return damaged();
    const auto* storage = arguments[0]->as<Storage>();
    const auto* offset = arguments[1]->as<std::int64_t>();
    const std::optional<io::Shape> shape = extents(*arguments[2]);
    const std::optional<io::Shape> strides = extents(*arguments[3]);
    if (storage == nullptr || offset == nullptr || !shape || !strides) return damaged();
    Tensor tensor{*storage, *offset, *shape, *strides};
    const bool sound = tensor.strides.size() == tensor.shape.size() && tensor.offset >= 0 &&
                       tensor.offset <= Pickle::kMaxElements && fits(tensor);
    if (sound) return push({std::move(tensor)});
    return bad("a tensor " + io::shape_text(tensor.shape) + " with strides " + io::shape_text(tensor.strides) +
               " from element " + std::to_string(tensor.offset) + " leaves its storage " + io::quote(storage->key) +
               " of " + std::to_string(storage->num_elements) + " elements; the file is damaged");
  }

  std::string_view bytes_;
  std::size_t at_ = 0;
  std::vector<Value*> stack_;
  std::vector<std::size_t> marks_;  // stack sizes
  std::unordered_map<std::uint32_t, Value*> memo_;
  Pickle pickle_;
};

Result<Pickle> Pickle::parse(std::string_view bytes) { return Machine(bytes).run(); }

}  // namespace oscar::torch
