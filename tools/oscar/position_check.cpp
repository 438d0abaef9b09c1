#include "position_check.hpp"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <oscar/codec.hpp>
#include <oscar/isa.hpp>

#include "covariance/rope_turn.hpp"

namespace oscar::tool {
namespace {

constexpr int kNumPlaces = 8;
constexpr int kQueries = 64;  // of a text, its last ones; they meet all keys that calibration counts

using Rows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Rows of one head [count, head_dim], turned `offset` positions further.
Rows moved_rows(const float* first, std::ptrdiff_t stride, int count, int head_dim, const RopeTurn& turn) {
  Rows rows(count, head_dim);
  std::vector<double> row(static_cast<std::size_t>(head_dim));
  for (int i = 0; i < count; ++i) {
    std::copy_n(first + i * stride, head_dim, row.begin());
    turn.turn(row.data());
    for (int c = 0; c < head_dim; ++c) rows(i, c) = static_cast<float>(row[static_cast<std::size_t>(c)]);
  }
  return rows;
}

// What a page would give back of keys at positions first, first + 1, ...
Rows read_back(const RotationSet& set, const HeadRotation& head, const RopeSpec& rope, std::int64_t first,
               const Rows& keys, Isa isa) {
  const int dim = static_cast<int>(keys.cols()), count = static_cast<int>(keys.rows());
  Rows means(count, dim), y(count, dim), result(count, dim);
  for (int i = 0; i < count; ++i) block_mean(head, rope, dim, first + i, means.row(i).data());
  const Rows residual = keys - means;
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(count * dim));
  std::vector<RowParameters> parameters(static_cast<std::size_t>(count));
  transform_rows(head.key.transform.data(), dim, residual.data(), count, y.data(), isa);
  encode_rows(head.key, set.quantizer(), dim, y.data(), count, codes.data(), parameters.data(), isa);
  decode_rows(head.key, set.parameter_format(), dim, codes.data(), parameters.data(), count, y.data());
  inverse_transform_rows(head.key.inverse_transposed.data(), dim, y.data(), count, result.data(), isa);
  return result + means;
}

}  // namespace

PositionCheck::PositionCheck(const RotationSet& set, int length, Executor& executor)
    : set_(set), executor_(executor), end_(set.max_context) {
  if (set.geometry.context_length > 0) end_ = std::min<std::int64_t>(end_, set.geometry.context_length);
  const std::int64_t furthest = std::max<std::int64_t>(end_ - length, 0);
  for (int i = 0; i < kNumPlaces; ++i) {
    const std::int64_t offset = furthest * i / (kNumPlaces - 1) / kBlockTokens * kBlockTokens;
    if (offsets_.empty() || offset > offsets_.back()) offsets_.push_back(offset);
  }
  sums_.resize(offsets_.size());
}

Status PositionCheck::add(const SampleBlock& block) {
  const auto found = set_.layers.find(block.layer);
  if (found == set_.layers.end()) return {};
  OSCAR_ASSIGN(const Isa isa, select_isa());
  const LayerRotation& layer = found->second;
  const int dim = block.head_dim, group = block.num_qo_heads / block.num_kv_heads;
  const int first_key = std::min(kSkippedSinkTokens, block.num_tokens - 1), num_keys = block.num_tokens - first_key;
  const int num_queries = std::min(kQueries, block.num_tokens), first_query = block.num_tokens - num_queries;
  const std::ptrdiff_t key_stride = block.num_kv_heads * dim, query_stride = block.num_qo_heads * dim;
  const auto num_offsets = static_cast<int>(offsets_.size());
  std::vector<double> errors(static_cast<std::size_t>(block.num_kv_heads * num_offsets));
  executor_.parallel_for(static_cast<int>(errors.size()), [&](int task) {
    const int head = task / num_offsets;
    const std::int64_t offset = offsets_[static_cast<std::size_t>(task % num_offsets)];
    RopeTurn turn(*block.rope);  // the model's own: the set's may be wrong
    turn.set_position(static_cast<double>(offset));
    const Rows keys = moved_rows(block.k + first_key * key_stride + head * dim, key_stride, num_keys, dim, turn);
    const Rows read = read_back(set_, layer.heads[static_cast<std::size_t>(head)], layer.rope,
                                block.first_position + offset + first_key, keys, isa);
    const Rows error = (read - keys) / std::sqrt(static_cast<float>(dim));
    double sum = 0;
    for (int h = head * group; h < (head + 1) * group; ++h) {
      const Rows queries =
          moved_rows(block.q + first_query * query_stride + h * dim, query_stride, num_queries, dim, turn);
      Rows logits = queries * error.transpose();
      logits.colwise() -= logits.rowwise().mean().eval();
      sum += static_cast<double>(logits.squaredNorm()) / static_cast<double>(logits.size());
    }
    errors[static_cast<std::size_t>(task)] = sum / group;
  });
  for (std::size_t i = 0; i < errors.size(); ++i) sums_[i % offsets_.size()] += errors[i];
  num_added_ += block.num_kv_heads;
  return {};
}

PositionReport PositionCheck::report() const {
  PositionReport report{.end = end_, .places = {}};
  if (num_added_ == 0) return report;
  double mean = 0;
  for (std::size_t i = 0; i < offsets_.size(); ++i) {
    report.places.push_back({offsets_[i], sums_[i] / num_added_});
    mean += report.places.back().error / static_cast<double>(offsets_.size());
  }
  if (!(mean > 0)) return report;
  for (const auto& place : report.places)
    report.unevenness = std::max(report.unevenness, std::abs(place.error / mean - 1));
  return report;
}

}  // namespace oscar::tool
