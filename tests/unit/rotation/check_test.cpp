#include <gtest/gtest.h>

#include <oscar/rotation.hpp>

#include "support/statistics.hpp"

namespace oscar {
namespace {

TEST(CheckRotation, AcceptsItsOwnModelUnderAnyName) {
  ModelGeometry geometry = test::geometry_of({});
  const auto set = fit_rotation(geometry, Method::kNaive).value();
  geometry.name = "renamed";
  EXPECT_TRUE(check_rotation(*set, geometry));
}

TEST(CheckRotation, NamesTheFirstDifferenceAndTheRemedy) {
  const ModelGeometry geometry = test::geometry_of({});
  const auto set = fit_rotation(geometry, Method::kNaive).value();
  const auto message = [&](const auto& change) {
    ModelGeometry other = geometry;
    change(other);
    const Status status = check_rotation(*set, other);
    if (status) return std::string("accepted");
    EXPECT_EQ(status.error().code, ErrorCode::kMismatch);
    EXPECT_NE(status.error().message.find("recalibrate for this model: oscar calibrate -m MODEL"), std::string::npos);
    return status.error().message;
  };
  const auto contains = [](const std::string& text, const char* part) { return text.find(part) != std::string::npos; };
  EXPECT_TRUE(contains(message([](ModelGeometry& g) { g.architecture = "llama"; }), "architecture is qwen2"));
  EXPECT_TRUE(contains(message([](ModelGeometry& g) { g.layers.pop_back(); }), "number of layers is 2"));
  EXPECT_TRUE(contains(message([](ModelGeometry& g) { g.layers[1].num_kv_heads = 4; }), "layer 1 is full"));
  EXPECT_TRUE(contains(message([](ModelGeometry& g) { g.layers[1].head_dim = 32; }), "head_dim 32 in the model"));
  EXPECT_TRUE(contains(message([](ModelGeometry& g) { g.layers[0].kind = LayerKind::kNoCache; }), "layer 0"));
  EXPECT_TRUE(contains(message([](ModelGeometry& g) { g.fingerprint = "ff"; }), "fingerprint is 0123"));
}

}  // namespace
}  // namespace oscar
