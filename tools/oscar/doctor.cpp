// `oscar doctor`: whether this machine, these versions, a model and a rotation file work together.

#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <memory>
#include <oscar/isa.hpp>
#include <oscar/version.hpp>

#include "checks.hpp"
#include "machine.hpp"
#include "options.hpp"

namespace oscar::tool {
namespace {

// Versions of ggml whose behaviour the adapter was tested against; others may work.
constexpr std::array<std::string_view, 1> kTestedGgml = {"0.25.3"};

struct DoctorOptions {
  std::string model, rotation;
  Format format = Format::kTable;
};

Check instruction_set() {
  std::string names;
  for (const Isa isa : supported_isas()) names += (names.empty() ? "" : ", ") + std::string(isa_name(isa));
  const Result<Isa> chosen = select_isa();  // main has refused one that this machine lacks
  if (!chosen) return {"instruction set", names, Verdict::kFailed, chosen.error().message, kExitMachine};
  Check check{"instruction set", fmt::format("{} (of {})", isa_name(*chosen), names), Verdict::kOk, "", kExitMachine};
  if (*chosen == Isa::kScalar) {
    check.verdict = Verdict::kWarning;
    check.remedy = "without AVX2 the 2-bit cache is slow; use a newer CPU or unset OSCAR_ISA";
  }
  return check;
}

Check llama_version_check() {
  Check check{"llama.cpp", fmt::format("{} (ggml {}, {})", llama_version(), ggml_version(), ggml_commit()),
              Verdict::kOk, "", 0};
  if (std::ranges::find(kTestedGgml, std::string_view(ggml_version())) == kTestedGgml.end()) {
    check.verdict = Verdict::kWarning;
    check.remedy = fmt::format("not tested with this version; tested: ggml {}", fmt::join(kTestedGgml, ", "));
  }
  return check;
}

Check model_check(const std::string& path, Result<ModelGeometry>& geometry) {
  geometry = read_gguf_geometry(path);
  if (!geometry) return {"model", path, Verdict::kFailed, geometry.error().message, kExitCheckFailed};
  const auto quantised =
      std::ranges::count_if(geometry->layers, [](const LayerGeometry& l) { return l.kind == LayerKind::kFull; });
  Check check{"model",
              fmt::format("{}, {} layers, {} for the 2-bit cache, {} tokens", geometry->architecture,
                          geometry->layers.size(), quantised, geometry->context_length),
              Verdict::kOk, "", kExitCheckFailed};
  std::error_code ignored;
  const auto file_bytes = static_cast<std::int64_t>(std::filesystem::file_size(path, ignored));
  if (available_memory() > 0 && file_bytes > available_memory()) {
    check.verdict = Verdict::kFailed;
    check.exit_code = kExitMachine;
    check.remedy =
        fmt::format("the model takes {} and {} are free; use a smaller quantisation",
                    bytes_text(static_cast<double>(file_bytes)), bytes_text(static_cast<double>(available_memory())));
  }
  return check;
}

Check rotation_check(const DoctorOptions& options, const Result<ModelGeometry>* geometry) {
  const std::string path = options.rotation.empty() ? default_rotation_path(options.model) : options.rotation;
  const auto rotation = load_rotation(path);
  if (!rotation) return {"rotation", path, Verdict::kFailed, rotation.error().message, kExitCheckFailed};
  Check check{"rotation",
              fmt::format("{}, {} layers, hash {}", method_name((*rotation)->method), (*rotation)->layers.size(),
                          (*rotation)->content_hash),
              Verdict::kOk, "", kExitCheckFailed};
  if (geometry == nullptr || !*geometry) return check;
  if (const Status fits = check_rotation(**rotation, **geometry); !fits) {
    check.verdict = Verdict::kFailed;
    check.remedy = path + ": " + fits.error().message;
  }
  return check;
}

std::vector<Check> run_checks(const DoctorOptions& options) {
  std::vector<Check> checks;
  checks.push_back({"oscar", OSCAR_VERSION_STRING, Verdict::kOk, "", 0});
  checks.push_back(llama_version_check());
  checks.push_back({"processor", cpu_name(), Verdict::kOk, "", 0});
  checks.push_back(instruction_set());
  checks.push_back({"cores", std::to_string(available_cores()), Verdict::kOk, "", 0});
  checks.push_back({"memory",
                    fmt::format("{} free of {}", bytes_text(static_cast<double>(available_memory())),
                                bytes_text(static_cast<double>(total_memory()))),
                    Verdict::kOk, "", 0});
  Result<ModelGeometry> geometry = make_error(ErrorCode::kInvalidArgument, "no model given");
  if (!options.model.empty()) checks.push_back(model_check(options.model, geometry));
  std::error_code ignored;
  const bool beside_model =
      !options.model.empty() && std::filesystem::exists(default_rotation_path(options.model), ignored);
  if (!options.rotation.empty() || beside_model) {
    checks.push_back(rotation_check(options, options.model.empty() ? nullptr : &geometry));
  } else if (geometry) {
    checks.push_back({"rotation", "none beside the model", Verdict::kWarning,
                      fmt::format("make one: oscar calibrate -m {} -f TEXT", options.model), 0});
  }
  return checks;
}

Result<int> run_doctor(const DoctorOptions& options) {
  const std::vector<Check> checks = run_checks(options);
  const int exit_code = exit_code_of(checks);
  if (options.format == Format::kJson) {
    print_json(nlohmann::ordered_json{{"checks", checks_json(checks)}, {"exit_code", exit_code}});
  } else {
    print(checks_text(checks));
  }
  return exit_code;
}

}  // namespace

Verb add_doctor(CLI::App& app) {
  auto options = std::make_shared<DoctorOptions>();
  CLI::App* verb = app.add_subcommand("doctor", "Check this machine, the versions, a model and its rotation file");
  add_model_option(*verb, options->model);
  verb->add_option("-r,--rotation", options->rotation, "Rotation file (default: the one beside the model)")
      ->type_name("FILE");
  add_format_option(*verb, options->format);
  return {verb, [options] { return run_doctor(*options); }};
}

}  // namespace oscar::tool
