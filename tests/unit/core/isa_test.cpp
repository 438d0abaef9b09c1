#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <oscar/isa.hpp>
#include <string>

namespace oscar {
namespace {

constexpr Isa kAll[] = {Isa::kScalar, Isa::kAvx2, Isa::kAvx512};

// OSCAR_ISA as each test wants it; what the machine's user had comes back afterwards.
class IsaTest : public testing::Test {
 protected:
  void SetUp() override {
    if (const char* value = std::getenv("OSCAR_ISA")) before_ = value;
    unsetenv("OSCAR_ISA");
  }
  void TearDown() override { before_ ? setenv("OSCAR_ISA", before_->c_str(), 1) : unsetenv("OSCAR_ISA"); }
  static void force(std::string_view name) { setenv("OSCAR_ISA", std::string(name).c_str(), 1); }

 private:
  std::optional<std::string> before_;
};

TEST_F(IsaTest, ScalarIsAlwaysSupportedAndListedFirst) {
  ASSERT_FALSE(supported_isas().empty());
  EXPECT_EQ(supported_isas().front(), Isa::kScalar);
  EXPECT_TRUE(isa_supported(Isa::kScalar));
}

TEST_F(IsaTest, TheListHoldsExactlyWhatIsSupportedSlowestFirst) {
  const std::vector<Isa> isas = supported_isas();
  EXPECT_TRUE(std::is_sorted(isas.begin(), isas.end()));
  for (const Isa isa : kAll) {
    EXPECT_EQ(std::count(isas.begin(), isas.end(), isa), isa_supported(isa) ? 1 : 0) << isa_name(isa);
  }
}

TEST_F(IsaTest, TheFastestIsChosenWhenNothingIsForced) {
  EXPECT_EQ(select_isa().value(), supported_isas().back());
  force("");
  EXPECT_EQ(select_isa().value(), supported_isas().back()) << "an empty OSCAR_ISA counts as unset";
}

TEST_F(IsaTest, EveryNameChoosesItsSetOrSaysThatTheMachineLacksIt) {
  for (const Isa isa : kAll) {
    force(isa_name(isa));
    const Result<Isa> chosen = select_isa();
    if (isa_supported(isa)) {
      EXPECT_EQ(chosen.value(), isa);
    } else {
      ASSERT_FALSE(chosen.has_value()) << isa_name(isa);
      EXPECT_EQ(chosen.error().code, ErrorCode::kUnsupported);
      EXPECT_NE(chosen.error().message.find(isa_name(isa)), std::string::npos) << chosen.error().message;
    }
  }
}

TEST_F(IsaTest, AnUnknownNameIsAnErrorThatListsTheKnownOnes) {
  for (const char* name : {"AVX2", "avx", "sse4", "avx2 ", "native"}) {
    force(name);
    const Result<Isa> chosen = select_isa();
    ASSERT_FALSE(chosen.has_value()) << name;
    EXPECT_EQ(chosen.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(chosen.error().message.find(name), std::string::npos) << chosen.error().message;
    for (const Isa isa : kAll) {
      EXPECT_NE(chosen.error().message.find(isa_name(isa)), std::string::npos) << chosen.error().message;
    }
  }
}

}  // namespace
}  // namespace oscar
