#pragma once
// Stage "cache": the bytes of an INT2 page and of the 16-bit window rows, and writing tokens into them. Memory
// belongs to the engine; everything here is a view. docs/format.md gives the layout to the byte.
//
// A page holds kPageTokens tokens of one KV head, in two halves that each stand alone (an engine that keeps K and V
// in different tensors places them apart):
//   key half:   codes [head_dim * 16 bytes], then parameters
//   value half: codes [head_dim * 16 bytes], then parameters
//   parameters: kLog8: scale_code i8 [64], offset_code i8 [64]. kFloatPair: scale f32 [64], zero f32 [64].
// Key codes. Channels form blocks of 64 (the last may have 16, 32 or 48): block u starts at channel 64u and has n =
// width / 16 words a token. Word t (0 <= t < n) of a token holds channel 64u + 4n j + 4t + b in bits 8b + 2j .. 8b + 2j
// + 1 (j, b in 0..3). The word's index in the half: 256 u + ((token / 4) n + t) 4 + token % 4. Value codes. Word t (0
// <= t < 4) of channel d holds token 32 (j / 2) + 8t + 2 (j % 2) + (b % 2) + 4 (b / 2) in bits 8b + 2j .. 8b + 2j + 1.
// The word's index in the half: ((d / 4) 4 + t) 4 + d % 4. Every 16 bytes are one lane's operand of the integer tensor
// cores; 64 bytes are four tokens (channels) for the CPU.

#include <cstddef>
#include <cstdint>
#include <oscar/codec.hpp>
#include <oscar/executor.hpp>
#include <oscar/rotation.hpp>
#include <vector>

namespace oscar {

inline constexpr int kPageTokens = 64;
static_assert(kPageTokens == kBlockTokens);

enum class WindowDtype : std::uint8_t { kBf16, kF16 };  // whichever the engine's own 16-bit cache uses

struct KvSpec {
  int num_kv_heads = 0;
  int head_dim = 0;
  ParameterFormat parameter_format = ParameterFormat::kLog8;
  int sink = 64;     // first tokens that also keep a 16-bit row: position < sink
  int recent = 256;  // latest tokens that also keep one: query i reads key j when i - recent < j <= i
  WindowDtype window_dtype = WindowDtype::kBf16;

  std::size_t half_bytes() const;                       // of one page half of one KV head
  double page_bits_per_element() const;                 // codes and parameters
  double bits_per_element(std::int64_t context) const;  // and the windows' 16-bit rows, which are extra copies
};
Status check_spec(const KvSpec& spec);  // head_dim a multiple of 16 in 16..256, sink and recent >= 0, ...

// Packed row of one token: `slot` is the token's index in its page (0..63). Touches only that slot.
void pack_key_row(std::uint8_t* half, int head_dim, ParameterFormat format, int slot, const std::uint8_t* codes,
                  const RowParameters& parameters);
void pack_value_row(std::uint8_t* half, int head_dim, ParameterFormat format, int slot, const std::uint8_t* codes,
                    const RowParameters& parameters);
void unpack_key_row(const std::uint8_t* half, int head_dim, ParameterFormat format, int slot, std::uint8_t* codes,
                    RowParameters* parameters);
void unpack_value_row(const std::uint8_t* half, int head_dim, ParameterFormat format, int slot, std::uint8_t* codes,
                      RowParameters* parameters);

// Pages of one layer and sequence (an engine's stream). Page p of head h: base + block_table[p] * page_stride_bytes +
// h * head_stride_bytes. Token i of the sequence lies in page i / 64, slot i % 64.
struct PagedHalves {
  std::uint8_t* base = nullptr;
  std::int64_t page_stride_bytes = 0;
  std::int64_t head_stride_bytes = 0;
};
struct PagedLayer {
  KvSpec spec;
  const LayerRotation* rotation = nullptr;
  PagedHalves key, value;
  const std::int32_t* block_table = nullptr;  // [num_pages]; null: page p is block p
  std::uint8_t* half(const PagedHalves& side, int page, int head) const {
    const std::int64_t block = block_table != nullptr ? block_table[page] : page;
    return side.base + block * side.page_stride_bytes + head * side.head_stride_bytes;
  }
};

// Encodes num_rows tokens into their slots. Either side may be null (not stored). Rows are float32 in halves order.
// tokens[i] = index in the sequence (slot), positions[i] = absolute position (page mean). Work is split by head, so
// that two threads never touch one page half. Errors: kBadInput for NaN or infinity (nothing of the call is stored).
struct StoreRows {
  int num_rows = 0;
  const std::int32_t* tokens = nullptr;     // [num_rows]
  const std::int32_t* positions = nullptr;  // [num_rows]
  const float* k = nullptr;                 // [num_rows, num_kv_heads, head_dim]
  const float* v = nullptr;                 // [num_rows, num_kv_heads, head_dim]
};
Status store(const PagedLayer& layer, Quantizer quantizer, const StoreRows& rows, Isa isa, Executor& executor);

// 16-bit rows of consecutive tokens (sink, recent ring, fresh batch), as attention reads them. Borrows.
struct ExactSpan {
  std::int32_t first_token = 0;
  std::int32_t num_tokens = 0;
  const std::uint16_t* k = nullptr;  // row of token first_token + i, head h: k + i * token_stride + h * head_stride
  const std::uint16_t* v = nullptr;
  std::int64_t token_stride = 0;  // elements
  std::int64_t head_stride = 0;   // elements
  bool always = false;            // read exact whatever the window rule says (tokens of the current batch)
};

// Sink rows and a ring of recent rows of one layer and stream, in memory that the engine owns:
// rows [sink + ring_capacity, num_kv_heads, head_dim] for K and for V. ring_capacity >= spec.recent; more lets an
// evaluation keep every exact row. Row of token i: sink row i when i < sink, else ring slot i % ring_capacity. `tags`
// remember which token a row holds, so that a missing copy costs accuracy and never correctness.
class WindowRows {
 public:
  static std::size_t side_bytes(const KvSpec& spec, int ring_capacity);  // K or V
  WindowRows() = default;
  WindowRows(const KvSpec& spec, int ring_capacity, std::uint16_t* k, std::uint16_t* v);
  void clear();  // forgets every row
  // k, v float32 [num_kv_heads, head_dim]; either null = leave that side (engines that write K and V apart)
  void write_key(std::int32_t token, const float* k);
  void write_value(std::int32_t token, const float* v);
  // Maximal spans of tokens in [0, num_tokens) whose K and V rows are both valid, ascending, not overlapping.
  void spans(std::int32_t num_tokens, std::vector<ExactSpan>& out) const;
  bool valid(std::int32_t token) const;

 private:
  std::int64_t row_of(std::int32_t token) const;  // -1: none (a ring of no rows)
  void write(std::int32_t token, const float* rows, std::uint16_t* side, std::vector<std::int32_t>& tags);
  KvSpec spec_;
  int ring_capacity_ = 0;
  std::uint16_t* k_ = nullptr;
  std::uint16_t* v_ = nullptr;
  std::vector<std::int32_t> key_tags_, value_tags_;  // [sink + ring_capacity], -1 = empty
};

}  // namespace oscar
