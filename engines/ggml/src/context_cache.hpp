#pragma once
// The live cache of one llama_context: its configuration, its workers, and the KV buffers llama.cpp allocated for it
// (one, or two when the model mixes full and sliding-window layers).

#include <ggml.h>

#include <memory>
#include <mutex>
#include <optional>
#include <oscar/executor.hpp>
#include <oscar/ggml.hpp>
#include <oscar/isa.hpp>
#include <vector>

#include "delegate.hpp"
#include "layout.hpp"

namespace oscar::ggml {

class KvBuffer;

class ContextCache final : public Cache {
 public:
  static Result<std::shared_ptr<ContextCache>> create(const CacheConfig& config);

  CacheUsage usage() const override;
  Status status() const override;
  void set_exact_all(bool exact_all) override { exact_all_ = exact_all; }
  void set_exact_batch(bool exact_batch) override { config_.exact_batch = exact_batch; }
  void set_encode_on_store(bool encode) override { config_.encode_on_store = encode; }
  Status encode_again(std::shared_ptr<const RotationSet> rotation, int num_tokens) override;
  Status simulate(std::shared_ptr<const Simulation> simulation, int num_tokens) override;
  Status set_window(int sink, int recent) override;

  // Keeps the first error.
  void fail(Error error);

  // Layout of a cache tensor; nothing when it stays F16. A tensor that does not fit the rotation is an error of the
  // cache.
  std::optional<LayerLayout> layout_of(const ggml_tensor* tensor);

  const CacheConfig& config() const { return config_; }
  bool exact_all() const { return exact_all_; }
  // Null when pages (or exact rows only) are read.
  const Simulation* simulation() const { return exact_all_ ? nullptr : config_.simulation.get(); }
  int sink() const { return sink_; }
  int recent() const { return recent_; }
  CpuDelegate& delegate() { return *delegate_; }
  Executor& executor() { return *delegate_; }
  Isa isa() const { return isa_; }
  Quantizer quantizer() const { return config_.rotation->quantizer(); }

  void attach(KvBuffer* buffer) { buffers_.push_back(buffer); }
  void detach(KvBuffer* buffer) { std::erase(buffers_, buffer); }

 private:
  explicit ContextCache(CacheConfig config)
      : config_(std::move(config)), sink_(config_.sink), recent_(config_.recent) {}

  CacheConfig config_;
  int sink_;  // as attention reads it; config_ says what is kept
  int recent_;
  bool exact_all_ = false;
  Isa isa_ = Isa::kScalar;
  std::unique_ptr<CpuDelegate> delegate_;
  std::vector<KvBuffer*> buffers_;
  mutable std::mutex error_mutex_;
  std::optional<Error> error_;
};

}  // namespace oscar::ggml
