#include "options.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <map>

#include "machine.hpp"

namespace oscar::tool {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxThreads = 1024;
constexpr int kMaxWindow = 1 << 20;

// What the page format of today can do: windows. docs/cli.md has a measured row of each.
struct NamedSetting {
  std::string_view name;
  int sink, recent;
};
constexpr NamedSetting kSettings[] = {{"default", 64, 256}, {"memory", 16, 128}, {"quality", 64, 1024}};

// The number at the front of `text`; `unit` gets what follows it.
std::optional<double> leading_number(const std::string& text, std::string& unit) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || !std::isfinite(value) || value < 0) return std::nullopt;
  unit.assign(end, text.data() + text.size());
  return value;
}

}  // namespace

CLI::Option* add_model_option(CLI::App& verb, std::string& path) {
  return verb.add_option("-m,--model", path, "Model, a GGUF file")->type_name("FILE");
}

CLI::Option* add_format_option(CLI::App& verb, Format& format) {
  static const std::map<std::string, Format> kFormats = {{"table", Format::kTable}, {"json", Format::kJson}};
  return verb.add_option("--format", format, "Output on stdout: table or json")
      ->transform(CLI::CheckedTransformer(kFormats).description(""))
      ->type_name("FORMAT")
      ->default_str("table");
}

CLI::Option* add_threads_option(CLI::App& verb, int& threads) {
  threads = available_cores();
  return verb.add_option("-t,--threads", threads, "Threads")->check(CLI::Range(1, kMaxThreads))->type_name("N");
}

void add_window_options(CLI::App& verb, int& sink, int& recent) {
  CLI::Option* sink_option = verb.add_option("--sink", sink, "First tokens that are also kept in 16 bits")
                                 ->check(CLI::Range(0, kMaxWindow))
                                 ->type_name("TOKENS");
  CLI::Option* recent_option = verb.add_option("--recent", recent, "Latest tokens that are also kept in 16 bits")
                                   ->check(CLI::Range(0, kMaxWindow))
                                   ->type_name("TOKENS");
  std::string names;
  for (const NamedSetting& setting : kSettings) {
    names += fmt::format("{}{} {}+{}", names.empty() ? "" : ", ", setting.name, setting.sink, setting.recent);
  }
  const auto choose = [&sink, &recent](const std::string& name) {
    const auto* setting = std::ranges::find(kSettings, name, &NamedSetting::name);
    sink = setting->sink;
    recent = setting->recent;
  };
  std::vector<std::string> allowed;
  for (const NamedSetting& setting : kSettings) allowed.emplace_back(setting.name);
  verb.add_option_function<std::string>("--setting", choose, "Both windows by name: " + names)
      ->check(CLI::IsMember(allowed).description(""))
      ->excludes(sink_option)
      ->excludes(recent_option)
      ->type_name("NAME")
      ->default_str("");
}

Status parse_windows(const std::string& text, int& sink, int& recent) {
  const char* const end = text.data() + text.size();
  const auto [plus, bad_sink] = std::from_chars(text.data(), end, sink);
  if (bad_sink == std::errc() && plus != end && *plus == '+') {
    const auto [last, bad_recent] = std::from_chars(plus + 1, end, recent);
    if (bad_recent == std::errc() && last == end && sink >= 0 && recent >= 0 && sink <= kMaxWindow &&
        recent <= kMaxWindow)
      return {};
  }
  return make_error(ErrorCode::kInvalidArgument,
                    "'" + text + "' is not a pair of windows; write the sink and the recent tokens as 64+256");
}

CLI::Validator method_validator(const std::vector<std::string>& allowed) {
  return CLI::IsMember(allowed).description("");
}

Result<std::int64_t> parse_bytes(const std::string& text) {
  static const std::map<std::string, double> kUnits = {
      {"", 1},       {"B", 1},        {"K", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30},
      {"T", 0x1p40}, {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40},
      {"kB", 1e3},   {"KB", 1e3},     {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},
  };
  std::string unit;
  const auto value = leading_number(text, unit);
  const auto found = kUnits.find(unit);
  constexpr double kMostBytes = 0x1p60;
  if (!value || found == kUnits.end() || *value * found->second > kMostBytes) {
    return make_error(ErrorCode::kInvalidArgument,
                      "'" + text + "' is not a size; write 8GiB, 500MB or a number of bytes");
  }
  return static_cast<std::int64_t>(*value * found->second);
}

Result<std::int64_t> parse_tokens(const std::string& text) {
  std::string unit;
  const auto value = leading_number(text, unit);
  const bool known = unit.empty() || unit == "K" || unit == "k";
  const double tokens = value.value_or(0) * (unit.empty() ? 1 : 1024);
  constexpr double kMostTokens = 1 << 30;
  if (!value || !known || tokens < 1 || tokens > kMostTokens || tokens != std::floor(tokens)) {
    return make_error(ErrorCode::kInvalidArgument, "'" + text + "' is not a number of tokens; write 4096 or 32K");
  }
  return static_cast<std::int64_t>(tokens);
}

std::string default_rotation_path(const std::string& model_path) {
  fs::path path = model_path;
  if (path.extension() == ".gguf") path.replace_extension();
  return path.string() + ".oscar.safetensors";
}

Result<std::shared_ptr<const RotationSet>> find_rotation(const std::string& flag, const std::string& model_path,
                                                         const ModelGeometry& geometry) {
  const std::string path = flag.empty() ? default_rotation_path(model_path) : flag;
  std::error_code ignored;
  if (flag.empty() && !fs::exists(path, ignored)) {
    return make_error(ErrorCode::kIo,
                      fmt::format("no rotation for {0}: {1} does not exist; make one with 'oscar calibrate -m {0} "
                                  "-f TEXT' or name one with -r",
                                  model_path, path));
  }
  OSCAR_ASSIGN(auto rotation, load_rotation(path));
  if (const Status fits = check_rotation(*rotation, geometry); !fits) {
    return make_error(fits.error().code, path + ": " + fits.error().message);
  }
  return rotation;
}

Status check_writable(const std::string& path) {
  std::error_code ignored;
  const fs::path parent = fs::path(path).parent_path();
  const std::string folder = parent.empty() ? "." : parent.string();
  if (fs::is_directory(path, ignored)) {
    return make_error(ErrorCode::kIo, path + ": is a folder; name a file in it");
  }
  if (!fs::is_directory(folder, ignored)) {
    return make_error(
        ErrorCode::kIo,
        fmt::format("{}: cannot be written: {} is not a folder; create it or choose another path", path, folder));
  }
  if (access(folder.c_str(), W_OK) != 0) {
    return make_error(
        ErrorCode::kIo,
        fmt::format("{}: cannot be written: no permission to write in {}; choose another path", path, folder));
  }
  return {};
}

}  // namespace oscar::tool
