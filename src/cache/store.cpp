#include <algorithm>
#include <bit>
#include <oscar/cache.hpp>
#include <string>

#include "cache/page_layout.hpp"

namespace oscar {
namespace {

constexpr int kTileRows = 16;  // rows transformed and encoded together; bounds the stack scratch of a task

bool all_finite(const float* row, int num) {
  constexpr std::uint32_t kExponent = 0x7f800000u;
  std::uint32_t bad = 0;
  for (int i = 0; i < num; ++i) bad |= (std::bit_cast<std::uint32_t>(row[i]) & kExponent) == kExponent;
  return bad == 0;
}

Status check_finite(const KvSpec& spec, const StoreRows& rows, const float* side, const char* name) {
  if (side == nullptr) return {};
  const std::int64_t width = std::int64_t{spec.num_kv_heads} * spec.head_dim;
  for (int i = 0; i < rows.num_rows; ++i) {
    for (int head = 0; head < spec.num_kv_heads; ++head) {
      if (all_finite(side + i * width + head * spec.head_dim, spec.head_dim)) continue;
      return make_error(ErrorCode::kBadInput, std::string(name) + " of token " + std::to_string(rows.tokens[i]) +
                                                  ", KV head " + std::to_string(head) +
                                                  " has NaN or infinity; nothing was stored. The model overflowed: "
                                                  "check its weights and precision");
    }
  }
  return {};
}

Status check_layer(const PagedLayer& layer, Quantizer quantizer) {
  const KvSpec& spec = layer.spec;
  if (layer.rotation == nullptr || layer.rotation->heads.size() != static_cast<std::size_t>(spec.num_kv_heads)) {
    const std::size_t heads = layer.rotation == nullptr ? 0 : layer.rotation->heads.size();
    return make_error(ErrorCode::kMismatch, "the rotation has " + std::to_string(heads) + " KV heads but the cache " +
                                                std::to_string(spec.num_kv_heads) + "; recalibrate for this model");
  }
  const bool float_pair = spec.parameter_format == ParameterFormat::kFloatPair;
  if (float_pair != (quantizer == Quantizer::kMinMax)) {
    return make_error(ErrorCode::kInvalidArgument,
                      float_pair ? "this quantizer writes 8-bit parameters but the pages hold float pairs; "
                                   "build KvSpec with parameter_format_of(method)"
                                 : "the min/max quantizer writes float pairs but the pages hold 8-bit parameters; "
                                   "build KvSpec with parameter_format_of(method)");
  }
  for (const HeadRotation& head : layer.rotation->heads) {
    if (head.key_bits != 2 || head.value_bits != 2) {
      return make_error(ErrorCode::kUnsupported, "the rotation asks for " + std::to_string(head.key_bits) +
                                                     "-bit keys and " + std::to_string(head.value_bits) +
                                                     "-bit values; pages hold 2 bits");
    }
  }
  return {};
}

// One call's work, cut by (KV head, side): no two tasks touch one page half.
struct StoreJob {
  const PagedLayer& layer;
  Quantizer quantizer;
  const StoreRows& rows;
  Isa isa;

  void run(int task) const {
    const int head = task / 2;
    const bool is_key = task % 2 == 0;
    const float* source = is_key ? rows.k : rows.v;
    if (source != nullptr) store_head(head, is_key, source);
  }

  void store_head(int head, bool is_key, const float* source) const {
    const KvSpec& spec = layer.spec;
    const int head_dim = spec.head_dim;
    const HeadRotation& rotation = layer.rotation->heads[static_cast<std::size_t>(head)];
    const SideRotation& side = is_key ? rotation.key : rotation.value;
    const bool has_mean = is_key && !rotation.page_mean.empty();
    float x[kTileRows * cpu::kMaxHeadDim], y[kTileRows * cpu::kMaxHeadDim], mean[cpu::kMaxHeadDim];
    std::uint8_t codes[kTileRows * cpu::kMaxHeadDim];
    RowParameters parameters[kTileRows];
    std::int64_t mean_block = -1;  // whose mean is at hand

    for (int first = 0; first < rows.num_rows; first += kTileRows) {
      const int num = std::min(kTileRows, rows.num_rows - first);
      for (int i = 0; i < num; ++i) {
        const float* row = source + (std::int64_t{first + i} * spec.num_kv_heads + head) * head_dim;
        float* to = x + i * head_dim;
        if (!has_mean) {
          std::copy_n(row, head_dim, to);
          continue;
        }
        const std::int32_t position = rows.positions[first + i];
        if (position / kBlockTokens != mean_block) {
          mean_block = position / kBlockTokens;
          block_mean(rotation, layer.rotation->rope, head_dim, position, mean);
        }
        for (int j = 0; j < head_dim; ++j) to[j] = row[j] - mean[j];
      }
      transform_rows(side.transform.data(), head_dim, x, num, y, isa);
      encode_rows(side, quantizer, head_dim, y, num, codes, parameters, isa);
      for (int i = 0; i < num; ++i) {
        const std::int32_t token = rows.tokens[first + i];
        std::uint8_t* half = layer.half(is_key ? layer.key : layer.value, token / kPageTokens, head);
        const auto pack = is_key ? pack_key_row : pack_value_row;
        pack(half, head_dim, spec.parameter_format, token % kPageTokens, codes + i * head_dim, parameters[i]);
      }
    }
  }
};

}  // namespace

Status store(const PagedLayer& layer, Quantizer quantizer, const StoreRows& rows, Isa isa, Executor& executor) {
  OSCAR_TRY(check_layer(layer, quantizer));
  OSCAR_TRY(check_finite(layer.spec, rows, rows.k, "K"));
  OSCAR_TRY(check_finite(layer.spec, rows, rows.v, "V"));
  const StoreJob job{layer, quantizer, rows, isa};
  // one captured pointer: the std::function needs no allocation
  executor.parallel_for(2 * layer.spec.num_kv_heads, [&job](int task) { job.run(task); });
  return {};
}

}  // namespace oscar
