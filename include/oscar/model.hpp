#pragma once
// Stage "model": the geometry of a language model's attention, from GGUF metadata.

#include <cstdint>
#include <oscar/result.hpp>
#include <string>
#include <vector>

namespace oscar {

// How channel pairs of a row turn together under RoPE.
enum class RopeOrder {
  kNone,         // keys carry no rotary embedding
  kHalves,       // pair p = channels p and p + rotary_dim / 2 (neox)
  kInterleaved,  // pair p = channels 2p and 2p + 1 (llama.cpp's `llama` architecture)
};

struct RopeSpec {
  RopeOrder order = RopeOrder::kNone;  // of the engine's rows; the rotation file is always in halves order
  int rotary_dim = 0;                  // channels that turn: the first rotary_dim of a row
  std::vector<double> inv_freq;        // [rotary_dim / 2] radians a position, as deployed (scaling included)
};

enum class LayerKind { kFull, kSlidingWindow, kNoCache };

struct LayerGeometry {
  LayerKind kind = LayerKind::kFull;
  int num_qo_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int sliding_window = 0;  // tokens, 0 = none
  int gqa_group() const { return num_qo_heads / num_kv_heads; }
};

struct ModelGeometry {
  std::string architecture;  // general.architecture
  std::string name;          // general.name, may be empty
  std::vector<LayerGeometry> layers;
  int context_length = 0;   // the model's own maximum, tokens
  std::string fingerprint;  // 32 hex digits over the geometry and the first layer's key weights
};

// Reads the header of a GGUF file, bounded against hostile input. Errors: kIo (missing, unreadable),
// kBadInput (not GGUF, truncated, corrupt), kUnsupported (MLA, head_dim not a multiple of 16, ...).
Result<ModelGeometry> read_gguf_geometry(const std::string& path);

// Channel c of a halves-order row is channel permutation[c] of the engine's row. [head_dim]
std::vector<int> halves_permutation(const RopeSpec& rope, int head_dim);

}  // namespace oscar
