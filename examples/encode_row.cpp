// One key row to 64 two-bit codes and back, with each method that needs no calibration.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <oscar/codec.hpp>
#include <oscar/isa.hpp>
#include <oscar/rotation.hpp>
#include <random>
#include <string>
#include <vector>

constexpr int kHeadDim = 64;

// A layer of 8 query heads and 2 KV heads; read_gguf_geometry() gives that of a real model.
oscar::ModelGeometry small_model() {
  oscar::ModelGeometry geometry;
  geometry.architecture = "example";
  geometry.layers.resize(1);
  geometry.layers[0].num_qo_heads = 8;
  geometry.layers[0].num_kv_heads = 2;
  geometry.layers[0].head_dim = kHeadDim;
  return geometry;
}

// Share of the row's energy that two bits lose.
double relative_error(const oscar::RotationSet& set, const std::vector<float>& x) {
  const oscar::SideRotation& key = set.layers.at(0).heads.at(0).key;
  const oscar::Isa isa = oscar::supported_isas().back();

  std::vector<float> y(kHeadDim), y_hat(kHeadDim), x_hat(kHeadDim);
  std::vector<std::uint8_t> codes(kHeadDim);  // one code, 0..3, a byte; the cache packs four in one
  oscar::RowParameters parameters;
  oscar::transform_rows(key.transform.data(), kHeadDim, x.data(), 1, y.data(), isa);
  oscar::encode_rows(key, set.quantizer(), kHeadDim, y.data(), 1, codes.data(), &parameters, isa);
  oscar::decode_rows(key, set.parameter_format(), kHeadDim, codes.data(), &parameters, 1, y_hat.data());
  oscar::inverse_transform_rows(key.inverse_transposed.data(), kHeadDim, y_hat.data(), 1, x_hat.data(), isa);

  double error = 0, energy = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    error += std::pow(x_hat[i] - x[i], 2);
    energy += std::pow(x[i], 2);
  }
  return error / energy;
}

int main() {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> x(kHeadDim);
  for (float& value : x) value = normal(random);
  x[5] = 20;  // one channel far larger than the others, as keys have

  for (const oscar::Method method : {oscar::Method::kNaive, oscar::Method::kHadamard}) {
    const auto set = oscar::fit_rotation(small_model(), method);
    if (!set) {
      std::fprintf(stderr, "%s\n", set.error().message.c_str());
      return EXIT_FAILURE;
    }
    std::printf("%-10s loses %4.1f %% of the row's energy\n", std::string(oscar::method_name(method)).c_str(),
                100 * relative_error(**set, x));
  }
  return EXIT_SUCCESS;
}
