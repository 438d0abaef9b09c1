#include "plan.hpp"

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

#include "../common/shape_checks.hpp"
#include "geometry.hpp"

namespace oscar::cuda {
Result<DecodePlan> plan_decode(const DecodeShape& shape, int num_sms) {
  const auto bad = [](const std::string& what) { return make_error(ErrorCode::kInvalidArgument, "decode: " + what); };
  OSCAR_TRY(check_head_dim("decode", shape.head_dim));
  if (shape.num_requests < 1 || shape.num_requests > kMaxRequests)
    return bad("num_requests is " + std::to_string(shape.num_requests) + "; use 1 to " + std::to_string(kMaxRequests));
  if (shape.query_length < 1 || shape.query_length > 8)
    return bad("query_length is " + std::to_string(shape.query_length) + "; use 1 to 8, or prefill");
  if (shape.num_kv_heads < 1 || shape.num_qo_heads % shape.num_kv_heads != 0)
    return bad("num_qo_heads " + std::to_string(shape.num_qo_heads) + " is not a multiple of num_kv_heads " +
               std::to_string(shape.num_kv_heads));
  if (shape.max_pages < 1 || shape.max_pages > (1 << 20))
    return bad("max_pages is " + std::to_string(shape.max_pages) + "; give the pages of the longest sequence");
  if (num_sms < 1) return bad("num_sms is " + std::to_string(num_sms));
  const int rows = shape.num_qo_heads / shape.num_kv_heads * shape.query_length;
  DecodePlan plan{};
  plan.column_tiles = rows <= 4 ? 1 : 2;
  plan.row_groups = (rows + 4 * plan.column_tiles - 1) / (4 * plan.column_tiles);
  const auto divisor = [](int n) {
    const auto d = static_cast<std::uint32_t>(n);
    return Divisor{d, d == 1 ? 0 : static_cast<std::uint32_t>(((std::uint64_t{1} << 32) + d - 1) / d)};
  };
  plan.by_requests = divisor(shape.num_requests);
  plan.by_row_groups = divisor(plan.row_groups);
  plan.by_ratio = divisor(shape.num_qo_heads / shape.num_kv_heads);
  plan.num_warps = decode_warps(shape.head_dim, plan.column_tiles);
  plan.num_blocks = num_sms;
  plan.workspace_bytes = (plan.num_blocks * part_bytes(shape.head_dim, plan.column_tiles) + 255) / 256 * 256;
  plan.max_rows = rows_at_once(shape.head_dim, plan.column_tiles);
  plan.schedule_bytes = plan.num_blocks * sizeof(BlockShare) + sizeof(int) * (2 * shape.num_requests + 1);
  plan.shared_bytes = decode_shared_bytes(shape.head_dim, plan.column_tiles);
  return plan;
}

Status check_decode(const DecodeParams& params, const DecodeShape& shape) {
  const auto bad = [](const std::string& what) { return make_error(ErrorCode::kInvalidArgument, "decode: " + what); };
  if (params.window_block <= 0 || params.window_block % kWindowTokens != 0)
    return bad("window_block is " + std::to_string(params.window_block) + "; it must be a multiple of 8");
  if (reinterpret_cast<std::uintptr_t>(params.q) % 16 != 0 || params.q_token_stride % 8 != 0 ||
      params.q_head_stride % 8 != 0)
    return bad("q must be 16-byte aligned and its strides multiples of 8 elements; q_token_stride is " +
               std::to_string(params.q_token_stride) + ", q_head_stride " + std::to_string(params.q_head_stride));
  if (params.window_block > 1 << 15 || shape.num_kv_heads > 1 << 14)
    return bad("window_block is " + std::to_string(params.window_block) + " and num_kv_heads " +
               std::to_string(shape.num_kv_heads) + "; use at most 32768 and 16384");
  if (params.schedule == nullptr)
    return bad(
        "schedule is null; give schedule_bytes of device memory and call oscar_cuda_decode_schedule once a step");
  if (params.sink < 0 || params.recent < params.query_length)
    return bad("sink " + std::to_string(params.sink) + ", recent " + std::to_string(params.recent) +
               ": sink must not be negative and recent at least query_length");
  if (params.rotary_dim < 0 || params.rotary_dim > shape.head_dim || params.rotary_dim % 2 != 0)
    return bad("rotary_dim is " + std::to_string(params.rotary_dim) + "; it must be even and at most head_dim");
  // every request at its longest: the flat list of items is indexed by int
  const std::int64_t window_items = (params.sink + params.recent + params.query_length) / kWindowTokens + 4;
  const std::int64_t query_rows = static_cast<std::int64_t>(shape.num_qo_heads) * shape.query_length;
  const std::int64_t rows = shape.num_requests * (query_rows / 4 + shape.num_kv_heads);
  if (rows * (shape.max_pages + window_items) >= std::int64_t{1} << 31)
    return bad("num_requests " + std::to_string(shape.num_requests) + ", num_qo_heads " +
               std::to_string(shape.num_qo_heads) + " and max_pages " + std::to_string(shape.max_pages) +
               " make 2^31 work items or more; split the batch");
  return {};
}

void fill_matrices(const float* matrices, int num_kv_heads, int head_dim, std::uint8_t* out) {
  const auto d = static_cast<std::size_t>(head_dim);
  for (int head = 0; head < num_kv_heads; ++head, matrices += d * d, out += matrix_bytes(head_dim)) {
    auto* steps = reinterpret_cast<float*>(out + 2 * d * d);
    for (std::size_t output = 0; output < d; ++output) {
      float largest = 0;
      for (std::size_t input = 0; input < d; ++input)
        largest = std::max(largest, std::abs(matrices[input * d + output]));
      const float step = largest > 0 ? largest / 32512.0f : 1.0f;
      steps[output] = step;
      for (std::size_t input = 0; input < d; ++input) {
        const auto fixed = static_cast<int>(std::nearbyint(matrices[input * d + output] / step));
        const int high = (fixed + 128) >> 8;
        // lane 4 (row % 8) + input % 16 / 4 of the tile, word (row / 8) + 2 (input % 32 / 16), byte input % 4
        const std::size_t tile = (output / 16 * (d / 32) + input / 32) * 2, lane = 4 * (output % 8) + input % 16 / 4;
        const std::size_t byte = 16 * lane + 4 * (output % 16 / 8 + 2 * (input % 32 / 16)) + input % 4;
        out[512 * tile + byte] = static_cast<std::uint8_t>(high);
        out[512 * (tile + 1) + byte] = static_cast<std::uint8_t>(fixed - 256 * high);
      }
    }
  }
}

std::size_t page_angle_floats(int head_dim, int max_pages) {
  return (16 + (static_cast<std::size_t>(max_pages) + 15) / 16) * head_dim;
}
namespace {
// FP16 bits of |x| <= 1, to nearest even; x becomes what the rounding left.
std::uint32_t take_half(float& x) {
  const float size = std::abs(x);
  const int exponent = size < 0x1p-14f ? -14 : std::ilogb(size);
  const auto steps =
      static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // of 2^(exponent - 10)
  const std::uint32_t sign = std::signbit(x) ? 0x8000u : 0u;
  x -= std::copysign(std::ldexp(static_cast<float>(steps), exponent - 10), x);
  // a mantissa of 2^11 carries into the exponent, one below 2^10 is a subnormal
  return sign | (static_cast<std::uint32_t>(exponent + 14) * 1024 + steps);
}
}  // namespace

void fill_page_angles(const float* inverse_frequency, int head_dim, int rotary_dim, int max_pages, float* angles) {
  const int pairs = head_dim / 2;
  const auto angle = [&](int page, int pair) {
    const double x = pair < rotary_dim / 2 ? static_cast<double>(inverse_frequency[pair]) * kPageTokens * page : 0;
    return std::pair(static_cast<float>(std::cos(x)), static_cast<float>(std::sin(x)));
  };
  // MMA lane 4 (page % 8) + t holds pairs 16 m + 4 t .. + 3 in steps 2 m (the first two) and 2 m + 1
  auto* operand = reinterpret_cast<std::uint32_t*>(angles);
  for (int page = 0; page < 16; ++page)
    for (int pair = 0; pair < pairs; ++pair) {
      auto [cosine, sine] = angle(page, pair);
      const int step = pair / 16 * 2 + pair % 4 / 2, lane = 4 * (page % 8) + pair % 16 / 4;
      const int word = (step * 32 + lane) * 4 + page / 8 + 2 * (pair % 2);
      for (int part = 0; part < 2; ++part) {
        const std::uint32_t low = take_half(cosine);
        operand[part * 16 * pairs + word] = low | take_half(sine) << 16;
      }
    }
  angles += 16 * head_dim;
  for (int page = 0; page < max_pages; page += 16)
    for (int pair = 0; pair < pairs; ++pair) {
      const auto [cosine, sine] = angle(page, pair);
      *angles++ = cosine;
      *angles++ = sine;
    }
}

}  // namespace oscar::cuda
