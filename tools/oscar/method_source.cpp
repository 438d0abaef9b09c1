#include "method_source.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <oscar/isa.hpp>

#include "options.hpp"
#include "predicted_error.hpp"

namespace oscar::tool {
namespace {

constexpr std::string_view kExactMethod = "f16";

// llama.cpp's own quantised caches: bits an element of their blocks of 32 (an fp16 scale each).
struct StockCache {
  std::string_view name;
  CacheKind kind;
  double bits;
};
constexpr StockCache kStockCaches[] = {{"q8_0", CacheKind::kStockQ8_0, 8.5}, {"q4_0", CacheKind::kStockQ4_0, 4.5}};

constexpr Method kProductMethods[] = {
    Method::kNaive, Method::kHadamard, Method::kPublished, Method::kPublishedPerHead, Method::kOursFast, Method::kOurs};

}  // namespace

std::vector<std::string> eval_method_names() {
  std::vector<std::string> names = {std::string(kExactMethod)};
  for (const StockCache& stock : kStockCaches) names.emplace_back(stock.name);
  for (const Method method : kProductMethods) names.emplace_back(method_name(method));
  for (const rivals::Rival& rival : rivals::rivals()) names.emplace_back(rival.name);
  return names;
}

Result<MethodSource> MethodSource::open(const MethodSourceOptions& options, const ModelGeometry& geometry) {
  MethodSource source(options, geometry);
  std::vector<std::string> paths = options.rotations;
  const std::string beside = default_rotation_path(options.model);
  std::error_code ignored;
  if (paths.empty() && options.statistics.empty() && std::filesystem::exists(beside, ignored)) paths.push_back(beside);
  for (const std::string& path : paths) {
    OSCAR_ASSIGN(auto set, find_rotation(path, options.model, geometry));
    if (!source.files_.emplace(set->method, set).second) {
      return make_error(
          ErrorCode::kInvalidArgument,
          fmt::format("two rotation files have the method {}; pass one a method", method_name(set->method)));
    }
  }
  if (!options.statistics.empty()) {
    OSCAR_ASSIGN(source.statistics_, load_statistics(options.statistics));
    if (source.statistics_->geometry.fingerprint != geometry.fingerprint) {
      return make_error(ErrorCode::kMismatch,
                        fmt::format("{} was sampled from another model than {}; sample this one with oscar calibrate "
                                    "--statistics",
                                    options.statistics, options.model));
    }
  }
  return source;
}

Result<std::shared_ptr<const RotationSet>> MethodSource::rotation(Method method) const {
  if (const auto file = files_.find(method); file != files_.end()) return file->second;
  if (method == Method::kNaive || method == Method::kHadamard) return fit_rotation(geometry_, method);
  if (const auto fitted = fitted_.find(method); fitted != fitted_.end()) return fitted->second;
  if (!statistics_) {
    return make_error(
        ErrorCode::kBadInput,
        fmt::format("method {0} needs a rotation file of that method (-r) or --statistics; make them with "
                    "'oscar calibrate -m {1} -f TEXT --method {0} --statistics FILE'",
                    method_name(method), options_.model));
  }
  FitOptions fit;
  fit.method = method;
  fit.max_context = options_.max_context;
  OSCAR_ASSIGN(auto set, fit_rotation(*statistics_, fit));
  return fitted_.emplace(method, std::move(set)).first->second;
}

Result<EvalMethod> MethodSource::simulated(const rivals::Rival& rival) const {
  rivals::RivalInputs inputs;
  inputs.geometry = &geometry_;
  OSCAR_ASSIGN(inputs.isa, select_isa());
  std::string identity;
  if (rival.needs_rotation) {
    OSCAR_ASSIGN(inputs.rotation, rotation(rival.rotation));
    identity = inputs.rotation->content_hash;
  }
  if (rival.name == "ours-mix25") {
    if (!statistics_) {
      return make_error(ErrorCode::kBadInput,
                        fmt::format("method {} needs --statistics too: the calibration text decides which heads get "
                                    "3-bit keys; make them with 'oscar calibrate -m {} -f TEXT --statistics FILE'",
                                    rival.name, options_.model));
    }
    inputs.key_errors = predict_key_errors(*statistics_, *inputs.rotation);
    identity += statistics_->corpus_hash;
  }
  EvalMethod method{.name = std::string(rival.name), .identity = std::move(identity)};
  OSCAR_ASSIGN(method.simulator, rivals::Simulator::make(rival.name, inputs));
  return method;
}

Result<EvalMethod> MethodSource::method(const std::string& name) const {
  if (name == kExactMethod) return EvalMethod{.name = name};
  if (const auto* stock = std::ranges::find(kStockCaches, name, &StockCache::name); stock != std::end(kStockCaches))
    return EvalMethod{.name = name, .cache = stock->kind, .stock_bits = stock->bits};
  if (const rivals::Rival* rival = rivals::find_rival(name); rival != nullptr) return simulated(*rival);
  OSCAR_ASSIGN(auto set, rotation(*parse_method(name)));
  std::string identity = set->content_hash;
  return EvalMethod{.name = name, .rotation = std::move(set), .identity = std::move(identity)};
}

}  // namespace oscar::tool
