#pragma once
// A real model for tests of the program's parts that ask it for tokens.

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>

#include "cli/run_program.hpp"
#include "llama_session.hpp"

namespace oscar::tool {

class ModelFixture : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string path = test::model_path("smollm2.gguf");
    ASSERT_FALSE(path.empty());
    start_llama(false);
    auto model = Model::load(path);
    ASSERT_TRUE(model) << model.error().message;
    model_ = std::make_unique<Model>(std::move(*model));
  }
  std::unique_ptr<Model> model_;
};

}  // namespace oscar::tool
