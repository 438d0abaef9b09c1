// Writes what the CPU stores for random rotations and rows: the GPU check (bench/cuda/store.py) needs the same bytes.
// usage: store_golden FOLDER. Build: g++ -std=c++20 -O2 -ffp-contract=off -Iinclude -Isrc -Itests -I/usr/include/eigen3
// bench/cuda/store_golden.cpp src/kernels/cuda/store/plan.cpp liboscar.a -lpthread.

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <oscar/executor.hpp>
#include <string>
#include <vector>

#include "kernels/cuda/store/plan.hpp"
#include "support/store_case.hpp"

namespace {

using oscar::test::kStoreHeads, oscar::test::kStorePages, oscar::test::generator;

template <typename T>
void write(const std::string& path, const std::vector<T>& values) {
  std::ofstream out(path, std::ios::binary);
  out.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(values.size() * sizeof(T)));
  if (!out) std::exit(1);
}

void write_width(const std::string& folder, int head_dim) {
  const std::string prefix = folder + "/d" + std::to_string(head_dim) + "_";
  const oscar::LayerRotation layer = oscar::test::random_layer(head_dim);
  for (const bool is_key : {true, false}) {
    std::vector<float> transform, metric, feedback, row_sum, inverse, constants;
    for (const oscar::HeadRotation& head : layer.heads) {
      const oscar::SideRotation& side = is_key ? head.key : head.value;
      const auto tables = oscar::cuda::metric_tables(side.metric.data(), head_dim);
      transform.insert(transform.end(), side.transform.begin(), side.transform.end());
      metric.insert(metric.end(), side.metric.begin(), side.metric.end());
      feedback.insert(feedback.end(), side.feedback.begin(), side.feedback.end());
      row_sum.insert(row_sum.end(), tables.row_sum.begin(), tables.row_sum.end());
      inverse.insert(inverse.end(), tables.inverse_diagonal.begin(), tables.inverse_diagonal.end());
      constants.insert(constants.end(), {side.offset_center, side.offset_spread, side.clip_ratio, tables.total});
    }
    const std::string name = prefix + (is_key ? "key_" : "value_");
    write(name + "transform", transform);
    write(name + "metric", metric);
    write(name + "feedback", feedback);
    write(name + "row_sum", row_sum);
    write(name + "inverse", inverse);
    write(name + "constants", constants);
  }

  for (const bool prefill : {true, false}) {
    const std::string name = prefix + (prefill ? "prefill_" : "decode_");
    const std::vector<oscar::test::StoreToken> tokens = oscar::test::tokens_of(prefill);
    std::vector<std::int32_t> slots, positions;
    std::vector<float> means;  // one row of the table a token keeps the file small
    for (const oscar::test::StoreToken& token : tokens) {
      slots.push_back(token.page < 0 ? -1 : 64 * token.page + token.slot);
      positions.push_back(token.position);
      for (const oscar::HeadRotation& head : layer.heads) {
        std::vector<float> mean(static_cast<std::size_t>(head_dim));
        oscar::block_mean(head, layer.rope, head_dim, token.position, mean.data());
        means.insert(means.end(), mean.begin(), mean.end());
      }
    }
    const std::vector<float> k = oscar::test::random_rows(tokens.size(), head_dim, prefill);
    const std::vector<float> v = oscar::test::random_rows(tokens.size(), head_dim, prefill);
    write(name + "slots", slots);
    write(name + "positions", positions);
    write(name + "means", means);
    write(name + "k", k);
    write(name + "v", v);
    for (const auto quantizer :
         {oscar::Quantizer::kMinMax, oscar::Quantizer::kLeastSquares, oscar::Quantizer::kFeedback}) {
      oscar::PagedLayer pages;
      pages.spec.num_kv_heads = kStoreHeads;
      pages.spec.head_dim = head_dim;
      pages.spec.parameter_format =
          quantizer == oscar::Quantizer::kMinMax ? oscar::ParameterFormat::kFloatPair : oscar::ParameterFormat::kLog8;
      pages.rotation = &layer;
      const std::size_t half = pages.spec.half_bytes();
      std::vector<std::uint8_t> bytes(kStorePages * kStoreHeads * 2 * half);
      for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(generator());
      write(name + "before" + std::to_string(static_cast<int>(quantizer)), bytes);
      const auto stride = static_cast<std::int64_t>(half);
      pages.key = {bytes.data(), 2 * kStoreHeads * stride, 2 * stride};
      pages.value = {bytes.data() + half, 2 * kStoreHeads * stride, 2 * stride};
      for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i].page < 0) continue;
        const std::int32_t token = slots[i], position = positions[i];
        const std::size_t row = i * static_cast<std::size_t>(kStoreHeads * head_dim);
        const oscar::StoreRows one{1, &token, &position, k.data() + row, v.data() + row};
        if (!oscar::store(pages, quantizer, one, oscar::Isa::kScalar, oscar::serial_executor())) std::exit(1);
      }
      write(name + "after" + std::to_string(static_cast<int>(quantizer)), bytes);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: store_golden FOLDER\n");
    return 2;
  }
  for (const int head_dim : {64, 128, 256}) write_width(argv[1], head_dim);
}
