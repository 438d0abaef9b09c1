#pragma once
// Models, tokens and logits for the tests of the llama.cpp adapter.

#include <llama.h>

#include <memory>
#include <string>
#include <vector>

namespace oscar::testing {

struct ContextDeleter {
  void operator()(llama_context* context) const { llama_free(context); }
};
using ContextPtr = std::unique_ptr<llama_context, ContextDeleter>;
using Logits = std::vector<float>;  // [n_vocab]

// Path of `file` in the folder that OSCAR_MODELS names.
std::string model_path(const std::string& file);
// With oscar::ggml::model_params(); loaded once in a process. Null and a test failure when the file is missing.
// llama.cpp's log is silenced.
llama_model* load_model(const std::string& file);

// The first `count` tokens of the tests' passage, beginning-of-text token included.
std::vector<llama_token> passage_tokens(const llama_model* model, int count);

// Flash attention on, an F16 cache, `num_threads` threads.
llama_context_params context_params(int context, int num_threads = 1);
// The same with llama.cpp's own cache.
llama_context_params stock_params(int context, int num_threads = 1);

// Decodes tokens at positions first, first + 1, ... of one sequence and returns the logits of each token.
// An empty result and a test failure when llama_decode fails.
std::vector<Logits> decode(llama_context* context, const std::vector<llama_token>& tokens, int first, int sequence = 0);
// The same for a prompt: the logits of its last token only, which is several times faster on a small model.
Logits prefill(llama_context* context, const std::vector<llama_token>& tokens, int sequence = 0);

// Largest absolute difference of two rows of logits.
double largest_difference(const Logits& a, const Logits& b);
// KL(softmax(reference) || softmax(other)), nats.
double divergence(const Logits& reference, const Logits& other);

}  // namespace oscar::testing
