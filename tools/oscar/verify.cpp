// `oscar verify`: whether a rotation file is what it says: content hash, finite values, transforms, geometry, and the
// error to expect from it.

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <oscar/covariance.hpp>

#include "checks.hpp"
#include "io/safetensors.hpp"
#include "options.hpp"
#include "predicted_error.hpp"
#include "rotation/transform_check.hpp"

namespace oscar::tool {
namespace {

constexpr const char* kRemedy = "make it again with 'oscar calibrate' or 'oscar convert', or fetch it anew";
// A layer whose cache adds as much energy as the signal has is noise.
constexpr double kMostExpectedError = 1.0;

struct VerifyOptions {
  std::string rotation, model, statistics;
  Format format = Format::kTable;
};

struct SideFinding {
  double residual = 0;       // |A A^-1 - I|
  double orthogonality = 0;  // |A A^T - I|
  double condition = 1;
};

// The worst of a layer's heads.
struct LayerFinding {
  int layer = 0;
  SideFinding key, value;
  std::optional<PredictedError> expected;
};

void add_head(SideFinding& finding, const SideRotation& side, int head_dim) {
  // NaN cannot come: the reader refuses it, and finite float32 values do not overflow in double.
  finding.residual = std::max(finding.residual, residual(side.transform, side.inverse_transposed, head_dim));
  finding.orthogonality = std::max(finding.orthogonality, residual(side.transform, side.transform, head_dim));
  finding.condition = std::max(finding.condition, condition_number(side.transform, head_dim));
}

std::vector<LayerFinding> look_at_layers(const RotationSet& set) {
  std::vector<LayerFinding> findings;
  for (const auto& [index, layer] : set.layers) {
    LayerFinding& finding = findings.emplace_back();
    finding.layer = index;
    const int head_dim = set.geometry.layers[static_cast<std::size_t>(index)].head_dim;
    for (const HeadRotation& head : layer.heads) {
      add_head(finding.key, head.key, head_dim);
      add_head(finding.value, head.value, head_dim);
    }
  }
  return findings;
}

// A rotation is its own inverse transposed; a file of the published method may state another inverse (format 3).
bool has_rotations(const RotationSet& set) {
  return std::ranges::all_of(set.layers, [](const auto& entry) {
    return std::ranges::all_of(entry.second.heads, [](const HeadRotation& head) {
      return head.key.transform == head.key.inverse_transposed && head.value.transform == head.value.inverse_transposed;
    });
  });
}

// The layer and side with the largest `value_of(side)`.
struct Worst {
  double value = 0;
  std::string where;
};
template <typename ValueOf>
Worst worst_of(const std::vector<LayerFinding>& findings, const ValueOf& value_of) {
  Worst worst;
  for (const LayerFinding& finding : findings) {
    for (const auto& [side, name] : {std::pair(&finding.key, "keys"), std::pair(&finding.value, "values")}) {
      const double value = value_of(*side);
      if (!worst.where.empty() && value <= worst.value) continue;
      worst = {value, fmt::format("layer {}, {}", finding.layer, name)};
    }
  }
  return worst;
}

Check limit_check(const std::string& name, const std::string& formula, const Worst& worst) {
  Check check{name, fmt::format("{} at most {:.1e} ({})", formula, worst.value, worst.where), Verdict::kOk, "",
              kExitCheckFailed};
  if (!(worst.value <= kMaxResidual)) {
    check.verdict = Verdict::kFailed;
    check.remedy = fmt::format("the limit is {:.0e}; {}", kMaxResidual, kRemedy);
  }
  return check;
}

void add_transform_checks(const RotationSet& set, const std::vector<LayerFinding>& findings,
                          std::vector<Check>& checks) {
  if (findings.empty()) {
    checks.push_back({"layers", "none", Verdict::kFailed, fmt::format("no cache would be in 2 bits; {}", kRemedy)});
    return;
  }
  if (has_rotations(set)) {
    checks.push_back(limit_check("orthogonality", "|R R^T - I|",
                                 worst_of(findings, [](const SideFinding& side) { return side.orthogonality; })));
    return;
  }
  checks.push_back(limit_check("inverse", "|A A^-1 - I|",
                               worst_of(findings, [](const SideFinding& side) { return side.residual; })));
  const Worst condition = worst_of(findings, [](const SideFinding& side) { return side.condition; });
  checks.push_back(
      {"condition", fmt::format("at most {:.1f} ({})", condition.value, condition.where), Verdict::kOk, ""});
}

// Hash of what the file holds against the one it states.
Result<Check> hash_check(const io::SafetensorsFile& file) {
  OSCAR_ASSIGN(const std::string found, file.content_hash());
  const auto stated = file.metadata().find(std::string(io::kContentHashField));
  if (stated != file.metadata().end() && stated->second == found) return Check{"hash", found, Verdict::kOk, ""};
  const std::string text = stated == file.metadata().end() ? "none stated" : io::quote(stated->second) + " stated";
  return Check{"hash", fmt::format("{}, {}", found, text), Verdict::kFailed,
               fmt::format("the file was changed or damaged after it was made; {}", kRemedy)};
}

Result<Check> model_check(const RotationSet& set, const std::string& path) {
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(path));
  Check check{"model", fmt::format("{}, {} layers", geometry.architecture, geometry.layers.size()), Verdict::kOk, ""};
  if (const Status fits = check_rotation(set, geometry); !fits) {
    check.verdict = Verdict::kFailed;
    check.remedy = path + ": " + fits.error().message;
  }
  return check;
}

Result<Check> statistics_check(const RotationSet& set, const std::string& path, std::vector<LayerFinding>& findings) {
  OSCAR_ASSIGN(const ModelStatistics statistics, load_statistics(path));
  if (statistics.geometry.fingerprint != set.geometry.fingerprint) {
    return Check{"expected error", fmt::format("{} are of another model", path), Verdict::kFailed,
                 fmt::format("its fingerprint is {}, the rotation's {}; name statistics of this model (oscar calibrate "
                             "--statistics)",
                             statistics.geometry.fingerprint, set.geometry.fingerprint)};
  }
  const std::vector<PredictedError> errors = predict_errors(statistics, set);
  Worst worst;
  for (LayerFinding& finding : findings) {
    const auto found = std::ranges::find(errors, finding.layer, &PredictedError::layer);
    if (found == errors.end()) continue;
    finding.expected = *found;
    for (const auto& [value, name] : {std::pair(found->key, "keys"), std::pair(found->value, "values")}) {
      if (!worst.where.empty() && value <= worst.value) continue;
      worst = {value, fmt::format("layer {}, {}", finding.layer, name)};
    }
  }
  if (worst.where.empty()) {
    return Check{"expected error", fmt::format("{} and the rotation file share no layer", path), Verdict::kFailed,
                 "collect statistics again: oscar calibrate --statistics"};
  }
  Check check{"expected error", fmt::format("at most {:.3g} of the signal ({})", worst.value, worst.where),
              Verdict::kOk, ""};
  if (!(worst.value < kMostExpectedError)) {
    check.verdict = Verdict::kFailed;
    check.remedy = fmt::format(
        "from {:.0f} on the cache is noise there; calibrate with --method ours on text like that "
        "which the model will see",
        kMostExpectedError);
  }
  return check;
}

nlohmann::ordered_json layers_json(const std::vector<LayerFinding>& findings) {
  auto json = nlohmann::ordered_json::array();
  for (const LayerFinding& finding : findings) {
    nlohmann::ordered_json row{{"layer", finding.layer}};
    for (const auto& [side, name] : {std::pair(&finding.key, "key"), std::pair(&finding.value, "value")}) {
      row[std::string(name) + "_residual"] = side->residual;
      row[std::string(name) + "_orthogonality"] = side->orthogonality;
      row[std::string(name) + "_condition"] = side->condition;
    }
    if (finding.expected) {
      row["key_error"] = finding.expected->key;
      row["value_error"] = finding.expected->value;
    }
    json.push_back(std::move(row));
  }
  return json;
}

std::string layers_text(const std::vector<LayerFinding>& findings, bool with_errors) {
  std::vector<std::string> headings{"layer", "K residual", "V residual", "K condition", "V condition"};
  if (with_errors) headings.insert(headings.end(), {"K error", "V error"});
  Table table(headings, 1);
  for (const LayerFinding& finding : findings) {
    std::vector<std::string> cells{std::to_string(finding.layer), fmt::format("{:.1e}", finding.key.residual),
                                   fmt::format("{:.1e}", finding.value.residual),
                                   fmt::format("{:.1f}", finding.key.condition),
                                   fmt::format("{:.1f}", finding.value.condition)};
    if (with_errors) {
      cells.push_back(finding.expected ? fmt::format("{:.4f}", finding.expected->key) : "");
      cells.push_back(finding.expected ? fmt::format("{:.4f}", finding.expected->value) : "");
    }
    table.add(std::move(cells));
  }
  return table.text() + "\nresiduals |A A^-1 - I| and conditions: the largest of a layer's heads" +
         (with_errors ? "; errors: expected error energy over signal energy, as attention weighs them\n" : "\n");
}

struct Findings {
  std::vector<Check> checks;
  std::vector<LayerFinding> layers;
  std::string method;  // empty when the file's content could not be used
};

// Errors: a file that cannot be read, or is no rotation file of a known version.
Result<Findings> verify(const VerifyOptions& options) {
  Findings out;
  OSCAR_ASSIGN(const io::SafetensorsFile file, io::SafetensorsFile::open(options.rotation));
  const Result<std::shared_ptr<const RotationSet>> set = load_rotation(options.rotation);
  const bool is_rotation = file.metadata().contains("format") && file.metadata().at("format") == "oscar-rotation";
  if (!set && (!is_rotation || set.error().code != ErrorCode::kBadInput)) return tl::unexpected(set.error());
  OSCAR_ASSIGN(const Check hash, hash_check(file));
  out.checks.push_back(hash);
  if (!set) {
    if (hash.verdict == Verdict::kOk) {  // the content itself
      out.checks.push_back({"content", "cannot be used", Verdict::kFailed, set.error().message});
    }
    return out;
  }
  out.method = method_name((*set)->method);
  out.checks.push_back({"content",
                        fmt::format("{} layers of method {}, all values finite", (*set)->layers.size(), out.method),
                        Verdict::kOk, ""});
  out.layers = look_at_layers(**set);
  add_transform_checks(**set, out.layers, out.checks);
  if (!options.model.empty()) {
    OSCAR_ASSIGN(Check check, model_check(**set, options.model));
    out.checks.push_back(std::move(check));
  }
  if (!options.statistics.empty()) {
    OSCAR_ASSIGN(Check check, statistics_check(**set, options.statistics, out.layers));
    out.checks.push_back(std::move(check));
  }
  return out;
}

Result<int> run_verify(const VerifyOptions& options) {
  OSCAR_ASSIGN(const Findings findings, verify(options));
  const int exit_code = exit_code_of(findings.checks);
  if (options.format == Format::kJson) {
    print_json(nlohmann::ordered_json{{"file", options.rotation},
                                      {"method", findings.method},
                                      {"checks", checks_json(findings.checks)},
                                      {"layers", layers_json(findings.layers)},
                                      {"exit_code", exit_code}});
  } else {
    print(checks_text(findings.checks));
    if (!findings.layers.empty()) print("\n" + layers_text(findings.layers, !options.statistics.empty()));
  }
  return exit_code;
}

}  // namespace

Verb add_verify(CLI::App& app) {
  auto options = std::make_shared<VerifyOptions>();
  CLI::App* verb =
      app.add_subcommand("verify", "Check a rotation file: hash, values, transforms, model, expected error");
  verb->add_option("-r,--rotation", options->rotation, "Rotation file")->type_name("FILE")->required();
  add_model_option(*verb, options->model);
  verb->add_option("--statistics", options->statistics,
                   "Statistics of this model: adds the expected error of each layer")
      ->type_name("FILE");
  add_format_option(*verb, options->format);
  return {verb, [options] { return run_verify(*options); }};
}

}  // namespace oscar::tool
