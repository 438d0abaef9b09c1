// Decode speed at depth, one thread, CPU time a token: llama.cpp's own F16 and Q4_0 caches and our 2-bit cache, the
// same model and tokens in one run. Prints a table: ms a token, and the ratio to F16 of the same depth.
//
//   decode_depth MODEL.gguf ROTATION.safetensors [--depths 2048,16384] [--caches f16,q4_0,int2] [--tokens 16]
//   [--threads 2]
//
// --threads fill the cache; the measured tokens run on one. CPU time of the process, so that a busy machine does not
// count.

#include <llama.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <oscar/ggml.hpp>
#include <oscar/isa.hpp>
#include <string>
#include <vector>

namespace {

struct Options {
  std::string model, rotation;
  std::vector<int> depths = {2048, 16384};
  std::vector<std::string> caches = {"f16", "q4_0", "int2"};
  int tokens = 16, threads = 2;
};

[[noreturn]] void fail(const std::string& message) {
  std::fprintf(stderr, "decode_depth: %s\n", message.c_str());
  std::exit(3);
}

std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  }
  return parts;
}

Options parse(int argc, char** argv) {
  Options options;
  std::vector<std::string> positional;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&] {
      if (++i == argc) fail(argument + " wants a value");
      return std::string(argv[i]);
    };
    if (argument == "--depths") {
      options.depths.clear();
      for (const std::string& part : split(value())) options.depths.push_back(std::atoi(part.c_str()));
    } else if (argument == "--caches") {
      options.caches = split(value());
    } else if (argument == "--tokens") {
      options.tokens = std::atoi(value().c_str());
    } else if (argument == "--threads") {
      options.threads = std::atoi(value().c_str());
    } else {
      positional.push_back(argument);
    }
  }
  if (positional.size() != 2) fail("usage: decode_depth MODEL.gguf ROTATION.safetensors [options]");
  options.model = positional[0];
  options.rotation = positional[1];
  std::sort(options.depths.begin(), options.depths.end());
  if (options.depths.empty() || options.depths.front() < 1 || options.tokens < 3)
    fail("depths and tokens must be positive");
  return options;
}

double cpu_ms() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return 1e3 * static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_nsec);
}

void decode(llama_context* context, const std::vector<llama_token>& tokens, int first, int count) {
  llama_batch batch = llama_batch_init(count, 0, 1);
  for (int i = 0; i < count; ++i) {
    batch.token[i] = tokens[static_cast<std::size_t>(first + i)];
    batch.pos[i] = first + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = 0;
    batch.logits[i] = i == count - 1;
  }
  batch.n_tokens = count;
  const int code = llama_decode(context, batch);
  llama_batch_free(batch);
  if (code != 0) fail("llama_decode failed at position " + std::to_string(first) + ": " + std::to_string(code));
  llama_synchronize(context);
}

// Fills sequence 0 from `filled` to `depth` tokens. At most kPrefilled are run through the model: prefill grows with
// the square of the depth (16K by F16 attention: more than an hour of one core). Deeper rows are the first ones again,
// copied and shifted to their positions by llama.cpp itself. The time of a decode step does not depend on the values.
constexpr int kPrefilled = 2048;
void fill(llama_context* context, const std::vector<llama_token>& tokens, int filled, int depth) {
  while (filled < std::min(depth, kPrefilled)) {
    const int count = std::min(512, std::min(depth, kPrefilled) - filled);
    decode(context, tokens, filled, count);
    filled += count;
  }
  if (filled == depth) return;
  llama_memory_t memory = llama_get_memory(context);
  llama_memory_seq_cp(memory, 0, 1, 0, kPrefilled);
  std::vector<std::uint8_t> rows(llama_state_seq_get_size(context, 1));
  rows.resize(llama_state_seq_get_data(context, rows.data(), rows.size(), 1));
  llama_memory_seq_rm(memory, 1, -1, -1);
  while (filled < depth) {
    const int count = std::min(kPrefilled, depth - filled);
    if (llama_state_seq_set_data(context, rows.data(), rows.size(), 1) == 0)
      fail("the cache does not take its own state");
    llama_memory_seq_rm(memory, 1, count, -1);
    llama_memory_seq_add(memory, 1, 0, -1, filled);
    llama_memory_seq_cp(memory, 1, 0, -1, -1);
    llama_memory_seq_rm(memory, 1, -1, -1);
    filled += count;
  }
}

// ms a token at each depth.
//
// F16 leaves its state at each depth in `states`; the 2-bit cache is filled from there, which encodes every row again.
using States = std::map<int, std::vector<std::uint8_t>>;
std::map<int, double> measure(llama_model* model, const std::string& cache, const std::vector<llama_token>& tokens,
                              const Options& options, const std::shared_ptr<const oscar::RotationSet>& rotation,
                              States& states) {
  llama_context_params params = llama_context_default_params();
  params.n_ctx = static_cast<std::uint32_t>(options.depths.back() + options.tokens);
  params.n_ctx += kPrefilled;  // room for the copy that fill() shifts
  params.n_seq_max = 2;
  params.kv_unified = true;
  params.n_batch = params.n_ubatch = 512;
  params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.n_threads = 1;
  params.n_threads_batch = options.threads;
  params.no_perf = true;
  std::shared_ptr<oscar::ggml::Cache> handle;
  if (cache == "int2") {
    oscar::ggml::CacheConfig config;
    config.rotation = rotation;
    config.num_threads = 1;
    auto configured = oscar::ggml::configure(config);
    if (!configured) fail(configured.error().message);
    handle = *configured;
    params.offload_kqv = true;
  } else if (cache == "f16" || cache == "q8_0" || cache == "q4_0") {
    params.offload_kqv = false;
    params.type_k = params.type_v = cache == "f16" ? GGML_TYPE_F16 : cache == "q8_0" ? GGML_TYPE_Q8_0 : GGML_TYPE_Q4_0;
  } else {
    fail("unknown cache " + cache + "; use f16, q8_0, q4_0 or int2");
  }
  llama_context* context = llama_init_from_model(model, params);
  if (context == nullptr) fail("no context for the " + cache + " cache");
  std::map<int, double> result;
  int filled = 0;
  for (const int depth : options.depths) {
    if (const auto state = states.find(depth); cache == "int2" && state != states.end()) {
      llama_memory_clear(llama_get_memory(context), true);
      if (llama_state_seq_set_data(context, state->second.data(), state->second.size(), 0) == 0) {
        fail("the state of the f16 cache cannot be restored into the 2-bit cache");
      }
      filled = depth;
    }
    fill(context, tokens, filled, depth);
    filled = depth;
    if (cache == "f16") {
      std::vector<std::uint8_t>& state = states[depth];
      state.resize(llama_state_seq_get_size(context, 0));
      state.resize(llama_state_seq_get_data(context, state.data(), state.size(), 0));
    }
    std::vector<double> times;
    for (int i = 0; i < options.tokens; ++i) {
      const double start = cpu_ms();
      decode(context, tokens, depth + i, 1);
      times.push_back(cpu_ms() - start);
    }
    std::sort(times.begin(), times.end());
    result[depth] = times[times.size() / 2];
    llama_memory_seq_rm(llama_get_memory(context), 0, depth, -1);
    std::fprintf(stderr, "%s at depth %d: %.2f ms\n", cache.c_str(), depth, result[depth]);
  }
  llama_free(context);
  if (handle) {
    if (const auto status = handle->status(); !status) fail(status.error().message);
  }
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const Options options = parse(argc, argv);
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_backend_init();
  const auto rotation = oscar::load_rotation(options.rotation);
  if (!rotation) fail(rotation.error().message);
  const auto isa = oscar::select_isa();
  if (!isa) fail(isa.error().message);
  llama_model* model = llama_model_load_from_file(options.model.c_str(), oscar::ggml::model_params());
  if (model == nullptr) fail("cannot load " + options.model);
  const int vocabulary = llama_vocab_n_tokens(llama_model_get_vocab(model));
  std::vector<llama_token> tokens;  // any tokens do: the time does not depend on them
  std::uint32_t state = 1;
  for (int i = 0; i < options.depths.back() + options.tokens; ++i) {
    state = state * 1664525u + 1013904223u;
    tokens.push_back(static_cast<llama_token>((state >> 8) % static_cast<std::uint32_t>(std::min(vocabulary, 20000))));
  }
  std::map<std::string, std::map<int, double>> times;
  States states;
  for (const std::string& cache : options.caches) {
    times[cache] = measure(model, cache, tokens, options, *rotation, states);
  }
  std::printf("%s, one thread, CPU time a token, kernels %s\n| cache |",
              options.model.substr(options.model.rfind('/') + 1).c_str(), std::string(oscar::isa_name(*isa)).c_str());
  for (const int depth : options.depths) std::printf(" depth %d: ms | speed against f16 |", depth);
  std::printf("\n| --- |");
  for (std::size_t i = 0; i < options.depths.size(); ++i) std::printf(" --- | --- |");
  std::printf("\n");
  for (const std::string& cache : options.caches) {
    std::printf("| %s |", cache.c_str());
    for (const int depth : options.depths) {
      const bool has_peer = times.contains("f16");
      std::printf(
          " %.2f | %s |", times[cache][depth],
          has_peer ? (std::to_string(times["f16"][depth] / times[cache][depth]).substr(0, 4) + "x").c_str() : "-");
    }
    std::printf("\n");
  }
  llama_model_free(model);
  return 0;
}
