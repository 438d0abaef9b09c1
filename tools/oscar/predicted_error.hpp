#pragma once
// The error that a rotation should leave, from the statistics it was fitted on: a check before any evaluation.

#include <map>
#include <oscar/covariance.hpp>
#include <oscar/rotation.hpp>
#include <vector>

namespace oscar::tool {

struct PredictedError {
  int layer = 0;
  // Mean over KV heads of the expected error energy over the signal energy, both as attention weighs them: keys by the
  // moment of the queries (signal: keys about their mean, which softmax cancels), values by the output projection.
  double key = 0;
  double value = 0;
};

// One entry a layer that both have.
std::vector<PredictedError> predict_errors(const ModelStatistics& statistics, const RotationSet& set);

// Expected squared error of q . k of each KV head, by layer: not over the signal, so that heads compare by what reaches
// the softmax.
std::map<int, std::vector<double>> predict_key_errors(const ModelStatistics& statistics, const RotationSet& set);

}  // namespace oscar::tool
