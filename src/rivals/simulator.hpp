#pragma once
// Every layer and head of a model under one method that has no page format: built by name, then fed rows.

#include <cstdint>
#include <map>
#include <memory>
#include <oscar/isa.hpp>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <oscar/rotation.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "rivals/side_simulator.hpp"

namespace oscar::rivals {

struct Rival {
  std::string_view name;
  // The rotation it works on; nothing for those that need none.
  bool needs_rotation = false;
  Method rotation = Method::kOurs;
};
// kivi, turbo2, turbo3, published-lloyd-max, ours-k3, ours-k4, ours-mix25, ours-1.6, ours-nom.
const std::vector<Rival>& rivals();
const Rival* find_rival(std::string_view name);  // null when there is none of that name

struct RivalInputs {
  const ModelGeometry* geometry = nullptr;
  std::shared_ptr<const RotationSet> rotation;  // of Rival::rotation, where one is needed
  // ours-mix25: the expected squared error of a logit, of each layer's KV heads: the worst quarter of all gets 3 bits.
  std::map<int, std::vector<double>> key_errors;
  Isa isa = Isa::kScalar;
};

class Simulator {
 public:
  // Errors: kInvalidArgument (unknown name, inputs missing), kMismatch (heads of the rotation and the geometry differ).
  static Result<std::shared_ptr<const Simulator>> make(std::string_view name, const RivalInputs& inputs);

  // k and v [num_rows, num_kv_heads, head_dim] of a layer's consecutive tokens from `first` on, a multiple of
  // group_tokens(). Thread-safe.
  void read_back(int layer, std::int64_t first, int num_rows, float* k, float* v) const;
  int group_tokens() const;
  // Codes and parameters, mean over all elements of K and V.
  double bits_per_element() const;
  // With the 16-bit rows of the windows beside the codes, as KvSpec::bits_per_element counts them.
  double bits_per_element(int sink, int recent, std::int64_t context) const;

 private:
  struct Head {
    std::unique_ptr<const SideSimulator> key, value;
  };
  struct Layer {
    int head_dim = 0;
    std::vector<Head> heads;
  };
  std::shared_ptr<const RotationSet> rotation_;  // heads point into it
  std::map<int, Layer> layers_;                  // full-attention layers
};

}  // namespace oscar::rivals
