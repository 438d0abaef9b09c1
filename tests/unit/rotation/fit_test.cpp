#include <gtest/gtest.h>

#include <cmath>
#include <oscar/rotation.hpp>

#include "rotation/hadamard.hpp"
#include "rotation/page_mean.hpp"
#include "support/statistics.hpp"
#include "unit/rotation/matrices.hpp"

namespace oscar {
namespace {

using Eigen::MatrixXd;
using test::SmallModel;
using test::square;

constexpr double kFloatTolerance = 1e-4;  // float32 matrices times their condition number

constexpr Method kAllMethods[] = {Method::kNaive,    Method::kHadamard, Method::kPublished, Method::kPublishedPerHead,
                                  Method::kOursFast, Method::kOurs};

std::shared_ptr<const RotationSet> fit(const ModelStatistics& statistics, Method method) {
  auto set = fit_rotation(statistics, {.method = method});
  if (!set) throw std::runtime_error(set.error().message);
  return *set;
}

TEST(Methods, NamesRoundTrip) {
  for (const Method method : kAllMethods) EXPECT_EQ(parse_method(method_name(method)), method);
  EXPECT_FALSE(parse_method("best"));
  EXPECT_EQ(quantizer_of(Method::kOurs), Quantizer::kFeedback);
  EXPECT_EQ(quantizer_of(Method::kOursFast), Quantizer::kLeastSquares);
  EXPECT_EQ(quantizer_of(Method::kPublished), Quantizer::kMinMax);
  EXPECT_EQ(parameter_format_of(Method::kOurs), ParameterFormat::kLog8);
  EXPECT_EQ(parameter_format_of(Method::kHadamard), ParameterFormat::kFloatPair);
}

TEST(Fit, EveryMethodGivesInvertibleTransformsOfEveryHead) {
  const ModelStatistics statistics = test::statistics_of({.head_dim = 32, .num_tokens = 400});
  for (const Method method : kAllMethods) {
    SCOPED_TRACE(method_name(method));
    const auto set = fit(statistics, method);
    ASSERT_EQ(set->layers.size(), 2U);
    EXPECT_EQ(set->method, method);
    EXPECT_EQ(set->max_context, 4096);
    EXPECT_EQ(set->content_hash.size(), 32U);
    EXPECT_EQ(set->producer.rfind("oscar ", 0), 0U);
    const bool ours = method == Method::kOurs || method == Method::kOursFast;
    const bool calibrated = ours || method == Method::kPublished || method == Method::kPublishedPerHead;
    EXPECT_EQ(set->num_tokens, calibrated ? 400 : 0);
    for (const auto& [index, layer] : set->layers) {
      ASSERT_EQ(layer.heads.size(), 2U);
      for (const HeadRotation& head : layer.heads) {
        for (const SideRotation* side : {&head.key, &head.value}) {
          const MatrixXd product = square(side->transform, 32) * square(side->inverse_transposed, 32).transpose();
          EXPECT_LT(test::largest(product - test::identity(32)), kFloatTolerance);
          EXPECT_EQ(side->feedback.empty(), method != Method::kOurs);
          EXPECT_EQ(side->metric.empty(), method != Method::kOurs);
        }
        EXPECT_EQ(head.key_mean.empty(), !ours);
        EXPECT_EQ(head.page_mean.empty(), !ours);
        EXPECT_EQ(head.key.clip_ratio, method == Method::kNaive || ours ? 0.0F : 0.96F);
        EXPECT_EQ(head.value.clip_ratio, method == Method::kNaive || ours ? 0.0F : 0.92F);
      }
    }
  }
}

TEST(Fit, PublishedSharesOneRotationALayerAndPerHeadDoesNot) {
  const ModelStatistics statistics = test::statistics_of({.head_dim = 32, .num_tokens = 400});
  const auto shared = fit(statistics, Method::kPublished);
  const auto per_head = fit(statistics, Method::kPublishedPerHead);
  const auto& shared_heads = shared->layers.at(0).heads;
  const auto& own_heads = per_head->layers.at(0).heads;
  EXPECT_EQ(shared_heads[0].key.transform, shared_heads[1].key.transform);
  EXPECT_EQ(shared_heads[0].value.transform, shared_heads[1].value.transform);
  EXPECT_NE(own_heads[0].key.transform, own_heads[1].key.transform);
  EXPECT_NE(own_heads[0].value.transform, own_heads[1].value.transform);

  // The shared rotation flattens the mean of the heads' moments.
  MatrixXd mean = MatrixXd::Zero(32, 32);
  for (const HeadStatistics& head : statistics.layers.at(0).heads) {
    mean += square(head.query_moment, 32) / head.num_queries / 2;
  }
  const MatrixXd rotation = square(shared_heads[0].key.transform, 32);
  const Eigen::VectorXd energies = (rotation.transpose() * mean * rotation).diagonal();
  EXPECT_LT(test::largest(energies - Eigen::VectorXd::Constant(32, mean.trace() / 32)), kFloatTolerance * mean.trace());
}

TEST(Fit, OursKeepsTheMeansOfTheStatistics) {
  const ModelStatistics statistics = test::statistics_of({.num_tokens = 400});
  const auto set = fit(statistics, Method::kOurs);
  for (const auto& [index, layer] : set->layers) {
    for (std::size_t h = 0; h < layer.heads.size(); ++h) {
      const HeadStatistics& head = statistics.layers.at(index).heads[h];
      const Eigen::VectorXd mean = pre_rope_mean(head);
      EXPECT_EQ(test::vector(layer.heads[h].key_mean), mean);
      EXPECT_EQ(test::vector(layer.heads[h].page_mean), page_mean(mean, layer.rope));
    }
  }
}

// A A^T of the balanced transform, from the symmetric root; free of A's arbitrary signs.
MatrixXd balanced_gram(const MatrixXd& covariance, const MatrixXd& metric, double beta) {
  const auto regularised = [](const MatrixXd& m) -> MatrixXd {
    return m + 1e-3 * m.trace() / static_cast<double>(m.rows()) * test::identity(static_cast<int>(m.rows()));
  };
  const Eigen::SelfAdjointEigenSolver<MatrixXd> roots(regularised(covariance));
  const MatrixXd root = roots.operatorSqrt();
  const Eigen::SelfAdjointEigenSolver<MatrixXd> solver(root * regularised(metric) * root);
  const MatrixXd stretch = solver.eigenvalues().array().pow(2 * beta).matrix().asDiagonal();
  return root.inverse() * solver.eigenvectors() * stretch * solver.eigenvectors().transpose() * root.inverse();
}

struct RowMoments {
  Eigen::VectorXd mean;
  MatrixXd moment;  // uncentred
};
RowMoments moments_of(const std::vector<Eigen::VectorXd>& rows) {
  RowMoments moments{Eigen::VectorXd::Zero(rows[0].size()), MatrixXd::Zero(rows[0].size(), rows[0].size())};
  for (const Eigen::VectorXd& row : rows) {
    moments.mean += row / static_cast<double>(rows.size());
    moments.moment += row * row.transpose() / static_cast<double>(rows.size());
  }
  return moments;
}

// From the rows to A, by the definition: residuals and queries moved to every offset, their moments, the formula.
TEST(Fit, OursIsTheBalancedTransformOfTheRowsAtAllPositions) {
  const SmallModel model{.num_layers = 1, .num_qo_heads = 6, .num_tokens = 330};  // 6 blocks, the last one cut short
  const test::Samples samples = test::samples_of(model, 0);
  ModelStatistics statistics = test::statistics_of(model);
  const int head = 1;
  const auto moved = [&](const float* row, double by, const std::vector<double>& taken_off) {
    std::vector<double> values(row, row + 16);
    for (std::size_t c = 0; c < 16; ++c) values[c] -= taken_off.empty() ? 0 : taken_off[c];
    return test::vector(test::turned(samples.rope, values, by));
  };
  std::vector<double> offsets;
  for (int i = 0; i < 16; ++i) offsets.push_back(64.0 * ((4096 - 384) / 64 * i / 15));
  const auto set = fit(statistics, Method::kOurs);
  const HeadRotation& ours = set->layers.at(0).heads[head];
  std::vector<Eigen::VectorXd> residuals, queries, values;
  for (int t = 0; t < 330; ++t) {
    const std::vector<double> page = test::turned(samples.rope, ours.page_mean, t / 64 * 64);
    const std::ptrdiff_t row = (t * 2 + head) * 16;
    for (const double offset : offsets) {
      if (t >= 64) residuals.push_back(moved(samples.k.data() + row, offset, page));
      for (int g = 0; g < 3; ++g) queries.push_back(moved(samples.q.data() + (t * 6 + head * 3 + g) * 16, offset, {}));
    }
    if (t >= 64) values.push_back(moved(samples.v.data() + row, 0, {}));
  }
  const RowMoments key = moments_of(residuals);
  const RowMoments value = moments_of(values);
  const MatrixXd query_moment = moments_of(queries).moment;
  const MatrixXd output_gram = square(statistics.layers[0].heads[head].output_gram, 16);

  for (const auto& [method, beta] : {std::pair{Method::kOurs, 0.125}, {Method::kOursFast, 0.25}}) {
    SCOPED_TRACE(method_name(method));
    const auto fitted = fit(statistics, method);
    const auto expect_side = [&](const SideRotation& side, const RowMoments& rows, const MatrixXd& metric) {
      const MatrixXd covariance = rows.moment - rows.mean * rows.mean.transpose();
      const MatrixXd expected = balanced_gram(covariance, metric, beta);
      const MatrixXd a = square(side.transform, 16);
      EXPECT_LT(test::largest(a * a.transpose() - expected), kFloatTolerance * test::largest(expected));
      const Eigen::VectorXd mean = a.transpose() * rows.mean;
      EXPECT_LT(test::largest(mean - Eigen::VectorXd::Constant(16, side.offset_center)),
                kFloatTolerance * test::largest(a));
    };
    expect_side(fitted->layers.at(0).heads[head].key, key, query_moment);
    expect_side(fitted->layers.at(0).heads[head].value, value, output_gram);
  }
}

TEST(Fit, TheContextLengthCountsForOurs) {
  const ModelStatistics statistics = test::statistics_of({.num_tokens = 400});
  FitOptions options{.method = Method::kOurs, .max_context = 448};
  const auto one_place = fit_rotation(statistics, options).value();
  options.max_context = 32768;
  const auto many = fit_rotation(statistics, options).value();
  EXPECT_NE(one_place->layers.at(0).heads[0].key.transform, many->layers.at(0).heads[0].key.transform);
  EXPECT_EQ(one_place->layers.at(0).heads[0].value.transform, many->layers.at(0).heads[0].value.transform);
  options.num_offsets = 1;
  const auto no_offsets = fit_rotation(statistics, options).value();
  EXPECT_EQ(one_place->layers.at(0).heads[0].key.transform, no_offsets->layers.at(0).heads[0].key.transform);
}

TEST(Fit, IsTheSameEveryTime) {
  const ModelStatistics statistics = test::statistics_of({.num_tokens = 400});
  EXPECT_EQ(fit(statistics, Method::kOurs)->content_hash, fit(statistics, Method::kOurs)->content_hash);
  EXPECT_NE(fit(statistics, Method::kOurs)->content_hash, fit(statistics, Method::kOursFast)->content_hash);
}

TEST(Fit, WidthsWithoutAPowerOfTwoNeedOurs) {
  const ModelStatistics statistics = test::statistics_of({.num_layers = 1, .head_dim = 80, .num_tokens = 400});
  EXPECT_TRUE(fit_rotation(statistics, {.method = Method::kOurs}));
  EXPECT_TRUE(fit_rotation(statistics, {.method = Method::kNaive}));
  for (const Method method : {Method::kHadamard, Method::kPublished, Method::kPublishedPerHead}) {
    const auto set = fit_rotation(statistics, {.method = method});
    ASSERT_FALSE(set);
    EXPECT_EQ(set.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(set.error().message.find("head_dim 80; use method ours"), std::string::npos) << set.error().message;
  }
}

TEST(Fit, AWidthWithoutAHadamardMatrixIsRefusedByName) {
  const ModelStatistics statistics = test::statistics_of({.num_layers = 1, .head_dim = 208, .num_tokens = 600});
  const auto set = fit_rotation(statistics, {.method = Method::kOurs});
  ASSERT_FALSE(set);
  EXPECT_EQ(set.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(set.error().message.find("head_dim 208"), std::string::npos) << set.error().message;
}

TEST(Fit, TooShortATextIsRefusedWithTheRemedy) {
  const ModelStatistics statistics = test::statistics_of({.num_tokens = 64 + 31});  // head_dim 16 needs 32 keys
  for (const Method method : {Method::kOurs, Method::kPublished}) {
    const auto set = fit_rotation(statistics, {.method = method});
    ASSERT_FALSE(set);
    EXPECT_EQ(set.error().code, ErrorCode::kBadInput);
    EXPECT_NE(set.error().message.find("hold 31 keys"), std::string::npos) << set.error().message;
    EXPECT_NE(set.error().message.find("longer calibration text"), std::string::npos) << set.error().message;
  }
  EXPECT_TRUE(fit_rotation(test::statistics_of({.num_tokens = 64 + 32}), {.method = Method::kOurs}));
}

TEST(Fit, MissingOutputWeightsAreRefusedForOursOnly) {
  ModelStatistics statistics = test::statistics_of({.num_tokens = 400});
  for (auto& [index, layer] : statistics.layers) {
    for (HeadStatistics& head : layer.heads) head.output_gram.clear();
  }
  const auto ours = fit_rotation(statistics, {.method = Method::kOurs});
  ASSERT_FALSE(ours);
  EXPECT_EQ(ours.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(ours.error().message.find("output_gram is empty"), std::string::npos) << ours.error().message;
  EXPECT_TRUE(fit_rotation(statistics, {.method = Method::kPublished}));
}

// Keys without RoPE and with it, all the same and all zero: what is left of them is rounding.
TEST(Fit, ConstantRowsGiveSoundSets) {
  for (const auto& [key, rotary_dim] : {std::pair{0.0F, 16}, {1.1F, 0}, {1.1F, 16}}) {
    SCOPED_TRACE(testing::Message() << "key " << key << ", rotary_dim " << rotary_dim);
    const SmallModel model{.num_layers = 1, .num_tokens = 400};
    auto samples = test::samples_of(model, 0);
    samples.rope = test::rope_of(rotary_dim);
    std::fill(samples.v.begin(), samples.v.end(), 0.75F);
    for (std::size_t i = 0; i < samples.k.size(); i += 16) {
      const std::vector<double> row =
          test::turned(samples.rope, std::vector<double>(16, key), static_cast<double>(i / 32));
      for (std::size_t c = 0; c < 16; ++c) samples.k[i + c] = static_cast<float>(row[c]);
    }
    ModelStatistics statistics = test::statistics_of(model);
    const std::vector<double> gram = statistics.layers[0].heads[0].output_gram;
    statistics.layers[0] = {};
    ASSERT_TRUE(accumulate(statistics.layers[0], samples.block()));
    for (HeadStatistics& head : statistics.layers[0].heads) head.output_gram = gram;
    for (const Method method : {Method::kOurs, Method::kOursFast, Method::kPublished}) {
      const auto set = fit_rotation(statistics, {.method = method});
      ASSERT_TRUE(set) << set.error().message;
      const HeadRotation& head = (*set)->layers.at(0).heads[0];
      for (const SideRotation* side : {&head.key, &head.value}) {
        const MatrixXd product = square(side->transform, 16) * square(side->inverse_transposed, 16).transpose();
        EXPECT_LT(test::largest(product - test::identity(16)), kFloatTolerance);
      }
    }
  }
}

TEST(Fit, BadOptionsAndStatisticsAreRefused) {
  const ModelStatistics statistics = test::statistics_of({.num_tokens = 400});
  const auto refused = [&](FitOptions options) {
    const auto set = fit_rotation(statistics, options);
    return !set && set.error().code == ErrorCode::kInvalidArgument;
  };
  EXPECT_TRUE(refused({.max_context = -1}));
  EXPECT_TRUE(refused({.num_offsets = 0}));
  EXPECT_TRUE(refused({.damping = -0.1}));
  EXPECT_TRUE(refused({.regularizer = std::nan("")}));

  ModelStatistics broken = statistics;
  broken.layers[0].heads[1].block_key_sum.pop_back();
  EXPECT_EQ(fit_rotation(broken, {}).error().code, ErrorCode::kInvalidArgument);
  broken = statistics;
  broken.layers.clear();
  EXPECT_EQ(fit_rotation(broken, {}).error().code, ErrorCode::kInvalidArgument);
  broken = statistics;
  broken.geometry.context_length = 0;
  EXPECT_EQ(fit_rotation(broken, {}).error().code, ErrorCode::kInvalidArgument);
}

TEST(Fit, DataFreeMethodsNeedTheGeometryOnly) {
  ModelGeometry geometry = test::geometry_of({});
  geometry.layers[0].kind = LayerKind::kNoCache;
  for (const Method method : {Method::kNaive, Method::kHadamard}) {
    const auto set = fit_rotation(geometry, method);
    ASSERT_TRUE(set) << set.error().message;
    EXPECT_EQ((*set)->layers.size(), 1U);
  }
  EXPECT_EQ(square(fit_rotation(geometry, Method::kNaive).value()->layers.at(1).heads[0].key.transform, 16),
            test::identity(16));
  const auto ours = fit_rotation(geometry, Method::kOurs);
  ASSERT_FALSE(ours);
  EXPECT_EQ(ours.error().code, ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace oscar
