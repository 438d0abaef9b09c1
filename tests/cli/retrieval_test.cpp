// The retrieval task: its text has the length asked for and states every key before its tail; answers add up.

#include "retrieval.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "cli/model_fixture.hpp"

namespace oscar::tool {
namespace {

constexpr int kLength = 1200;
constexpr int kKeys = 8;
constexpr int kTail = 300;

class RetrievalTest : public ModelFixture {
 protected:
  void SetUp() override {
    ModelFixture::SetUp();
    filler_.path = filler_.name = "filler";
    for (int i = 0; i < 3000; ++i) filler_.content += "The quick brown fox jumps over the lazy dog.\n";
  }
  std::string text_of(std::span<const llama_token> tokens) const {
    std::string text(tokens.size() * 32, '\0');
    const int size = llama_detokenize(model_->vocab(), tokens.data(), static_cast<int>(tokens.size()), text.data(),
                                      static_cast<int>(text.size()), false, true);
    EXPECT_GE(size, 0);
    text.resize(static_cast<std::size_t>(std::max(size, 0)));
    return text;
  }
  TextFile filler_;
};

TEST_F(RetrievalTest, EveryKeyIsStatedOnceBeforeTheTailAndAskedFor) {
  const auto task = retrieval_task(*model_, filler_, kKeys, kLength, 0, 2, 0.05);
  ASSERT_TRUE(task) << task.error().message;
  ASSERT_EQ(task->task.prefix.size(), static_cast<std::size_t>(kLength));
  ASSERT_EQ(task->task.continuations.size(), static_cast<std::size_t>(kKeys));
  EXPECT_TRUE(std::ranges::is_sorted(task->depths));
  EXPECT_LT(task->depths.back() * kLength, kLength - kTail);
  const std::string text = text_of(task->task.prefix);
  const std::string tail = text_of(std::span(task->task.prefix).last(kTail));
  EXPECT_EQ(tail.find("pass key"), std::string::npos);
  std::set<std::string> questions;
  for (const Continuation& c : task->task.continuations) {
    ASSERT_FALSE(c.scored.empty());
    const auto asked = static_cast<std::size_t>(c.scored.front()) + 1;
    EXPECT_EQ(static_cast<std::size_t>(c.scored.back()) + 2, c.tokens.size());  // to the answer's last token
    questions.insert(text_of(std::span(c.tokens).first(asked)));
    const std::string answer = text_of(std::span(c.tokens).subspan(asked));
    ASSERT_EQ(answer.size(), 6U) << answer;  // a space and five digits
    const std::size_t stated = text.find(" is" + answer + ". Remember it:" + answer + " is the pass key of ");
    EXPECT_NE(stated, std::string::npos) << answer;
  }
  EXPECT_EQ(questions.size(), static_cast<std::size_t>(kKeys));
}

TEST_F(RetrievalTest, TheSameContextComesAgainAndAnotherIsAnother) {
  const auto first = retrieval_task(*model_, filler_, kKeys, kLength, 0, 2, 0.05);
  const auto again = retrieval_task(*model_, filler_, kKeys, kLength, 0, 2, 0.05);
  const auto other = retrieval_task(*model_, filler_, kKeys, kLength, 1, 2, 0.05);
  ASSERT_TRUE(first && again && other);
  EXPECT_EQ(first->task.prefix, again->task.prefix);
  EXPECT_NE(first->task.prefix, other->task.prefix);
}

TEST_F(RetrievalTest, KeysThatDoNotFitAreRefused) {
  const auto task = retrieval_task(*model_, filler_, kMostKeys, 600, 0, 1, 0.05);
  ASSERT_FALSE(task);
  EXPECT_NE(task.error().message.find("raise --prefix"), std::string::npos) << task.error().message;
}

TEST(AnswersTest, AnAnswerIsExactWhenEveryTokenIs) {
  RetrievalTask task;
  task.depths = {0.1, 0.6, 0.99};
  TokenScores right, half, wrong;
  right.hit = {true, true};
  half.hit = {true, false};
  wrong.hit = {false, false};
  for (TokenScores* scores : {&right, &half, &wrong}) {
    scores->baseline_hit = {true, true};
    scores->nll = {0.5, 1.0};
    scores->baseline_nll = {0.25, 0.25};
  }
  RetrievalScore score;
  add_answers(task, std::vector<TokenScores>{right, half, wrong}, score);
  EXPECT_EQ(score.questions, 3);
  EXPECT_EQ(score.exact, 1);
  EXPECT_EQ(score.baseline_exact, 3);
  EXPECT_DOUBLE_EQ(score.log_p, -1.5);
  EXPECT_DOUBLE_EQ(score.baseline_log_p, -0.5);
  ASSERT_EQ(score.depths.size(), 4U);
  EXPECT_EQ(score.depths[0].exact, 1);
  EXPECT_EQ(score.depths[1].questions, 0);
  EXPECT_EQ(score.depths[2].questions, 1);
  EXPECT_EQ(score.depths[3].questions, 1);
}

}  // namespace
}  // namespace oscar::tool
