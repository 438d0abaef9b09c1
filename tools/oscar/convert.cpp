// `oscar convert`: published rotation files (torch, one for keys, one for values) to a rotation file, and back.

#include <fmt/format.h>

#include <cmath>
#include <filesystem>
#include <memory>
#include <span>

#include "io/file.hpp"
#include "options.hpp"
#include "outcome.hpp"
#include "torch/convert.hpp"

namespace oscar::tool {
namespace {

constexpr float kMostClipRatio = 1;

struct ConvertOptions {
  std::vector<std::string> from_torch, to_torch;  // keys, values
  std::string model, output, rotation;
  torch::FromPublishedOptions published;
  Format format = Format::kTable;
};

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  const bool equivalent = std::filesystem::equivalent(a, b, error);
  return equivalent || std::filesystem::path(a).lexically_normal() == std::filesystem::path(b).lexically_normal();
}

Status refuse_same(const std::string& a, const std::string& b) {
  if (!same_file(a, b)) return {};
  return make_error(ErrorCode::kInvalidArgument, fmt::format("{} and {} are one file; name different ones", a, b));
}

// The clip of one side, as typed (.96 is no float32); every head of a converted file has the same.
double clip_ratio(const RotationSet& set, SideRotation HeadRotation::*side) {
  if (set.layers.empty() || set.layers.begin()->second.heads.empty()) return 0;
  constexpr double kDigits = 1e6;
  return std::round((set.layers.begin()->second.heads.front().*side).clip_ratio * kDigits) / kDigits;
}

void report(const ConvertOptions& options, const RotationSet& set, const std::vector<std::string>& files) {
  const double key_clip = clip_ratio(set, &HeadRotation::key);
  const double value_clip = clip_ratio(set, &HeadRotation::value);
  if (options.format == Format::kJson) {
    print_json(nlohmann::ordered_json{{"files", files},
                                      {"model", set.geometry.name},
                                      {"method", method_name(set.method)},
                                      {"composition", set.composition},
                                      {"layers", set.layers.size()},
                                      {"tokens", set.num_tokens},
                                      {"key_clip_ratio", key_clip},
                                      {"value_clip_ratio", value_clip},
                                      {"content_hash", set.content_hash}});
    return;
  }
  print(
      fmt::format("model     {} ({} layers, {} with a rotation)\nmethod    {} ({})\nclip      keys {:.2f}, values "
                  "{:.2f}\nfile      {}\nhash      {}\n",
                  set.geometry.name, set.geometry.layers.size(), set.layers.size(), method_name(set.method),
                  set.composition, key_clip, value_clip, fmt::join(files, " "), set.content_hash));
}

Result<int> convert_from_torch(ConvertOptions options) {
  if (options.model.empty()) {
    return make_error(ErrorCode::kInvalidArgument,
                      "--from-torch needs -m MODEL: the published files do not say which model they belong to");
  }
  if (options.output.empty()) options.output = default_rotation_path(options.model);
  for (const std::string& input : {options.from_torch[0], options.from_torch[1], options.model}) {
    OSCAR_TRY(refuse_same(input, options.output));
  }
  OSCAR_TRY(check_writable(options.output));
  OSCAR_ASSIGN(const ModelGeometry geometry, read_gguf_geometry(options.model));
  OSCAR_ASSIGN(torch::PublishedFile keys, torch::PublishedFile::open(options.from_torch[0]));
  OSCAR_ASSIGN(torch::PublishedFile values, torch::PublishedFile::open(options.from_torch[1]));
  OSCAR_ASSIGN(const auto set, torch::from_published(keys, values, geometry, options.published));
  OSCAR_TRY(save_rotation(*set, options.output));
  report(options, *set, {options.output});
  return kExitDone;
}

// Both files or none.
Status write_pair(const std::vector<std::string>& paths, const torch::PublishedPair& pair) {
  OSCAR_ASSIGN(io::AtomicFile keys, io::AtomicFile::create(paths[0]));
  OSCAR_ASSIGN(io::AtomicFile values, io::AtomicFile::create(paths[1]));
  OSCAR_TRY(keys.write(std::as_bytes(std::span(pair.key_archive))));
  OSCAR_TRY(values.write(std::as_bytes(std::span(pair.value_archive))));
  OSCAR_TRY(keys.flush());
  OSCAR_TRY(values.flush());
  OSCAR_TRY(keys.commit());
  return values.commit();
}

Result<int> convert_to_torch(const ConvertOptions& options) {
  if (options.rotation.empty()) {
    return make_error(ErrorCode::kInvalidArgument, "--to-torch needs -r ROTATION, the file to convert");
  }
  OSCAR_TRY(refuse_same(options.to_torch[0], options.to_torch[1]));
  for (const std::string& output : options.to_torch) {
    OSCAR_TRY(refuse_same(output, options.rotation));
    OSCAR_TRY(check_writable(output));
  }
  OSCAR_ASSIGN(const auto set, load_rotation(options.rotation));
  const Result<torch::PublishedPair> pair = torch::to_published(*set);
  if (!pair) return make_error(pair.error().code, options.rotation + ": " + pair.error().message);
  OSCAR_TRY(write_pair(options.to_torch, *pair));
  report(options, *set, options.to_torch);
  note(fmt::format("the files hold no clip: serve them with {:.2f} for keys and {:.2f} for values",
                   clip_ratio(*set, &HeadRotation::key), clip_ratio(*set, &HeadRotation::value)));
  return kExitDone;
}

Result<int> run_convert(const ConvertOptions& options) {
  if (options.from_torch.empty() == options.to_torch.empty()) {
    return make_error(ErrorCode::kInvalidArgument,
                      "convert needs either --from-torch K.pt V.pt -m MODEL or --to-torch K.pt V.pt -r ROTATION");
  }
  return options.to_torch.empty() ? convert_from_torch(options) : convert_to_torch(options);
}

}  // namespace

Verb add_convert(CLI::App& app) {
  auto options = std::make_shared<ConvertOptions>();
  CLI::App* verb =
      app.add_subcommand("convert", "Turn published rotation files (torch) into a rotation file, and back");
  CLI::Option* from = verb->add_option("--from-torch", options->from_torch, "Published files to read: keys, values")
                          ->expected(2)
                          ->type_name("K.pt V.pt")
                          ->default_str("");
  CLI::Option* to = verb->add_option("--to-torch", options->to_torch, "Published files to write: keys, values")
                        ->expected(2)
                        ->type_name("K.pt V.pt")
                        ->default_str("");
  CLI::Option* model = add_model_option(*verb, options->model)->excludes(to);
  verb->add_option("-o,--output", options->output, "Rotation file (default: beside the model, MODEL.oscar.safetensors)")
      ->type_name("FILE")
      ->needs(model);
  verb->add_option("-r,--rotation", options->rotation, "Rotation file to convert with --to-torch")
      ->type_name("FILE")
      ->excludes(from);
  const auto add_clip = [&](const char* name, float& ratio, const char* text) {
    verb->add_option(name, ratio, text)->check(CLI::Range(0.0F, kMostClipRatio))->type_name("RATIO")->excludes(to);
  };
  add_clip("--key-clip", options->published.key_clip_ratio, "Share of a key row's |y| that is kept; 0: no clip");
  add_clip("--value-clip", options->published.value_clip_ratio, "The same of a value row");
  verb->add_flag("--drop-key-mean", options->published.drop_key_mean,
                 "Convert files of centred keys (k_mean) without the mean");
  add_format_option(*verb, options->format);
  return {verb, [options] { return run_convert(*options); }};
}

}  // namespace oscar::tool
