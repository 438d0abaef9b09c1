#ifndef OSCAR_C_API_H
#define OSCAR_C_API_H
/* C ABI. Plain structs whose first field is their size in bytes (another size, from another version of this header, is
 * refused), raw pointers, the caller's stream and workspace; nothing is allocated or synchronised. Functions return 0,
 * or an oscar::ErrorCode with the text in oscar_last_error() of the same thread. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define OSCAR_API __attribute__((visibility("default")))

OSCAR_API const char* oscar_last_error(void);
OSCAR_API const char* oscar_version(void);

/* ---- CUDA: INT2 decode attention (see src/kernels/cuda/decode/params.hpp for shapes and units) ---- */
typedef struct {
  size_t struct_size;
  int32_t num_requests, query_length, num_qo_heads, num_kv_heads, head_dim;
  int32_t max_pages; /* of 64 tokens, of the longest sequence */
  int32_t num_sms;   /* 0: of the current device */
} oscar_decode_shape;

typedef struct {
  size_t struct_size;
  int32_t sink, recent, sliding_window, rotary_dim;
  float scale, soft_cap;
  const int32_t* seq_lens;
  const void* q; /* bf16 */
  int64_t q_token_stride, q_head_stride;
  const uint8_t* pages;
  const int32_t* block_table;
  int64_t block_table_stride, page_stride_bytes, head_stride_bytes;
  const void *window_k, *window_v; /* bf16 */
  const int32_t* window_table;
  int64_t window_table_stride, window_block_stride, window_token_stride, window_head_stride;
  int32_t window_block;
  const void *key_matrix, *value_matrix; /* see oscar_cuda_decode_matrices */
  const float *page_mean, *key_offset, *value_offset;
  const float* page_angles; /* see oscar_cuda_page_angles */
  void* out;                /* bf16 */
  int64_t out_token_stride, out_head_stride;
  float* lse;
  void* workspace; /* zero before the first launch; every launch leaves it zero */
  void* schedule;  /* see oscar_cuda_decode_schedule */
  /* 1: may overlap the stream's preceding kernel, which then must not write pages, tables or the schedule */
  int32_t dependent;
} oscar_decode_params;

/* page_angles of a model, in host memory: (16 + ceil(max_pages / 16)) head_dim floats, the angles by which RoPE turns a
 * page's mean. inverse_frequency [rotary_dim / 2] as the model's RoPE uses it. */
OSCAR_API int oscar_cuda_page_angles(const float* inverse_frequency, int32_t head_dim, int32_t rotary_dim,
                                     int32_t max_pages, float* angles);
/* key_matrix of A_k^{-T} or value_matrix of A_v^{-1}, [num_kv_heads, head_dim, head_dim] floats of a layer, as decode
 * reads it: 16-bit fixed point. Both in host memory; out null: only *bytes, its size. */
OSCAR_API int oscar_cuda_decode_matrices(const float* matrices, int32_t num_kv_heads, int32_t head_dim, void* out,
                                         size_t* bytes);
OSCAR_API int oscar_cuda_decode_workspace(const oscar_decode_shape* shape, size_t* workspace_bytes,
                                          size_t* schedule_bytes);
/* Writes params->schedule from params->seq_lens, once a step and before its first layer; layers of the same shape and
 * windows share it. Both launches can be captured in one graph: lengths are read on the device. */
OSCAR_API int oscar_cuda_decode_schedule(const oscar_decode_shape* shape, const oscar_decode_params* params,
                                         void* cuda_stream);
OSCAR_API int oscar_cuda_decode(const oscar_decode_shape* shape, const oscar_decode_params* params, void* cuda_stream);

/* ---- CUDA: INT2 store (see src/kernels/cuda/store/params.hpp for shapes and units) ---- */
enum { OSCAR_QUANTIZER_MIN_MAX = 0, OSCAR_QUANTIZER_LEAST_SQUARES = 1, OSCAR_QUANTIZER_FEEDBACK = 2 };

typedef struct {
  size_t struct_size;
  int32_t num_tokens, num_layers, num_kv_heads, head_dim;
  int32_t quantizer; /* OSCAR_QUANTIZER_...: min/max writes float pairs, the others 8-bit parameters */
  /* 0: fast. Matrix products on tensor cores; codes may differ from the CPU's near ties, their metric error by 1 %.
   * 1: codes and parameters equal the CPU's bit for bit, 5 to 10 times slower. head_dim 256 is always exact. */
  int32_t exact;
} oscar_store_shape;

/* K or V of one layer; no struct_size, since arrays of layers lie in device memory. */
typedef struct {
  const void* rows; /* bf16, after RoPE, halves order; null: side not stored */
  uint8_t* pages;
  void* window; /* bf16 or null */
  const float *transform, *feedback, *metric, *row_sum, *inverse_diagonal;
  const float* constants;   /* [num_kv_heads, 4] c0, sd, clip ratio, 1 M 1 */
  const float* block_means; /* [num_blocks, num_kv_heads, head_dim] or null */
} oscar_store_side;
typedef struct {
  oscar_store_side key, value;
} oscar_store_layer;

typedef struct {
  size_t struct_size;
  const int32_t *slot_mapping, *positions, *window_slots; /* [num_tokens]; negative slots are skipped */
  int32_t num_blocks;
  int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
  int64_t page_stride_bytes, head_stride_bytes;
  int64_t window_token_stride, window_head_stride;
  const oscar_store_layer* layer;         /* host memory, read by the call: one layer */
  const oscar_store_layer* device_layers; /* device memory [num_layers], or null: `layer` */
} oscar_store_params;

/* row_sum [head_dim], inverse_diagonal [head_dim] and *total of one head's metric, in the format's order; host memory.
 */
OSCAR_API int oscar_store_metric_tables(const float* metric, int32_t head_dim, float* row_sum, float* inverse_diagonal,
                                        float* total);
OSCAR_API int oscar_cuda_store(const oscar_store_shape* shape, const oscar_store_params* params, void* cuda_stream);

/* ---- CUDA: prefill over the INT2 history (see src/kernels/cuda/prefill/params.hpp for shapes and units) ---- */
typedef struct {
  size_t struct_size;
  int32_t num_requests, num_tokens; /* query tokens of all requests; both are what the launch has, at least 1 request */
  int32_t num_qo_heads, num_kv_heads, head_dim;
  int32_t max_pages; /* of 64 tokens, of the longest history */
  int32_t sink, recent;
} oscar_prefill_shape;

typedef struct {
  size_t struct_size;
  int32_t sliding_window; /* tokens, 0: none */
  float scale, soft_cap;  /* soft_cap 0: none */
  /* [num_requests + 1] first query token of each request; [num_requests] keys before its chunk, which are attended */
  const int32_t *query_start, *history_lens;
  const void* q; /* bf16 */
  int64_t q_token_stride, q_head_stride;
  const uint8_t* pages;
  const int32_t* block_table;
  int64_t block_table_stride, page_stride_bytes, head_stride_bytes;
  const void *window_k, *window_v; /* bf16 */
  const int32_t* window_table;
  int64_t window_table_stride, window_block_stride, window_token_stride, window_head_stride;
  int32_t window_block;
  /* [num_kv_heads, head_dim, head_dim] A_k^-T, A_k, A_v, A_v^-1 */
  const float *key_matrix, *key_transform, *value_transform, *value_matrix;
  const float* block_means; /* [num_blocks, num_kv_heads, head_dim] as the store's, or null */
  int32_t num_blocks;
  const float *key_offset, *value_offset; /* [num_kv_heads, 2] as decode's */
  void* out;                              /* bf16 */
  int64_t out_token_stride, out_head_stride;
  float* lse;      /* [num_tokens, num_qo_heads] natural log */
  void* workspace; /* 1024-byte aligned, any content */
} oscar_prefill_params;

/* Two results over disjoint keys by their log-sum-exp, into `out` and `lse`: this library's and any attention's over
 * the chunk's own keys. */
typedef struct {
  size_t struct_size;
  int32_t num_tokens, num_heads, head_dim;
  void* out;  /* bf16 */
  float* lse; /* [num_tokens, num_heads] natural log */
  int64_t out_token_stride, out_head_stride;
  const void* other;      /* bf16 */
  const float* other_lse; /* natural log; FlashAttention gives [num_heads, num_tokens] */
  int64_t other_token_stride, other_head_stride, other_lse_token_stride, other_lse_head_stride;
} oscar_merge_params;

OSCAR_API int oscar_cuda_prefill_workspace(const oscar_prefill_shape* shape, size_t* bytes);
OSCAR_API int oscar_cuda_prefill(const oscar_prefill_shape* shape, const oscar_prefill_params* params,
                                 void* cuda_stream);
OSCAR_API int oscar_cuda_merge(const oscar_merge_params* params, void* cuda_stream);

#ifdef __cplusplus
}
#endif
#endif
