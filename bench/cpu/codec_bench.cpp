// Time of a row in the codec, by head_dim, instruction set and number of rows a call (1: decode; 256: prefill).
// Rows are real-sized random ones with a correlated metric, so that the sweeps change about as many codes as on models.
//   codec_bench --benchmark_filter=feedback/avx2

#include <benchmark/benchmark.h>

#include <cmath>
#include <oscar/cache.hpp>
#include <oscar/codec.hpp>
#include <random>
#include <string>
#include <vector>

namespace {

using oscar::Isa;
using oscar::ParameterFormat;
using oscar::Quantizer;

struct Workload {
  int head_dim;
  oscar::SideRotation side;
  std::vector<float> y;
  std::vector<std::uint8_t> codes;
  std::vector<oscar::RowParameters> parameters;

  Workload(int head_dim_, int num_rows)
      : head_dim(head_dim_),
        y(static_cast<std::size_t>(head_dim * num_rows)),
        codes(y.size()),
        parameters(static_cast<std::size_t>(num_rows)) {
    std::mt19937 random(7);
    std::normal_distribution<float> normal;
    const auto size = static_cast<std::size_t>(head_dim);
    for (float& value : y) value = normal(random);
    side.transform.resize(size * size);
    for (float& value : side.transform) value = normal(random) / std::sqrt(static_cast<float>(head_dim));
    side.inverse_transposed = side.transform;
    // M = (I + T) diag (I + T)^T with a falling diagonal, as the fit makes it
    side.feedback.assign(size * size, 0);
    side.metric.assign(size * size, 0);
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t j = i + 1; j < size; ++j) {
        side.feedback[i * size + j] = 0.8f * normal(random) / std::sqrt(static_cast<float>(head_dim));
      }
    }
    for (std::size_t i = 0; i < size; ++i) {
      for (std::size_t j = 0; j < size; ++j) {
        for (std::size_t k = std::max(i, j); k < size; ++k) {
          const float left = i == k ? 1 : side.feedback[i * size + k];
          const float right = j == k ? 1 : side.feedback[j * size + k];
          side.metric[i * size + j] += left * right * (0.3f + static_cast<float>(k) / static_cast<float>(size));
        }
      }
    }
    side.clip_ratio = 0.96f;
  }
  int num_rows() const { return static_cast<int>(parameters.size()); }
};

void report(benchmark::State& state, const Workload& work) {
  state.counters["row"] =
      benchmark::Counter(static_cast<double>(work.num_rows()) * static_cast<double>(state.iterations()),
                         benchmark::Counter::kIsRate | benchmark::Counter::kInvert);
}

void encode(benchmark::State& state, Quantizer quantizer, Isa isa) {
  Workload work(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  for (auto _ : state) {
    oscar::encode_rows(work.side, quantizer, work.head_dim, work.y.data(), work.num_rows(), work.codes.data(),
                       work.parameters.data(), isa);
    benchmark::DoNotOptimize(work.codes.data());
    benchmark::ClobberMemory();
  }
  report(state, work);
}

void transform(benchmark::State& state, Isa isa) {
  Workload work(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  std::vector<float> out(work.y.size());
  for (auto _ : state) {
    oscar::transform_rows(work.side.transform.data(), work.head_dim, work.y.data(), work.num_rows(), out.data(), isa);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  report(state, work);
}

void inverse_transform(benchmark::State& state, Isa isa) {
  Workload work(static_cast<int>(state.range(0)), static_cast<int>(state.range(1)));
  std::vector<float> out(work.y.size());
  for (auto _ : state) {
    oscar::inverse_transform_rows(work.side.inverse_transposed.data(), work.head_dim, work.y.data(), work.num_rows(),
                                  out.data(), isa);
    benchmark::DoNotOptimize(out.data());
    benchmark::ClobberMemory();
  }
  report(state, work);
}

void pack(benchmark::State& state, bool is_key) {
  Workload work(static_cast<int>(state.range(0)), oscar::kPageTokens);
  oscar::encode_rows(work.side, Quantizer::kLeastSquares, work.head_dim, work.y.data(), work.num_rows(),
                     work.codes.data(), work.parameters.data(), Isa::kScalar);
  const oscar::KvSpec spec{.num_kv_heads = 1, .head_dim = work.head_dim};
  std::vector<std::uint8_t> half(spec.half_bytes());
  const auto pack_row = is_key ? oscar::pack_key_row : oscar::pack_value_row;
  for (auto _ : state) {
    for (int slot = 0; slot < oscar::kPageTokens; ++slot) {
      pack_row(half.data(), work.head_dim, ParameterFormat::kLog8, slot, work.codes.data() + slot * work.head_dim,
               work.parameters[static_cast<std::size_t>(slot)]);
    }
    benchmark::DoNotOptimize(half.data());
    benchmark::ClobberMemory();
  }
  report(state, work);
}

void shapes(benchmark::internal::Benchmark* bench) {
  for (const int head_dim : {64, 128, 256}) {
    for (const int num_rows : {1, 256}) bench->Args({head_dim, num_rows});
  }
}

}  // namespace

int main(int argc, char** argv) {
  for (const Isa isa : oscar::supported_isas()) {
    const std::string name(oscar::isa_name(isa));
    const auto add = [&](const std::string& what, auto function) {
      benchmark::RegisterBenchmark((what + "/" + name).c_str(), function)->Apply(shapes);
    };
    add("feedback", [isa](benchmark::State& state) { encode(state, Quantizer::kFeedback, isa); });
    add("least_squares", [isa](benchmark::State& state) { encode(state, Quantizer::kLeastSquares, isa); });
    add("min_max", [isa](benchmark::State& state) { encode(state, Quantizer::kMinMax, isa); });
    add("transform", [isa](benchmark::State& state) { transform(state, isa); });
    add("inverse_transform", [isa](benchmark::State& state) { inverse_transform(state, isa); });
  }
  for (const int head_dim : {64, 128, 256}) {
    benchmark::RegisterBenchmark("pack_key", [](benchmark::State& state) { pack(state, true); })->Args({head_dim});
    benchmark::RegisterBenchmark("pack_value", [](benchmark::State& state) { pack(state, false); })->Args({head_dim});
  }
  benchmark::Initialize(&argc, argv);
  benchmark::RunSpecifiedBenchmarks();
}
