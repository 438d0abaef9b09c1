#pragma once
// Options that several verbs share, spelt and explained in one place.

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <oscar/result.hpp>
#include <oscar/rotation.hpp>
#include <string>
#include <vector>

#include "table.hpp"

namespace oscar::tool {

// Options before or after the verb.
struct Globals {
  bool verbose = false;
};

// A verb of the program: its part of the command line, and what it does (an exit code, 0 or 1, or an error).
struct Verb {
  CLI::App* app = nullptr;
  std::function<Result<int>()> action;
};

Verb add_calibrate(CLI::App& app, const Globals& globals);
Verb add_run(CLI::App& app, const Globals& globals);
Verb add_eval(CLI::App& app, const Globals& globals);
Verb add_report(CLI::App& app);
Verb add_convert(CLI::App& app);
Verb add_verify(CLI::App& app);
Verb add_inspect(CLI::App& app);
Verb add_size(CLI::App& app);
Verb add_doctor(CLI::App& app);
Verb add_version(CLI::App& app);

CLI::Option* add_model_option(CLI::App& verb, std::string& path);
CLI::Option* add_format_option(CLI::App& verb, Format& format);
CLI::Option* add_threads_option(CLI::App& verb, int& threads);  // default: the cores this process may use
// --sink and --recent, or --setting: a named pair of both.
void add_window_options(CLI::App& verb, int& sink, int& recent);

// "64+256": sink and recent tokens of the 16-bit windows.
Status parse_windows(const std::string& text, int& sink, int& recent);

// Names of a method list, checked against `allowed`. Usage errors are thrown as CLI11 has them.
CLI::Validator method_validator(const std::vector<std::string>& allowed);

// "8GiB", "500MB", "1.5G", "4096": bytes. Units without i are powers of 1000, except the bare letters (llama.cpp's
// habit).
Result<std::int64_t> parse_bytes(const std::string& text);
// "4096", "32K": tokens; K is 1024.
Result<std::int64_t> parse_tokens(const std::string& text);

// "dir/name.gguf" -> "dir/name.oscar.safetensors": where `calibrate` writes and the other verbs look.
std::string default_rotation_path(const std::string& model_path);

// The rotation for a model: `flag` if given, else the file beside the model. Errors: none found (names `oscar
// calibrate`), unreadable, made for another model.
Result<std::shared_ptr<const RotationSet>> find_rotation(const std::string& flag, const std::string& model_path,
                                                         const ModelGeometry& geometry);

// Fails early when `path` cannot be written: its folder is missing, not a folder or closed to this user, or it is
// itself a folder.
Status check_writable(const std::string& path);

}  // namespace oscar::tool
