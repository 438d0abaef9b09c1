#include <functional>
#include <oscar/covariance.hpp>

#include "covariance/model_json.hpp"
#include "covariance/statistics_check.hpp"
#include "io/hash.hpp"

namespace oscar {
namespace {

tl::unexpected<Error> mismatch(const std::string& reason) {
  return make_error(ErrorCode::kMismatch, "statistics cannot be merged: " + reason);
}

// sum += addend, which may be the longer one (blocks that only one text reaches).
void add(std::vector<double>& sum, const std::vector<double>& addend) {
  if (sum.size() < addend.size()) sum.resize(addend.size());
  for (std::size_t i = 0; i < addend.size(); ++i) sum[i] += addend[i];
}

void add_head(HeadStatistics& into, const HeadStatistics& other) {
  into.num_queries += other.num_queries;
  into.num_keys += other.num_keys;
  into.num_weighted += other.num_weighted;
  for (const auto member :
       {&HeadStatistics::query_moment, &HeadStatistics::pre_rope_key_sum, &HeadStatistics::key_moment,
        &HeadStatistics::block_key_sum, &HeadStatistics::block_count, &HeadStatistics::value_sum,
        &HeadStatistics::value_moment, &HeadStatistics::weighted_value_moment}) {
    add(into.*member, other.*member);
  }
  if (into.output_gram.empty()) into.output_gram = other.output_gram;
}

std::string hash_of_hashes(const std::string& first, const std::string& second) {
  io::Hasher hasher;
  hasher.update_text(first);
  hasher.update_text(second);
  return hasher.hex();
}

}  // namespace

Status merge(ModelStatistics& into, const ModelStatistics& other) {
  if (geometry_to_json(into.geometry) != geometry_to_json(other.geometry)) {
    return mismatch("they are of different models (" + into.geometry.architecture + " '" + into.geometry.name +
                    "', fingerprint " + into.geometry.fingerprint + ", and " + other.geometry.architecture + " '" +
                    other.geometry.name + "', fingerprint " + other.geometry.fingerprint + ")");
  }
  for (const ModelStatistics& statistics : {std::cref<const ModelStatistics>(into), std::cref(other)}) {
    if (const auto fault = statistics_fault(statistics)) return mismatch(*fault);
  }
  for (const auto& [index, layer] : other.layers) {
    const auto found = into.layers.find(index);
    if (found == into.layers.end()) continue;
    const RopeSpec& rope = found->second.rope;
    if (rope.order != layer.rope.order || rope.rotary_dim != layer.rope.rotary_dim ||
        rope.inv_freq != layer.rope.inv_freq) {
      return mismatch("the RoPE of layer " + std::to_string(index) + " differs; use one context setting for all runs");
    }
  }
  for (const auto& [index, layer] : other.layers) {
    const auto [entry, is_new] = into.layers.try_emplace(index, layer);
    if (is_new) continue;
    for (std::size_t h = 0; h < layer.heads.size(); ++h) add_head(entry->second.heads[h], layer.heads[h]);
  }
  into.num_tokens += other.num_tokens;
  into.corpus_hash = hash_of_hashes(into.corpus_hash, other.corpus_hash);
  return {};
}

}  // namespace oscar
