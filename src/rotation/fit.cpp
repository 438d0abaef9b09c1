#include <cmath>
#include <oscar/rotation.hpp>
#include <oscar/version.hpp>

#include "covariance/model_json.hpp"
#include "covariance/statistics_check.hpp"
#include "rotation/balanced.hpp"
#include "rotation/hadamard.hpp"
#include "rotation/page_mean.hpp"
#include "rotation/published.hpp"
#include "rotation/rotation_check.hpp"
#include "rotation/rotation_file.hpp"

namespace oscar {
namespace {

using Eigen::MatrixXd;
using Eigen::VectorXd;
using RowMajor = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowMajorF = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using SetResult = Result<std::shared_ptr<const RotationSet>>;

// The published clip: quantile of |y| kept.
constexpr float kKeyClipRatio = 0.96F;
constexpr float kValueClipRatio = 0.92F;
constexpr double kBetaWithFeedback = 0.125;
constexpr double kBetaWithoutFeedback = 0.25;
constexpr int kLeastKeysPerChannel = 2;
constexpr int kMaxOffsets = 4096;
constexpr std::int64_t kMaxContext = std::int64_t{1} << 40;

bool is_ours(Method method) { return method == Method::kOurs || method == Method::kOursFast; }

MatrixXd moment_of(const std::vector<double>& sums, int width, double count) {
  return Eigen::Map<const RowMajor>(sums.data(), width, width) / count;
}

std::string composition_of(Method method) {
  switch (method) {
    case Method::kNaive: return "identity";
    case Method::kHadamard: return "h";
    case Method::kPublished:
    case Method::kPublishedPerHead: return "r_h_pbr";
    case Method::kOursFast: return "page_mean balanced_1/4 mean_to_ones h";
    case Method::kOurs: return "page_mean balanced_1/8 mean_to_ones h feedback";
  }
  return {};
}

tl::unexpected<Error> unsupported_width(Method method, int layer, int head_dim) {
  const bool ours_works = !is_ours(method) && hadamard(head_dim).has_value();
  return make_error(ErrorCode::kUnsupported, "layer " + std::to_string(layer) + ": method '" +
                                                 std::string(method_name(method)) +
                                                 "' has no Hadamard matrix for head_dim " + std::to_string(head_dim) +
                                                 (ours_works ? "; use method ours, which has one" : ""));
}

// An orthogonal rotation: its inverse transposed is itself.
SideRotation orthogonal_side(const MatrixXd& rotation, float clip_ratio) {
  const RowMajorF values = rotation.cast<float>();
  SideRotation side;
  side.transform.assign(values.data(), values.data() + values.size());
  side.inverse_transposed = side.transform;
  side.clip_ratio = clip_ratio;
  return side;
}

// Gives the set its hash, after a last look at it.
SetResult finished(std::shared_ptr<RotationSet> set) {
  set->producer = "oscar " OSCAR_VERSION_STRING;
  set->composition = composition_of(set->method);
  if (const auto fault = rotation_fault(*set)) {
    return make_error(ErrorCode::kInternal, "the fitted rotation cannot be used: " + *fault +
                                                "; please report this with the calibration text");
  }
  set->content_hash = rotation_hash(*set);
  return set;
}

Status check_options(const FitOptions& options) {
  const auto bad = [](const std::string& what) { return make_error(ErrorCode::kInvalidArgument, what); };
  if (options.num_offsets < 1 || options.num_offsets > kMaxOffsets) {
    return bad("num_offsets is " + std::to_string(options.num_offsets) + ", expected 1..4096");
  }
  if (options.max_context < 0 || options.max_context > kMaxContext) {
    return bad("max_context is " + std::to_string(options.max_context) + ", expected 0..2^40");
  }
  if (!(options.damping >= 0 && options.damping <= 1)) {
    return bad("damping is " + std::to_string(options.damping) + ", expected 0..1");
  }
  if (!(options.regularizer >= 0 && options.regularizer <= 1)) {
    return bad("regularizer is " + std::to_string(options.regularizer) + ", expected 0..1");
  }
  return {};
}

// Enough rows behind every moment.
Status check_counts(const ModelStatistics& statistics) {
  for (const auto& [index, layer] : statistics.layers) {
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const HeadStatistics& head = layer.heads[h];
      const int least = kLeastKeysPerChannel * head.head_dim;
      if (head.num_keys >= least && head.num_queries >= least && head.num_weighted > 0) continue;
      return make_error(ErrorCode::kBadInput,
                        "layer " + std::to_string(index) + ", KV head " + std::to_string(h) + ": the statistics hold " +
                            std::to_string(static_cast<std::int64_t>(head.num_keys)) +
                            " keys (the first 64 of a text do not count), head_dim " + std::to_string(head.head_dim) +
                            " needs at least " + std::to_string(least) + "; use a longer calibration text");
    }
  }
  return {};
}

void fit_published_layer(const LayerStatistics& statistics, bool per_head, LayerRotation& layer) {
  const int width = statistics.heads.front().head_dim;
  const auto num_heads = static_cast<double>(statistics.heads.size());
  MatrixXd key_mean = MatrixXd::Zero(width, width);
  MatrixXd value_mean = MatrixXd::Zero(width, width);
  for (const HeadStatistics& head : statistics.heads) {
    const MatrixXd key = moment_of(head.query_moment, width, head.num_queries);
    const MatrixXd value = moment_of(head.weighted_value_moment, width, head.num_weighted);
    if (per_head) {
      layer.heads.emplace_back().key = orthogonal_side(published_rotation(key), kKeyClipRatio);
      layer.heads.back().value = orthogonal_side(published_rotation(value), kValueClipRatio);
    }
    key_mean += key / num_heads;
    value_mean += value / num_heads;
  }
  if (per_head) return;
  HeadRotation shared;
  shared.key = orthogonal_side(published_rotation(key_mean), kKeyClipRatio);
  shared.value = orthogonal_side(published_rotation(value_mean), kValueClipRatio);
  layer.heads.assign(statistics.heads.size(), shared);
}

// Fits one layer after the other with the method ours or ours-fast.
class OursFitter {
 public:
  OursFitter(const FitOptions& options, std::int64_t max_context) : options_(options), max_context_(max_context) {}

  Status fit_layer(int index, const LayerStatistics& statistics, LayerRotation& layer) {
    const int width = statistics.heads.front().head_dim;
    if (hadamard_.rows() != width) {
      const std::optional<MatrixXd> matrix = hadamard(width);
      if (!matrix) return unsupported_width(options_.method, index, width);
      hadamard_ = *matrix;
    }
    for (std::size_t h = 0; h < statistics.heads.size(); ++h) {
      const HeadStatistics& head = statistics.heads[h];
      const std::string where = "layer " + std::to_string(index) + ", KV head " + std::to_string(h);
      if (head.output_gram.empty()) {
        return make_error(ErrorCode::kInvalidArgument,
                          where + ": output_gram is empty; set it from the model's attention output weights");
      }
      HeadRotation& rotation = layer.heads.emplace_back();
      if (!fit_key(head, statistics.rope, rotation) || !fit_value(head, rotation)) {
        return make_error(ErrorCode::kBadInput,
                          where + ": a moment of the statistics is not positive semidefinite; collect them again");
      }
    }
    return {};
  }

 private:
  // `rows` is the sum of x^T x over the head's keys or values as the cache holds them.
  BalancedInput input(const VectorXd& mean, const MatrixXd& moment, MatrixXd metric, const HeadStatistics& head,
                      const std::vector<double>& rows) const {
    const bool with_feedback = options_.method == Method::kOurs;
    return {.covariance = moment - mean * mean.transpose(),
            .mean = mean,
            .metric = std::move(metric),
            .energy = moment_of(rows, head.head_dim, head.num_keys).trace() / head.head_dim,
            .beta = with_feedback ? kBetaWithFeedback : kBetaWithoutFeedback,
            .regularizer = options_.regularizer,
            .damping = options_.damping,
            .with_feedback = with_feedback};
  }

  bool fit_key(const HeadStatistics& head, const RopeSpec& rope, HeadRotation& rotation) const {
    const VectorXd mean = pre_rope_mean(head);
    const VectorXd page = page_mean(mean, rope);
    rotation.key_mean.assign(mean.data(), mean.data() + mean.size());
    rotation.page_mean.assign(page.data(), page.data() + page.size());

    const auto length = static_cast<std::int64_t>(head.block_count.size()) * kBlockTokens;
    const auto offsets = calibration_offsets(max_context_, length, options_.num_offsets);
    const Moments keys = average_over_offsets(residual_moments(head, rope, page), rope, offsets);
    const Moments queries = average_over_offsets(
        {VectorXd::Zero(head.head_dim), moment_of(head.query_moment, head.head_dim, head.num_queries)}, rope, offsets);
    auto side = balanced_transform(input(keys.mean, keys.moment, queries.moment, head, head.key_moment), hadamard_);
    if (side) rotation.key = *std::move(side);
    return side.has_value();
  }

  bool fit_value(const HeadStatistics& head, HeadRotation& rotation) const {
    const int width = head.head_dim;
    const VectorXd mean = Eigen::Map<const VectorXd>(head.value_sum.data(), width) / head.num_keys;
    const MatrixXd moment = moment_of(head.value_moment, width, head.num_keys);
    auto side = balanced_transform(input(mean, moment, moment_of(head.output_gram, width, 1), head, head.value_moment),
                                   hadamard_);
    if (side) rotation.value = *std::move(side);
    return side.has_value();
  }

  FitOptions options_;
  std::int64_t max_context_;
  MatrixXd hadamard_;
};

}  // namespace

SetResult fit_rotation(const ModelGeometry& geometry, Method method) {
  if (method != Method::kNaive && method != Method::kHadamard) {
    return make_error(ErrorCode::kInvalidArgument, "method '" + std::string(method_name(method)) +
                                                       "' needs statistics of a calibration text; only naive and "
                                                       "hadamard do without");
  }
  if (const auto fault = geometry_fault(geometry)) return make_error(ErrorCode::kInvalidArgument, *fault);
  auto set = std::make_shared<RotationSet>();
  set->method = method;
  set->geometry = geometry;
  set->max_context = geometry.context_length;
  for (std::size_t i = 0; i < geometry.layers.size(); ++i) {
    const LayerGeometry& layer = geometry.layers[i];
    if (layer.kind == LayerKind::kNoCache) continue;
    const int index = static_cast<int>(i);
    HeadRotation head;
    if (method == Method::kNaive) {
      head.key = head.value = orthogonal_side(MatrixXd::Identity(layer.head_dim, layer.head_dim), 0);
    } else {
      if (!is_power_of_two(layer.head_dim)) return unsupported_width(method, index, layer.head_dim);
      const MatrixXd matrix = hadamard(layer.head_dim).value();
      head.key = orthogonal_side(matrix, kKeyClipRatio);
      head.value = orthogonal_side(matrix, kValueClipRatio);
    }
    set->layers[index].heads.assign(static_cast<std::size_t>(layer.num_kv_heads), head);
  }
  return finished(std::move(set));
}

SetResult fit_rotation(const ModelStatistics& statistics, const FitOptions& options) {
  if (options.method == Method::kNaive || options.method == Method::kHadamard) {
    return fit_rotation(statistics.geometry, options.method);
  }
  OSCAR_TRY(check_options(options));
  if (const auto fault = statistics_fault(statistics)) return make_error(ErrorCode::kInvalidArgument, *fault);
  if (statistics.layers.empty()) {
    return make_error(ErrorCode::kInvalidArgument, "the statistics hold no layer; accumulate samples first");
  }
  OSCAR_TRY(check_counts(statistics));
  auto set = std::make_shared<RotationSet>();
  set->method = options.method;
  set->geometry = statistics.geometry;
  set->num_tokens = statistics.num_tokens;
  set->corpus_hash = statistics.corpus_hash;
  set->max_context = options.max_context > 0 ? options.max_context : statistics.geometry.context_length;
  if (is_ours(options.method) && set->max_context == 0) {
    return make_error(ErrorCode::kInvalidArgument,
                      "max_context is 0 and the model gives no context length; set max_context");
  }
  OursFitter fitter(options, set->max_context);
  for (const auto& [index, layer] : statistics.layers) {
    const int head_dim = layer.heads.front().head_dim;
    LayerRotation& rotation = set->layers[index];
    rotation.rope = layer.rope;
    if (is_ours(options.method)) {
      OSCAR_TRY(fitter.fit_layer(index, layer, rotation));
      continue;
    }
    if (!is_power_of_two(head_dim)) return unsupported_width(options.method, index, head_dim);
    fit_published_layer(layer, options.method == Method::kPublishedPerHead, rotation);
  }
  return finished(std::move(set));
}

}  // namespace oscar
