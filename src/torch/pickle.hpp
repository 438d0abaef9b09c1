#pragma once
// Reader of the pickles that torch.save writes (protocol 2): tensors, numbers, texts, lists, tuples and dictionaries.
// It knows two dozen opcodes and six names, builds plain values, and refuses everything else; nothing is ever called,
// imported or executed. Memory stays within a fixed multiple of the input, and nothing recurses, however the bytes
// nest.

#include <cstdint>
#include <deque>
#include <oscar/result.hpp>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "io/safetensors.hpp"

namespace oscar::torch {

struct Value;
struct Sequence {  // list or tuple
  std::vector<const Value*> items;
};
struct Dict {  // in the order of the file; a later entry of the same key counts
  std::vector<std::pair<const Value*, const Value*>> entries;
};
// A name that the pickle refers to; only allowed ones become values.
struct Global {
  std::string name;  // "torch.FloatStorage"
};
// Entry data/KEY of the archive.
struct Storage {
  io::Dtype dtype = io::Dtype::kF32;
  std::string key;
  std::int64_t num_elements = 0;
};
// A view of a storage. Every element that sizes and strides reach lies within it.
struct Tensor {
  Storage storage;
  std::int64_t offset = 0;  // in elements
  io::Shape shape, strides;
};

struct Value {
  std::variant<std::monostate, bool, std::int64_t, double, std::string, Sequence, Dict, Global, Storage, Tensor>
      content;  // monostate: None

  template <typename T>
  const T* as() const {
    return std::get_if<T>(&content);
  }
  // The value of the text key `name` of a dictionary; null when this is none or has no such key.
  const Value* find(std::string_view name) const;
};

// "a dictionary", "a tensor [3, 4]", for messages.
std::string describe(const Value& value);

// Owns the values of one pickle. They may refer to each other in any way, in circles too: read a known structure, do
// not walk.
class Pickle {
 public:
  static constexpr std::size_t kMaxBytes = std::size_t{1} << 24;   // 4096 layers take 0.6 MB
  static constexpr std::size_t kMaxValues = std::size_t{1} << 20;  // one takes 112 bytes
  static constexpr std::size_t kMaxStack = std::size_t{1} << 16;   // torch appends in batches of 1000
  static constexpr std::size_t kMaxMarks = 64;                     // nesting; a rotation file has 6
  static constexpr std::size_t kMaxRank = 8;
  static constexpr std::int64_t kMaxElements = std::int64_t{1} << 40;  // of one tensor or storage

  // Errors: kBadInput with a bare reason (no path); a name that is not allowed is in it.
  static Result<Pickle> parse(std::string_view bytes);

  const Value& root() const { return *root_; }

 private:
  friend class Machine;
  std::deque<Value> values_;  // addresses stay
  const Value* root_ = nullptr;
};

}  // namespace oscar::torch
