#pragma once
// Stage "covariance": streaming second moments of queries, keys and values, in double, mergeable.
// Every sum is over raw (uncentred) rows in RoPE-halves order, so that statistics of several texts, files
// or machines merge by addition, and everything a rotation needs follows from them in closed form.

#include <cstdint>
#include <map>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <oscar/samples.hpp>
#include <string>
#include <vector>

namespace oscar {

inline constexpr int kBlockTokens = 64;        // positions that share a page mean
inline constexpr int kSkippedSinkTokens = 64;  // first positions left out of key and value sums

// Sums of one layer and KV head. D = head_dim, G = query heads a KV head.
struct HeadStatistics {
  int head_dim = 0;
  // queries: every position
  double num_queries = 0;            // tokens (not tokens x G)
  std::vector<double> query_moment;  // [D, D] sum over tokens of mean over G of q^T q
  // keys and values: positions >= kSkippedSinkTokens
  double num_keys = 0;
  std::vector<double> pre_rope_key_sum;  // [D] sum of R_{-j} k_j
  std::vector<double> key_moment;        // [D, D] sum k^T k (post-RoPE)
  std::vector<double> block_key_sum;     // [num_blocks, D] sum of k_j over the positions of block floor(j / 64)
  std::vector<double> block_count;       // [num_blocks]
  std::vector<double> value_sum;         // [D]
  std::vector<double> value_moment;      // [D, D]
  // the published method's value objective (`sst`): every position, weight k M k^T normalised to mean 1 over
  // a block of samples, where M is that block's mean q^T q (exact when a text is one block)
  double num_weighted = 0;
  std::vector<double> weighted_value_moment;  // [D, D]
  // sum over the group's heads of W_o^T W_o: the metric of value errors. A property of the weights: set, not summed.
  std::vector<double> output_gram;  // [D, D], empty until set
};

struct LayerStatistics {
  RopeSpec rope;
  std::vector<HeadStatistics> heads;  // [num_kv_heads]
};

struct ModelStatistics {
  ModelGeometry geometry;
  std::map<int, LayerStatistics> layers;  // by layer index; only layers whose cache is quantised
  std::int64_t num_tokens = 0;            // of calibration text
  std::string corpus_hash;                // hex, of the texts in order; merged runs: of their hashes
};

// Adds one block. The layer's entry is created when first seen. Errors: kInvalidArgument (shape differs from
// what the layer had, head_dim not a multiple of 16), kBadInput (NaN or infinity in the rows).
Status accumulate(LayerStatistics& layer, const SampleBlock& block);

// Adds `other` into `into`. Error kMismatch when geometries differ.
Status merge(ModelStatistics& into, const ModelStatistics& other);

// One safetensors file (docs/format.md), whole or not at all.
Status save_statistics(const ModelStatistics& statistics, const std::string& path);
Result<ModelStatistics> load_statistics(const std::string& path);

}  // namespace oscar
