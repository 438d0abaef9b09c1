#include <fmt/format.h>
#include <ggml.h>
#include <llama.h>

#include <memory>
#include <oscar/version.hpp>

#include "options.hpp"
#include "outcome.hpp"

namespace oscar::tool {

Verb add_version(CLI::App& app) {
  auto format = std::make_shared<Format>(Format::kTable);
  CLI::App* verb = app.add_subcommand("version", "Versions of the program, its formats and llama.cpp");
  add_format_option(*verb, *format);
  return {
      verb, [format]() -> Result<int> {
        if (*format == Format::kJson) {
          print_json(nlohmann::ordered_json{{"oscar", OSCAR_VERSION_STRING},
                                            {"rotation_format", kRotationFormatVersion},
                                            {"statistics_format", kStatisticsFormatVersion},
                                            {"page_layout", kPageLayoutVersion},
                                            {"llama", llama_version()},
                                            {"ggml", ggml_version()},
                                            {"ggml_commit", ggml_commit()}});
        } else {
          print(fmt::format(
              "oscar {}\nrotation file format {}, statistics format {}, page layout {}\nllama.cpp {} (ggml {}, {})\n",
              OSCAR_VERSION_STRING, kRotationFormatVersion, kStatisticsFormatVersion, kPageLayoutVersion,
              llama_version(), ggml_version(), ggml_commit()));
        }
        return kExitDone;
      }};
}

}  // namespace oscar::tool
