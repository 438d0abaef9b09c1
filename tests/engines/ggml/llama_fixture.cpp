#include "llama_fixture.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <oscar/ggml.hpp>

namespace oscar::testing {
namespace {

struct ModelDeleter {
  void operator()(llama_model* model) const { llama_model_free(model); }
};

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr ? value : "";
}

std::vector<double> log_softmax(const Logits& logits) {
  const double largest = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - largest);
  const double shift = largest + std::log(sum);
  std::vector<double> result(logits.size());
  for (std::size_t i = 0; i < logits.size(); ++i) result[i] = logits[i] - shift;
  return result;
}

// Logits of the last num_rows tokens.
std::vector<Logits> decode_rows(llama_context* context, const std::vector<llama_token>& tokens, int first, int sequence,
                                int num_rows) {
  const int num_tokens = static_cast<int>(tokens.size());
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(context)));
  const int batch_size = static_cast<int>(llama_n_batch(context));
  llama_batch batch = llama_batch_init(batch_size, 0, 1);
  std::vector<Logits> logits;
  for (int begin = 0; begin < num_tokens; begin += batch_size) {
    batch.n_tokens = std::min(batch_size, num_tokens - begin);
    for (int i = 0; i < batch.n_tokens; ++i) {
      batch.token[i] = tokens[begin + i];
      batch.pos[i] = first + begin + i;
      batch.n_seq_id[i] = 1;
      batch.seq_id[i][0] = sequence;
      batch.logits[i] = begin + i >= num_tokens - num_rows ? 1 : 0;
    }
    if (const int status = llama_decode(context, batch); status != 0) {
      ADD_FAILURE() << "llama_decode returned " << status << " at position " << first + begin;
      logits.clear();
      break;
    }
    for (int i = 0; i < batch.n_tokens; ++i) {
      if (batch.logits[i] == 0) continue;
      const float* row = llama_get_logits_ith(context, i);
      logits.emplace_back(row, row + vocabulary);
    }
  }
  llama_batch_free(batch);
  return logits;
}

}  // namespace

std::string model_path(const std::string& file) { return environment("OSCAR_MODELS") + "/" + file; }

llama_model* load_model(const std::string& file) {
  static std::map<std::string, std::unique_ptr<llama_model, ModelDeleter>> models;
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  const std::string path = model_path(file);
  if (!std::filesystem::exists(path)) {
    ADD_FAILURE() << path << " is missing: run scripts/models, or set OSCAR_MODELS";
    return nullptr;
  }
  auto& model = models[file];
  if (model == nullptr) model.reset(llama_model_load_from_file(path.c_str(), ggml::model_params()));
  EXPECT_NE(model, nullptr) << "llama.cpp cannot load " << path;
  return model.get();
}

std::vector<llama_token> passage_tokens(const llama_model* model, int count) {
  std::ifstream file(environment("OSCAR_ENGINE_TEXT"));
  const std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  std::vector<llama_token> tokens(text.size() + 8);
  const int found = llama_tokenize(llama_model_get_vocab(model), text.data(), static_cast<int>(text.size()),
                                   tokens.data(), static_cast<int>(tokens.size()), true, false);
  if (found < count) {
    ADD_FAILURE() << "the passage has " << found << " tokens, the test needs " << count;
    return {};
  }
  tokens.resize(count);
  return tokens;
}

llama_context_params context_params(int context, int num_threads) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = context;
  params.n_batch = 512;
  params.n_ubatch = 128;
  params.n_seq_max = 1;
  params.n_threads = params.n_threads_batch = num_threads;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.offload_kqv = true;
  params.no_perf = true;
  return params;
}

llama_context_params stock_params(int context, int num_threads) {
  llama_context_params params = context_params(context, num_threads);
  params.offload_kqv = false;
  return params;
}

std::vector<Logits> decode(llama_context* context, const std::vector<llama_token>& tokens, int first, int sequence) {
  return decode_rows(context, tokens, first, sequence, static_cast<int>(tokens.size()));
}

Logits prefill(llama_context* context, const std::vector<llama_token>& tokens, int sequence) {
  std::vector<Logits> rows = decode_rows(context, tokens, 0, sequence, 1);
  return rows.empty() ? Logits() : rows.back();
}

double largest_difference(const Logits& a, const Logits& b) {
  double largest = a.size() == b.size() ? 0 : INFINITY;
  for (std::size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double difference = std::abs(static_cast<double>(a[i]) - b[i]);
    largest = difference <= largest ? largest : difference;  // a NaN stays
  }
  return largest;
}

double divergence(const Logits& reference, const Logits& other) {
  const std::vector<double> p = log_softmax(reference), q = log_softmax(other);
  double sum = 0;
  for (std::size_t i = 0; i < p.size(); ++i) sum += std::exp(p[i]) * (p[i] - q[i]);
  return sum;
}

}  // namespace oscar::testing
