#include <array>
#include <oscar/rotation.hpp>
#include <utility>

namespace oscar {
namespace {

constexpr std::array<std::pair<Method, std::string_view>, 6> kMethodNames{{
    {Method::kNaive, "naive"},
    {Method::kHadamard, "hadamard"},
    {Method::kPublished, "published"},
    {Method::kPublishedPerHead, "published-per-head"},
    {Method::kOursFast, "ours-fast"},
    {Method::kOurs, "ours"},
}};

}  // namespace

std::string_view method_name(Method method) {
  for (const auto& [candidate, name] : kMethodNames) {
    if (candidate == method) return name;
  }
  return "unknown";
}

std::optional<Method> parse_method(std::string_view name) {
  for (const auto& [method, candidate] : kMethodNames) {
    if (candidate == name) return method;
  }
  return std::nullopt;
}

Quantizer quantizer_of(Method method) {
  switch (method) {
    case Method::kOurs: return Quantizer::kFeedback;
    case Method::kOursFast: return Quantizer::kLeastSquares;
    case Method::kNaive:
    case Method::kHadamard:
    case Method::kPublished:
    case Method::kPublishedPerHead: break;
  }
  return Quantizer::kMinMax;
}

ParameterFormat parameter_format_of(Method method) {
  return quantizer_of(method) == Quantizer::kMinMax ? ParameterFormat::kFloatPair : ParameterFormat::kLog8;
}

}  // namespace oscar
