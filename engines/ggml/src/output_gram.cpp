// The metric of value errors, from the model's weights: an error e in a head's output reaches the residual stream as
// W_o e.

#include <ggml.h>
#include <gguf.h>

#include <Eigen/Core>
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <oscar/ggml.hpp>
#include <string>

namespace oscar::ggml {
namespace {

using FloatRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

struct GgufDeleter {
  void operator()(gguf_context* context) const { gguf_free(context); }
};

constexpr int kRowsPerBlock = 256;  // summed in float, then added in double

// Rows of a weight matrix in the file, decoded to float.
class WeightReader {
 public:
  WeightReader(std::ifstream& file, std::int64_t offset, ggml_type type, std::int64_t width)
      : file_(file), type_(type), width_(width), row_bytes_(ggml_row_size(type, width)) {
    file_.seekg(offset);
  }

  bool read(int num_rows, FloatRows& rows) {
    bytes_.resize(row_bytes_ * static_cast<std::size_t>(num_rows));
    if (!file_.read(bytes_.data(), static_cast<std::streamsize>(bytes_.size()))) return false;
    rows.resize(num_rows, width_);
    const ggml_to_float_t to_float = ggml_get_type_traits(type_)->to_float;
    for (int i = 0; i < num_rows; ++i) {
      const char* row = bytes_.data() + row_bytes_ * static_cast<std::size_t>(i);
      if (type_ == GGML_TYPE_F32) {
        std::copy_n(reinterpret_cast<const float*>(row), width_, rows.row(i).data());
      } else {
        to_float(row, rows.row(i).data(), width_);
      }
    }
    return true;
  }

 private:
  std::ifstream& file_;
  ggml_type type_;
  std::int64_t width_;
  std::size_t row_bytes_;
  std::vector<char> bytes_;
};

}  // namespace

Status add_output_gram(const std::string& gguf_path, ModelStatistics& statistics) {
  const std::unique_ptr<gguf_context, GgufDeleter> header(
      gguf_init_from_file(gguf_path.c_str(), {.no_alloc = true, .ctx = nullptr}));
  std::ifstream file(gguf_path, std::ios::binary);
  if (header == nullptr || !file) {
    return make_error(ErrorCode::kIo, gguf_path + ": cannot be read as a GGUF file; is it the model that was sampled?");
  }
  for (auto& [index, layer] : statistics.layers) {
    const std::string name = "blk." + std::to_string(index) + ".attn_output.weight";
    const std::int64_t id = gguf_find_tensor(header.get(), name.c_str());
    if (id < 0) {
      return make_error(ErrorCode::kUnsupported,
                        gguf_path + ": no tensor '" + name +
                            "'; this model's output projection is not known, calibrate with a method "
                            "that does not need it");
    }
    const LayerGeometry& shape = statistics.geometry.layers.at(index);
    const std::int64_t* ne = gguf_get_tensor_ne(header.get(), id);
    const ggml_type type = gguf_get_tensor_type(header.get(), id);
    const auto width = static_cast<std::int64_t>(shape.num_qo_heads) * shape.head_dim;
    if (ne[0] != width || layer.heads.size() != static_cast<std::size_t>(shape.num_kv_heads)) {
      return make_error(ErrorCode::kMismatch, gguf_path + ": '" + name + "' has " + std::to_string(ne[0]) +
                                                  " inputs, the sampled model has " + std::to_string(width) +
                                                  "; use the GGUF file that was sampled");
    }
    if (type != GGML_TYPE_F32 && ggml_get_type_traits(type)->to_float == nullptr) {
      return make_error(ErrorCode::kUnsupported, gguf_path + ": '" + name + "' has type " + ggml_type_name(type) +
                                                     ", which this ggml cannot decode");
    }

    const int head_dim = shape.head_dim;
    std::vector<Eigen::MatrixXd> grams(layer.heads.size(), Eigen::MatrixXd::Zero(head_dim, head_dim));
    WeightReader reader(
        file, static_cast<std::int64_t>(gguf_get_data_offset(header.get()) + gguf_get_tensor_offset(header.get(), id)),
        type, width);
    FloatRows rows;
    for (std::int64_t first = 0; first < ne[1]; first += kRowsPerBlock) {
      if (!reader.read(static_cast<int>(std::min<std::int64_t>(kRowsPerBlock, ne[1] - first)), rows)) {
        return make_error(ErrorCode::kBadInput, gguf_path + ": the file ends inside '" + name + "'; download it again");
      }
      for (int h = 0; h < shape.num_qo_heads; ++h) {
        const auto head = rows.middleCols(static_cast<Eigen::Index>(h) * head_dim, head_dim);
        const Eigen::MatrixXf gram = head.transpose() * head;
        grams[h / shape.gqa_group()] += gram.cast<double>();
      }
    }
    for (std::size_t h = 0; h < grams.size(); ++h) {
      layer.heads[h].output_gram.assign(grams[h].data(), grams[h].data() + grams[h].size());  // symmetric: either order
    }
  }
  return {};
}

}  // namespace oscar::ggml
