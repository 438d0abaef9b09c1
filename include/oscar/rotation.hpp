#pragma once
// Stage "rotation": fixed transforms per layer and KV head, fitted from statistics, kept in a rotation file.
// Conventions: rows are vectors on the left. y = x A; a query reads keys as q' = q A^{-T}; x = y A^{-1}.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <oscar/covariance.hpp>
#include <oscar/model.hpp>
#include <oscar/result.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace oscar {

enum class Method {
  kNaive,             // min/max INT2, no rotation (data-free)
  kHadamard,          // Hadamard, clip .96 / .92, min/max (data-free)
  kPublished,         // arXiv 2605.17757: qqt / sst, R H P_br shared by a layer's heads, clip .96 / .92
  kPublishedPerHead,  // the same, one rotation a KV head
  kOursFast,          // page mean, balanced transform beta 1/4, least squares, no sequential work
  kOurs,              // page mean, balanced transform beta 1/8, error feedback and coordinate sweeps
};
std::string_view method_name(
    Method method);  // "naive", "hadamard", "published", "published-per-head", "ours-fast", "ours"
std::optional<Method> parse_method(std::string_view name);

// How a transformed row becomes codes.
enum class Quantizer : std::uint8_t {
  kMinMax,        // published store: sort clip, scale = range / 3, float zero
  kLeastSquares,  // ours-fast
  kFeedback,      // ours
};
// How a row's step and offset are kept.
enum class ParameterFormat : std::uint8_t {
  kFloatPair,  // fp32 scale, fp32 zero: y^ = (code - zero) scale. 8 bytes
  kLog8,       // scale 2^(i8/16), offset c0 + i8 sd/20: y^ = offset + .9957 scale (code - 1.5). 2 bytes
};
Quantizer quantizer_of(Method method);
ParameterFormat parameter_format_of(Method method);

// One side (K or V) of one KV head. D = head_dim, all matrices row-major float32.
struct SideRotation {
  std::vector<float> transform;           // A [D, D]
  std::vector<float> inverse_transposed;  // A^{-T} [D, D]
  std::vector<float> feedback;            // T [D, D], strictly upper; empty unless kFeedback
  std::vector<float> metric;              // M [D, D], damped; empty unless kFeedback
  float offset_center = 0;                // c0, kLog8
  float offset_spread = 1;                // sd, kLog8
  float clip_ratio = 0;                   // kMinMax: quantile of |y| kept; 0 = no clip
};

struct HeadRotation {
  SideRotation key, value;
  std::vector<double> key_mean;   // b [D], pre-RoPE mean of K; empty when no page mean is removed
  std::vector<double> page_mean;  // mu0 [D] = mean over t < 64 of R_t b; empty likewise
  int key_bits = 2, value_bits = 2;
};

struct LayerRotation {
  RopeSpec rope;                    // inv_freq as deployed; `order` is that of the engine the model was sampled in
  std::vector<HeadRotation> heads;  // [num_kv_heads]
};

// Mean key of the block that holds `position`: R_{64 floor(position / 64)} mu0, evaluated in double, rounded to
// float32 [head_dim]. `out` is zero when the head has no page mean.
void block_mean(const HeadRotation& head, const RopeSpec& rope, int head_dim, std::int64_t position, float* out);

// Immutable once made; shared by every cache of a model.
struct RotationSet {
  Method method = Method::kOurs;
  ModelGeometry geometry;
  std::map<int, LayerRotation> layers;  // layers absent here keep their 16-bit cache
  std::int64_t max_context = 0;         // longest position calibrated for, tokens
  std::int64_t num_tokens = 0;
  std::string corpus_hash, producer, composition;
  std::string content_hash;  // 32 hex digits, XXH3-128 of every tensor and of the fields above

  Quantizer quantizer() const { return quantizer_of(method); }
  ParameterFormat parameter_format() const { return parameter_format_of(method); }
};

struct FitOptions {
  Method method = Method::kOurs;
  std::int64_t max_context = 0;  // 0: the model's own context_length; the moments are averaged over 0..max_context
  int num_offsets = 16;          // positions at which the moments are averaged, multiples of 64
  double damping = 0.05;         // of the feedback metric
  double regularizer = 1e-3;     // of C and S, share of the mean eigenvalue
};

// Data-free methods need no statistics.
Result<std::shared_ptr<const RotationSet>> fit_rotation(const ModelGeometry& geometry, Method method);
Result<std::shared_ptr<const RotationSet>> fit_rotation(const ModelStatistics& statistics, const FitOptions& options);

// The rotation file: safetensors with provenance and content hash (docs/format.md). Written whole or not at all.
Status save_rotation(const RotationSet& set, const std::string& path);
// Checks sizes before allocation, finiteness, the hash and the version. Errors: kIo, kBadInput, kUnsupported (newer
// version).
Result<std::shared_ptr<const RotationSet>> load_rotation(const std::string& path);
// kMismatch with the first difference and the remedy when the file was made for another model.
Status check_rotation(const RotationSet& set, const ModelGeometry& geometry);

}  // namespace oscar
