#pragma once
// The methods of `oscar eval` by name: rotations found or fitted, rivals built.

#include <map>
#include <memory>
#include <optional>
#include <oscar/covariance.hpp>
#include <oscar/rotation.hpp>
#include <string>
#include <vector>

#include "evaluation.hpp"

namespace oscar::tool {

// Every name that MethodSource knows, as the help lists them.
std::vector<std::string> eval_method_names();

struct MethodSourceOptions {
  std::string model;                   // path
  std::vector<std::string> rotations;  // files, one a method; none: the one beside the model, where it is needed
  std::string statistics;              // fits what has no file; may be empty
  std::int64_t max_context = 0;        // to fit for; 0: the model's own
};

class MethodSource {
 public:
  // Errors: a file that cannot be read or belongs to another model, two rotation files of one method.
  static Result<MethodSource> open(const MethodSourceOptions& options, const ModelGeometry& geometry);
  // Error kBadInput when it needs a file that is not there; the message says how to make it.
  Result<EvalMethod> method(const std::string& name) const;

 private:
  MethodSource(const MethodSourceOptions& options, const ModelGeometry& geometry)
      : options_(options), geometry_(geometry) {}
  Result<std::shared_ptr<const RotationSet>> rotation(Method method) const;
  Result<EvalMethod> simulated(const rivals::Rival& rival) const;

  const MethodSourceOptions& options_;
  const ModelGeometry& geometry_;
  std::map<Method, std::shared_ptr<const RotationSet>> files_;
  std::optional<ModelStatistics> statistics_;
  mutable std::map<Method, std::shared_ptr<const RotationSet>> fitted_;  // so that variants of one method share it
};

}  // namespace oscar::tool
