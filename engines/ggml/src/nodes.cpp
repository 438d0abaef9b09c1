#include "nodes.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstring>
#include <numbers>
#include <string_view>

namespace oscar::ggml {
namespace {

Op op_by_name(std::string_view name) {
  if (name == "NONE") return Op::kNone;
  if (name == "VIEW" || name == "RESHAPE" || name == "PERMUTE" || name == "TRANSPOSE") return Op::kView;
  if (name == "SET_ROWS") return Op::kSetRows;
  if (name == "FLASH_ATTN_EXT") return Op::kFlashAttention;
  if (name == "ROPE") return Op::kRope;
  return Op::kOther;
}

// Operations that keep a rotated head a rotated head: views, copies, and one factor for all its channels.
bool commutes_with_rope(std::string_view name) {
  static constexpr std::array<std::string_view, 9> kNames = {"VIEW", "RESHAPE", "PERMUTE",  "TRANSPOSE", "CONT",
                                                             "CPY",  "SCALE",   "RMS_NORM", "L2_NORM"};
  return std::find(kNames.begin(), kNames.end(), name) != kNames.end();
}

float float_param(const ggml_tensor* node, int index) {
  float value = 0;
  std::memcpy(&value, &node->op_params[index], sizeof value);
  return value;
}

// ROPE's op_params, by index.
enum RopeParam {
  kNumDims = 1,
  kMode = 2,
  kOriginalContext = 4,
  kFreqBase = 5,
  kFreqScale = 6,
  kExtFactor = 7,
  kBetaFast = 9,
  kBetaSlow = 10,
  kOffset = 15
};

// YaRN: the pair at which a full context holds `rotations` turns.
double yarn_pair(int num_dims, int original_context, double rotations, double base) {
  return num_dims * std::log(original_context / (rotations * 2 * std::numbers::pi)) / (2 * std::log(base));
}

// Share of the unscaled frequency that pair p keeps: 1 below the ramp (fast pairs), 0 above it.
std::vector<double> yarn_mix(const ggml_tensor* rope, int num_dims) {
  const double base = float_param(rope, kFreqBase);
  const int original_context = rope->op_params[kOriginalContext];
  const double low =
      std::max(0.0, std::floor(yarn_pair(num_dims, original_context, float_param(rope, kBetaFast), base)));
  const double high =
      std::min(num_dims - 1.0, std::ceil(yarn_pair(num_dims, original_context, float_param(rope, kBetaSlow), base)));
  std::vector<double> mix(num_dims / 2);
  for (std::size_t p = 0; p < mix.size(); ++p) {
    const double ramp = (static_cast<double>(p) - low) / std::max(0.001, high - low);
    mix[p] = (1 - std::clamp(ramp, 0.0, 1.0)) * float_param(rope, kExtFactor);
  }
  return mix;
}

// Words of the bits lo..hi (inclusive): word `index`.
std::uint64_t range_word(std::int64_t lo, std::int64_t hi, std::int64_t index) {
  const std::int64_t first = std::max<std::int64_t>(lo - 64 * index, 0);
  const std::int64_t last = std::min<std::int64_t>(hi - 64 * index, 63);
  if (first > last) return 0;
  return (~std::uint64_t{0} >> (63 - (last - first))) << first;
}

}  // namespace

Op op_of(const ggml_tensor* node) {
  static const std::array<Op, GGML_OP_COUNT> table = [] {
    std::array<Op, GGML_OP_COUNT> ops{};
    for (int i = 0; i < GGML_OP_COUNT; ++i) ops[i] = op_by_name(ggml_op_name(static_cast<ggml_op>(i)));
    return ops;
  }();
  return node->op < GGML_OP_COUNT ? table[node->op] : Op::kOther;
}

const ggml_tensor* root_of(const ggml_tensor* tensor) {
  while (tensor->view_src != nullptr) tensor = tensor->view_src;
  return tensor;
}

std::optional<CacheTensorName> parse_cache_name(const char* name) {
  const std::string_view text(name);
  CacheTensorName parsed;
  if (text.starts_with("cache_k_l")) {
    parsed.side = Side::kKey;
  } else if (text.starts_with("cache_v_l")) {
    parsed.side = Side::kValue;
  } else {
    return std::nullopt;
  }
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data() + 9, end, parsed.layer);
  if (error != std::errc() || rest != end || parsed.layer < 0) return std::nullopt;
  return parsed;
}

const std::byte* host_bytes(const ggml_tensor* tensor, std::vector<std::byte>& scratch) {
  const ggml_backend_buffer_t buffer = root_of(tensor)->buffer;
  if (buffer == nullptr || ggml_backend_buffer_is_host(buffer)) return static_cast<const std::byte*>(tensor->data);
  scratch.resize(ggml_nbytes(tensor));
  ggml_backend_tensor_get(tensor, scratch.data(), 0, scratch.size());
  return scratch.data();
}

Result<const ggml_tensor*> find_rope(const ggml_tensor* rows) {
  constexpr int kMaxSteps = 24;  // a key is a handful of operations away from its projection
  const char* foreign = nullptr;
  const ggml_tensor* node = rows;
  for (int step = 0; node != nullptr && step < kMaxSteps; ++step) {
    const std::string_view name = ggml_op_name(node->op);
    if (name == "ROPE") {
      if (foreign == nullptr) return node;
      return make_error(ErrorCode::kUnsupported,
                        "keys '" + std::string(rows->name) + "': " + foreign +
                            " follows RoPE, which is not understood; this model keeps its 16-bit "
                            "cache");
    }
    if (name == "MUL_MAT" || name == "NONE") break;  // the projection: nothing above it concerns positions
    if (!commutes_with_rope(name)) foreign = ggml_op_name(node->op);
    node = node->src[0];
  }
  return nullptr;
}

Result<RopeSpec> read_rope(const ggml_tensor* rope, int head_dim) {
  const int num_dims = rope->op_params[kNumDims];
  const int mode = rope->op_params[kMode];
  const std::string who = "RoPE of '" + std::string(rope->name) + "'";
  RopeSpec spec;
  if (mode == GGML_ROPE_TYPE_NORMAL) {
    spec.order = RopeOrder::kInterleaved;
  } else if (mode == GGML_ROPE_TYPE_NEOX) {
    spec.order = RopeOrder::kHalves;
  } else {
    return make_error(ErrorCode::kUnsupported,
                      who + " has mode " + std::to_string(mode) + "; only 0 (pairs) and 2 (halves) are supported");
  }
  if (rope->op_params[kOffset] != 0 || rope->ne[0] != head_dim || num_dims < 2 || num_dims > head_dim ||
      num_dims % 2 != 0) {
    return make_error(ErrorCode::kUnsupported,
                      who + " turns " + std::to_string(num_dims) + " channels at offset " +
                          std::to_string(rope->op_params[kOffset]) + " of " + std::to_string(rope->ne[0]) +
                          "; expected the first channels of a head of " + std::to_string(head_dim));
  }
  spec.rotary_dim = num_dims;
  spec.inv_freq.resize(num_dims / 2);

  const double base = float_param(rope, kFreqBase);
  const double scale = float_param(rope, kFreqScale);
  std::vector<double> mix(spec.inv_freq.size(), 0.0);
  if (float_param(rope, kExtFactor) != 0) mix = yarn_mix(rope, num_dims);
  std::vector<std::byte> scratch;
  const float* factors = nullptr;
  if (rope->src[2] != nullptr) factors = reinterpret_cast<const float*>(host_bytes(rope->src[2], scratch));
  for (std::size_t p = 0; p < spec.inv_freq.size(); ++p) {
    const double unscaled =
        std::pow(base, -2.0 * static_cast<double>(p) / num_dims) / (factors != nullptr ? factors[p] : 1.0F);
    spec.inv_freq[p] = unscaled * (scale * (1 - mix[p]) + mix[p]);
  }
  return spec;
}

std::vector<std::int32_t> read_positions(const ggml_tensor* rope) {
  std::vector<std::byte> scratch;
  const ggml_tensor* positions = rope->src[1];
  const auto* values = reinterpret_cast<const std::int32_t*>(host_bytes(positions, scratch));
  return {values, values + positions->ne[0]};
}

AttentionNode read_attention(const ggml_tensor* node) {
  return {.scale = float_param(node, 0), .max_bias = float_param(node, 1), .soft_cap = float_param(node, 2)};
}

bool visible_bits(const ggml_fp16_t* mask_row, std::int64_t num_keys, std::uint64_t* words) {
  // Four halves at a time: 0x0000 is visible, 0xFC00 (-infinity) is not, and the sign bit tells them apart.
  constexpr std::uint64_t kLanes = 0x0001'0001'0001'0001;
  constexpr std::uint64_t kGather = 0x0001'0002'0004'0008;  // moves lane bits 0, 16, 32, 48 to bits 48..51
  std::uint64_t wrong = 0;
  for (std::int64_t first = 0; first < num_keys; first += 64) {
    const std::int64_t count = std::min<std::int64_t>(64, num_keys - first);
    std::uint64_t hidden = 0;
    std::int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
      std::uint64_t quad;
      std::memcpy(&quad, mask_row + first + j, sizeof quad);
      const std::uint64_t signs = (quad >> 15) & kLanes;
      wrong |= quad ^ (signs * 0xFC00);
      hidden |= ((signs * kGather) >> 48 & 0xF) << j;
    }
    for (; j < count; ++j) {
      const std::uint64_t value = mask_row[first + j];
      wrong |= value ^ (value >> 15) * 0xFC00;
      hidden |= (value >> 15) << j;
    }
    const std::uint64_t all = count == 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << count) - 1;
    words[first / 64] = ~hidden & all;
  }
  return wrong == 0;
}

Result<int> read_window(const ggml_tensor* mask, std::int64_t num_tokens) {
  if (mask == nullptr || mask->type != GGML_TYPE_F16 || mask->ne[0] < num_tokens || mask->ne[1] < num_tokens) {
    return make_error(ErrorCode::kUnsupported,
                      "attention without an F16 causal mask; only decoder models are supported");
  }
  std::vector<std::byte> scratch;
  const std::byte* base = host_bytes(mask, scratch);
  const std::int64_t num_words = (mask->ne[0] + 63) / 64;
  std::vector<std::uint64_t> words(static_cast<std::size_t>(num_words));
  const auto read_row = [&](std::int64_t query) {
    return visible_bits(reinterpret_cast<const ggml_fp16_t*>(base + query * static_cast<std::int64_t>(mask->nb[1])),
                        mask->ne[0], words.data());
  };
  const auto unsupported = [] {
    return make_error(
        ErrorCode::kUnsupported,
        "attention is neither causal nor causal within a sliding window; such layers cannot be calibrated");
  };
  if (!read_row(num_tokens - 1)) return unsupported();
  std::int64_t first_visible = 0;
  while (first_visible < num_tokens && (words[first_visible / 64] >> (first_visible % 64) & 1) == 0) ++first_visible;
  const std::int64_t window = first_visible == 0 ? 0 : num_tokens - first_visible;
  for (std::int64_t i = 0; i < num_tokens; ++i) {
    if (!read_row(i)) return unsupported();
    const std::int64_t oldest = window == 0 ? 0 : std::max<std::int64_t>(0, i - window + 1);
    for (std::int64_t w = 0; w < num_words; ++w) {
      if (words[w] != range_word(oldest, i, w)) return unsupported();
    }
  }
  return static_cast<int>(window);
}

std::string describe(const ggml_tensor* node) { return std::string(ggml_op_name(node->op)) + " '" + node->name + "'"; }

}  // namespace oscar::ggml
