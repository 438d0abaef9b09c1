#pragma once
// One table of codec kernels an instruction set. Each is compiled from codec_body.inl with its own compiler flags, so
// this header stays free of inline code: nothing compiled for AVX2 may be linked into another file.

#include <cstdint>

namespace oscar::cpu {

inline constexpr int kMaxHeadDim = 256;
inline constexpr int kLanes = 8;  // partial sums of a reduction; part of the format (docs/format.md)

// Levels of the two-bit code: (code - 1.5) steps of a row of unit deviation.
inline constexpr float kStep = 0.9957f;
inline constexpr float kLevels[4] = {-1.5f * kStep, -0.5f * kStep, 0.5f * kStep, 1.5f * kStep};

// What the feedback encoder needs of one side, prepared once a call.
struct FeedbackTable {
  int head_dim;
  const float* feedback;                // T [head_dim, head_dim], strictly upper
  const float* metric;                  // M [head_dim, head_dim], symmetric
  float row_sum[kMaxHeadDim];           // M 1
  float inverse_diagonal[kMaxHeadDim];  // 1 / M_ii
  float total;                          // 1 M 1
  float center, spread;                 // c0, sd
};

struct Log8Parameters {
  std::int8_t scale_code;
  std::int8_t offset_code;
};
struct FloatPairParameters {
  float scale;
  float zero;
};

// Rows are contiguous; head_dim is a multiple of 16 up to kMaxHeadDim. Pointers need no alignment.
struct CodecKernels {
  void (*prepare_feedback)(FeedbackTable* table);  // fills row_sum, inverse_diagonal and total
  void (*encode_feedback)(const FeedbackTable* table, const float* y, int num_rows, std::uint8_t* codes,
                          Log8Parameters* parameters);
  Log8Parameters (*encode_least_squares)(int head_dim, float center, float spread, const float* y, std::uint8_t* codes);
  // clip: largest |y| that is kept; infinity for none
  FloatPairParameters (*encode_min_max)(int head_dim, float clip, const float* y, std::uint8_t* codes);
  void (*transform)(const float* matrix, int head_dim, const float* x, int num_rows, float* y);
  void (*inverse_transform)(const float* inverse_transposed, int head_dim, const float* y, int num_rows, float* x);
  void (*to_bf16)(const float* in, std::int64_t num, std::uint16_t* out);  // round to nearest even; NaN stays NaN
  void (*to_f16)(const float* in, std::int64_t num, std::uint16_t* out);   // likewise; beyond the range: infinity
};

extern const CodecKernels kCodecScalar;
#if defined(__x86_64__)
extern const CodecKernels kCodecAvx2;
extern const CodecKernels kCodecAvx512;
#endif

// Scales of kLog8: entry i is 2^((i - 128) / 16) and limits[i] the boundary to the next, 2^((i - 127.5) / 16), each
// rounded to float32 from double. A scale takes the number of limits[0 .. 254] below it as its entry.
struct ScaleTable {
  float values[256];
  float limits[256];
};
extern const ScaleTable kScaleTable;

}  // namespace oscar::cpu
