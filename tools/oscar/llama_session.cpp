#include "llama_session.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <limits>

#include "interrupt.hpp"
#include "progress.hpp"

namespace oscar::tool {
namespace {

bool g_verbose = false;
std::string& last_error() {
  static std::string text;
  return text;
}

void on_log(ggml_log_level level, const char* text, void*) {
  if (g_verbose) std::fputs(text, stderr);
  if (level == GGML_LOG_LEVEL_ERROR) {
    last_error() = text;
    std::ranges::replace(last_error(), '\n', ' ');
  }
}

std::string because() {
  std::string reason = last_error();
  while (!reason.empty() && reason.back() == ' ') reason.pop_back();
  return reason.empty() ? "run with -v to see llama.cpp's log" : "llama.cpp says: " + reason;
}

}  // namespace

void start_llama(bool verbose) {
  g_verbose = verbose;
  llama_log_set(on_log, nullptr);
  llama_backend_init();
}

Result<Model> Model::load(const std::string& path) {
  Progress progress("loading the model");
  llama_model_params params = ggml::model_params();
  params.progress_callback = [](float fraction, void* data) {
    static_cast<Progress*>(data)->update(fraction);
    return !interrupted();
  };
  params.progress_callback_user_data = &progress;
  last_error().clear();
  Model model;
  model.path_ = path;
  model.model_.reset(llama_model_load_from_file(path.c_str(), params));
  if (interrupted()) return tl::unexpected(interrupted_error());
  if (model.model_ == nullptr) {
    return make_error(ErrorCode::kBadInput, path + ": llama.cpp cannot load this model; " + because());
  }
  return model;
}

Result<std::vector<llama_token>> Model::tokenize(std::string_view text, bool special, bool add_bos) const {
  if (text.size() > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    return make_error(ErrorCode::kBadInput, "a text of more than 2 GiB cannot be tokenised at once");
  }
  const auto length = static_cast<std::int32_t>(text.size());
  std::vector<llama_token> tokens(text.size() + 8);
  const auto call = [&] {
    return llama_tokenize(vocab(), text.data(), length, tokens.data(), static_cast<std::int32_t>(tokens.size()),
                          add_bos, special);
  };
  std::int32_t count = call();
  if (count < 0 && count != std::numeric_limits<std::int32_t>::min()) {
    tokens.resize(static_cast<std::size_t>(-count));
    count = call();
  }
  if (count < 0)
    return make_error(ErrorCode::kInternal, "llama.cpp cannot tokenise a text of " + std::to_string(length) + " bytes");
  tokens.resize(static_cast<std::size_t>(count));
  return tokens;
}

Result<std::vector<llama_token>> Model::window(const TextFile& text, std::size_t start, int length,
                                               const std::string& what, const std::string& remedy) const {
  const std::string_view rest = std::string_view(text.content).substr(start);
  const auto tokenize_part = [&](std::string_view part) { return tokenize(part, text.has_control_tokens, false); };
  const auto wanted = static_cast<std::size_t>(length);
  std::vector<llama_token> tokens;
  const bool bos = llama_vocab_get_add_bos(vocab()) && llama_vocab_bos(vocab()) != LLAMA_TOKEN_NULL;
  // The piece is doubled until it has enough tokens and some to spare: its own end is not cut where the text's would
  // be.
  constexpr std::size_t kBytesPerToken = 8;
  for (std::size_t piece = wanted * kBytesPerToken;; piece *= 2) {
    std::size_t end = std::min(piece, rest.size());
    while (end < rest.size() && (static_cast<unsigned char>(rest[end]) & 0xC0) == 0x80) ++end;
    OSCAR_ASSIGN(tokens, tokenize_part(rest.substr(0, end)));
    if (bos) tokens.insert(tokens.begin(), llama_vocab_bos(vocab()));
    if (end == rest.size() || tokens.size() > wanted) break;
  }
  if (tokens.size() < wanted) {
    return make_error(ErrorCode::kBadInput,
                      fmt::format("{}: text shorter than one window: {} needs {} tokens, but only {} follow its "
                                  "start at byte {} of {}; pass a longer text or {}",
                                  text.path, what, length, tokens.size(), start, text.content.size(), remedy));
  }
  tokens.resize(wanted);
  return tokens;
}

Result<ContextPtr> make_context(const Model& model, CacheKind kind, int num_tokens, int ubatch, int num_threads) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(num_tokens);
  params.n_ubatch = static_cast<std::uint32_t>(ubatch);
  params.n_batch = static_cast<std::uint32_t>(ubatch);
  params.n_seq_max = 1;
  params.n_threads = num_threads;
  params.n_threads_batch = num_threads;
  params.offload_kqv = kind == CacheKind::kOscar;
  if (kind == CacheKind::kStockQ8_0) params.type_k = params.type_v = GGML_TYPE_Q8_0;
  if (kind == CacheKind::kStockQ4_0) params.type_k = params.type_v = GGML_TYPE_Q4_0;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.abort_callback = [](void*) { return interrupted(); };
  last_error().clear();
  ContextPtr context(llama_init_from_model(model.get(), params));
  if (context == nullptr) {
    return make_error(ErrorCode::kInternal,
                      fmt::format("a context of {} tokens cannot be made (out of memory?); {}", num_tokens, because()));
  }
  return context;
}

Status decode(llama_context* context, std::span<const llama_token> tokens, int first_position,
              const std::function<bool(int)>& wants_logits) {
  llama_batch batch = llama_batch_init(static_cast<std::int32_t>(tokens.size()), 0, 1);
  const std::unique_ptr<llama_batch, void (*)(llama_batch*)> owner(&batch,
                                                                   [](llama_batch* b) { llama_batch_free(*b); });
  batch.n_tokens = static_cast<std::int32_t>(tokens.size());
  for (std::int32_t i = 0; i < batch.n_tokens; ++i) {
    batch.token[i] = tokens[static_cast<std::size_t>(i)];
    batch.pos[i] = first_position + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = static_cast<std::int8_t>(wants_logits(i) ? 1 : 0);
  }
  const std::int32_t status = llama_decode(context, batch);
  if (interrupted()) return tl::unexpected(interrupted_error());
  if (status != 0) {
    return make_error(ErrorCode::kInternal,
                      fmt::format("llama.cpp could not decode {} tokens at position {} (status {}); {}", tokens.size(),
                                  first_position, status, because()));
  }
  return {};
}

}  // namespace oscar::tool
