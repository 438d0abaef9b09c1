#pragma once
// llama.cpp as the verbs use it: a model, its tokens, contexts, and its log kept quiet.

#include <llama.h>

#include <memory>
#include <oscar/ggml.hpp>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "text.hpp"

namespace oscar::tool {

// Starts llama.cpp; its log goes to stderr when `verbose`, else only its last error is remembered for messages.
void start_llama(bool verbose);

struct ContextDeleter {
  void operator()(llama_context* context) const { llama_free(context); }
};
using ContextPtr = std::unique_ptr<llama_context, ContextDeleter>;

// A loaded model. The file was checked by read_gguf_geometry first.
class Model {
 public:
  // Ready for both caches: ours (offload_kqv = true after oscar::ggml::configure) and llama.cpp's own (false).
  static Result<Model> load(const std::string& path);

  llama_model* get() const { return model_.get(); }
  const llama_vocab* vocab() const { return llama_model_get_vocab(model_.get()); }
  int vocab_size() const { return llama_vocab_n_tokens(vocab()); }

  // `special`: control tokens in the text are read as such. `add_bos`: the model's BOS comes first where it wants one.
  Result<std::vector<llama_token>> tokenize(std::string_view text, bool special, bool add_bos) const;

  // The first `length` tokens of the text from byte `start` on; the model's BOS comes first where it wants one.
  // kBadInput when fewer follow: `what` names the window in the message, `remedy` what to change.
  Result<std::vector<llama_token>> window(const TextFile& text, std::size_t start, int length, const std::string& what,
                                          const std::string& remedy) const;

 private:
  struct Deleter {
    void operator()(llama_model* model) const { llama_model_free(model); }
  };
  std::unique_ptr<llama_model, Deleter> model_;
  std::string path_;
};

// Which cache a context gets.
enum class CacheKind {
  kStock,      // llama.cpp's own 16-bit cache
  kStockQ8_0,  // llama.cpp's own 8-bit cache
  kStockQ4_0,  // and 4-bit cache
  kOscar,      // that of the last oscar::ggml::configure
};

// A context of one sequence. `max_batch`: tokens of the largest call of decode(), `ubatch`: of one pass through the
// model. Error kInternal when it cannot be made (memory, as a rule).
Result<ContextPtr> make_context(const Model& model, CacheKind kind, int num_tokens, int ubatch, int num_threads);

// Feeds tokens at positions first, first + 1, ...; `wants_logits(i)` says for which of them logits are kept (in this
// order, read with llama_get_logits_ith by index i). kInterrupted after Ctrl-C.
Status decode(llama_context* context, std::span<const llama_token> tokens, int first_position,
              const std::function<bool(int)>& wants_logits);

// Tokens of one pass through the model when nothing else decides.
inline constexpr int kDefaultUbatch = 512;

}  // namespace oscar::tool
