#pragma once
// Engine adapter for unmodified llama.cpp: a ggml backend that owns the KV cache buffer in 2-bit pages and serves cache
// writes (SET_ROWS) and attention (FLASH_ATTN_EXT) on it; and the samples of a running model for calibration.
// In-process: load a model with model_params(), configure the device, create a context with offload_kqv = true and
// flash attention on, and look at Cache::status() after creating it and after every failed llama_decode. A context with
// offload_kqv = false keeps llama.cpp's own cache on the same model: the 16-bit baseline (ask for flash attention by
// name there: "auto" finds that it does not run on our device and switches it off). Sequences: each has its own windows
// unless kv_unified is set; then they share one ring of recent rows, results stay right and fewer rows are exact. State
// files hold F16 rows as always: any cache can read them, and ours gets its codes back to the bit. After seq_rm, tokens
// written again read the same rows except those that the removed tokens had pushed out of the ring.

#include <llama.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <oscar/cache.hpp>
#include <oscar/covariance.hpp>
#include <oscar/result.hpp>
#include <oscar/rotation.hpp>
#include <oscar/samples.hpp>
#include <string>
#include <vector>

namespace oscar::ggml {

enum class CacheMode {
  kDelegate,  // an ordinary F16 cache in our buffer, every operation handed to the CPU backend: bit-exact against stock
  kInt2,      // 2-bit pages + F16 sink and recent rows
};

// A method without a page format, for evaluation: every row is kept in 16 bits twice, exact and as the method would
// read it back, and a query reads the exact one inside the windows. One sequence, at positions 0, 1, ...
struct Simulation {
  int group_tokens =
      1;  // tokens, aligned, that the method quantises together; what it has of an unfinished group counts
  // Replaces the rows of tokens first .. first + num_rows - 1 of a layer. k, v [num_rows, num_kv_heads, head_dim],
  // halves order. Whole groups, except the cache's last. Called from several threads at once.
  std::function<void(int layer, std::int32_t first, int num_rows, float* k, float* v)> read_back;
};

struct CacheConfig {
  CacheMode mode = CacheMode::kInt2;
  std::shared_ptr<const RotationSet> rotation =
      nullptr;  // kInt2. Layers it lacks (sliding-window layers) keep an F16 cache, delegated
  int sink = 64;
  int recent = 256;
  bool exact_batch = true;       // tokens of the current batch are read exact; false: full mode, windows only
  bool keep_exact_rows = false;  // evaluation: the ring holds every row, so that exact_all and encode_again work
  bool encode_on_store = true;   // evaluation may encode later, with encode_again
  std::shared_ptr<const Simulation> simulation =
      nullptr;          // evaluation, with keep_exact_rows: read in place of pages, which are not written
  int num_threads = 1;  // the context's n_threads: the work runs on ggml's own threads
};

// Bytes of a live cache. `buffer` is what llama.cpp allocated for it, alignment included.
struct CacheUsage {
  std::int64_t buffer_bytes = 0;
  std::int64_t page_bytes = 0;         // codes and parameters
  std::int64_t window_bytes = 0;       // 16-bit rows beside the pages
  std::int64_t delegated_bytes = 0;    // layers that stay 16 bit
  std::int64_t bookkeeping_bytes = 0;  // positions and tags, outside the buffer
  std::int64_t elements = 0;           // K and V elements of the quantised layers at full context
  int quantized_layers = 0, delegated_layers = 0;
};

// What one context's cache will take, to the byte; buffer_bytes equals llama.cpp's allocation. `context`: tokens of one
// sequence, padded here to 256 cells as llama.cpp does; num_streams: n_seq_max, or 1 with kv_unified. Sliding-window
// layers count in full (swa_full, llama.cpp's default). Errors: kInvalidArgument.
Result<CacheUsage> predict_usage(const ModelGeometry& geometry, const RotationSet* rotation, const CacheConfig& config,
                                 std::int64_t context, int num_streams);

// The live cache of the context created after the configure call. Not thread-safe against llama_decode of that context.
class Cache {
 public:
  virtual ~Cache() = default;
  virtual CacheUsage usage() const = 0;
  virtual Status status() const = 0;  // the first error met while serving (bad rows, unsupported op), sticky
  virtual void set_exact_all(bool exact_all) = 0;  // every key with a kept exact row is read exactly
  virtual void set_exact_batch(bool exact_batch) = 0;
  virtual void set_encode_on_store(bool encode) = 0;
  // Encodes tokens [0, num_tokens) of stream 0 again from their kept exact rows, with this rotation (same parameter
  // format or larger allocation; see config). Needs keep_exact_rows.
  virtual Status encode_again(std::shared_ptr<const RotationSet> rotation, int num_tokens) = 0;
  // Simulates tokens [0, num_tokens) from their kept exact rows, and later ones as they are stored; a later
  // encode_again ends it. Needs keep_exact_rows.
  virtual Status simulate(std::shared_ptr<const Simulation> simulation, int num_tokens) = 0;
  virtual Status set_window(int sink, int recent) = 0;
};

// The device, made once in this process. It is not put into ggml's registry: models loaded with other parameters would
// take it for a GPU and put their layers there.
ggml_backend_dev_t device();

// Empty when the ggml that runs is the one this adapter was tested with; else a sentence that says so.
std::string version_warning();

// llama_model_default_params() with our device selected and every layer's cache on it (weights stay on the CPU).
llama_model_params model_params();

// The next llama_context created on a model of model_params() (offload_kqv = true) gets this cache; one created without
// a configure call gets CacheMode::kDelegate. The returned handle is filled while the context is created; it must
// outlive nothing and may be kept as long as one likes. When llama_init_from_model returns null, status() says whether
// the cache was the reason. Errors: kInvalidArgument (settings out of range, no rotation), kUnsupported.
Result<std::shared_ptr<Cache>> configure(const CacheConfig& config);

// ---- calibration samples ----
struct SampleOptions {
  int num_threads = 1;
  std::function<bool(double fraction)> progress;  // returns false to stop (kInterrupted)
};
// Geometry of each layer as the graph shows it (kinds and windows by the masks, RoPE by the ROPE nodes) refines
// `geometry`; layers without a KV cache become kNoCache. Runs every window (token ids of one text, each from position
// 0) through the model, one ubatch a window, and hands the rows of each full-attention layer to `sink` (sliding-window
// layers keep their 16-bit cache and are not sampled). Nothing is held beyond the current layer. Errors:
// kInvalidArgument (a window no longer than the model's sliding window), kUnsupported (MLA, attention sinks, ALiBi,
// RoPE that is neither pairs nor halves, ...), kInterrupted (progress returned false), kInternal (llama.cpp failed), or
// the sink's own.
Status sample_model(llama_model* model, const std::vector<std::vector<llama_token>>& windows,
                    const SampleOptions& options, ModelGeometry& geometry, const SampleSink& sink);

// sum over the group's heads of W_o^T W_o, for each layer and KV head, from the GGUF file: fills
// HeadStatistics::output_gram. Errors: kIo, kBadInput (truncated), kUnsupported (no attn_output.weight), kMismatch
// (another model's file).
Status add_output_gram(const std::string& gguf_path, ModelStatistics& statistics);

}  // namespace oscar::ggml
