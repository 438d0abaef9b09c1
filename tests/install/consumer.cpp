// A user's program: touches code of several stages, so that a symbol missing from the installed library shows.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <oscar/cache.hpp>
#include <oscar/codec.hpp>
#include <oscar/isa.hpp>
#include <oscar/rotation.hpp>
#include <oscar/version.hpp>
#include <vector>

int main() {
  constexpr int kHeadDim = 64;
  constexpr double kLargestError = .5;  // share of the row's energy; two bits after a Hadamard transform lose about .2
  oscar::ModelGeometry geometry;
  geometry.architecture = "llama";
  geometry.fingerprint = "00112233445566778899aabbccddeeff";
  geometry.context_length = 2048;
  oscar::LayerGeometry layer;
  layer.num_qo_heads = 4;
  layer.num_kv_heads = 2;
  layer.head_dim = kHeadDim;
  geometry.layers = {layer};

  const auto rotation = oscar::fit_rotation(geometry, oscar::Method::kHadamard);
  if (!rotation) {
    std::fprintf(stderr, "%s\n", rotation.error().message.c_str());
    return EXIT_FAILURE;
  }
  const oscar::SideRotation& key = (*rotation)->layers.at(0).heads.at(0).key;

  std::vector<float> x(kHeadDim), y(kHeadDim), y_hat(kHeadDim);
  for (std::size_t i = 0; i < kHeadDim; ++i) x[i] = std::sin(static_cast<float>(i * i));
  const oscar::Isa isa = oscar::supported_isas().back();
  std::vector<std::uint8_t> codes(kHeadDim);
  oscar::RowParameters parameters;
  oscar::transform_rows(key.transform.data(), kHeadDim, x.data(), 1, y.data(), isa);
  oscar::encode_rows(key, (*rotation)->quantizer(), kHeadDim, y.data(), 1, codes.data(), &parameters, isa);
  oscar::decode_rows(key, (*rotation)->parameter_format(), kHeadDim, codes.data(), &parameters, 1, y_hat.data());

  double error = 0, norm = 0;
  for (std::size_t i = 0; i < kHeadDim; ++i) {
    error += std::pow(y_hat[i] - y[i], 2);
    norm += std::pow(y[i], 2);
  }
  std::printf("oscar %s on %s: squared error of one row %.3f\n", OSCAR_VERSION_STRING,
              std::string(oscar::isa_name(isa)).c_str(), error / norm);
  return error < kLargestError * norm ? EXIT_SUCCESS : EXIT_FAILURE;
}
