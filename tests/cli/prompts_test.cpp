// Prompts of a JSONL file, through a real model's chat template.

#include "prompts.hpp"

#include <gtest/gtest.h>

#include "cli/model_fixture.hpp"

namespace oscar::tool {
namespace {

class PromptsTest : public ModelFixture {
 protected:
  TextFile file(const std::string& content) const {
    TextFile text;
    text.path = "prompts.jsonl";
    text.content = content;
    return text;
  }
};

TEST_F(PromptsTest, MessagesAndPromptsGoThroughTheModelsTemplate) {
  TextFile text = file(
      "{\"messages\": [{\"role\": \"system\", \"content\": \"Be brief.\"}, {\"role\": \"user\", \"content\": "
      "\"Hi\"}]}\n\n{\"prompt\": \"Why?\"}\n{\"text\": \"plain\"}");
  const Status status = render_prompts(text, *model_);
  ASSERT_TRUE(status) << status.error().message;
  EXPECT_EQ(text.content,
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>user\nWhy?<|im_end|>\nplain\n");
  const auto tokens = model_->window(text, 0, 4, "window", "nothing");
  ASSERT_TRUE(tokens) << tokens.error().message;
  EXPECT_TRUE(llama_vocab_is_control(model_->vocab(), tokens->front()));  // one token, not seven characters
}

TEST_F(PromptsTest, OtherFilesStayAsTheyAre) {
  TextFile text = file("{\"prompt\": \"Why?\"}\n");
  text.path = "prompts.json";
  ASSERT_TRUE(render_prompts(text, *model_));
  EXPECT_EQ(text.content, "{\"prompt\": \"Why?\"}\n");
  EXPECT_FALSE(text.has_control_tokens);
}

TEST_F(PromptsTest, ABadLineIsNamed) {
  for (const char* line : {"nonsense", "[]", "{\"prompt\": 3}", "{\"messages\": []}",
                           "{\"messages\": [{\"content\": \"x\"}]}", "{\"messages\": [\"x\"]}"}) {
    TextFile text = file("{\"prompt\": \"Why?\"}\n" + std::string(line) + "\n");
    const Status status = render_prompts(text, *model_);
    ASSERT_FALSE(status) << line;
    EXPECT_EQ(status.error().code, ErrorCode::kBadInput);
    EXPECT_EQ(status.error().message.find("prompts.jsonl, line 2: "), 0U) << status.error().message;
  }
  TextFile empty = file("\n \n");
  EXPECT_FALSE(render_prompts(empty, *model_));
}

}  // namespace
}  // namespace oscar::tool
