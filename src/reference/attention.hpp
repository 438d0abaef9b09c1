#pragma once
// Attention in double over the dequantised cache: each key and value is rebuilt in the original space (k^ = y^ A^{-1} +
// page mean, v^ = y^ A^{-1}) and met by the query as it is. The judge of src/attention.

#include <oscar/attention.hpp>
#include <vector>

namespace oscar::reference {

// What one query reads of one token.
enum class KeySource { kInvisible, kPacked, kExact };
KeySource key_source(const AttentionParams& params, int query, int token);

struct AttentionResult {
  std::vector<double> out;  // [num_queries, num_qo_heads, head_dim]
  std::vector<double> lse;  // [num_queries, num_qo_heads]; -inf where nothing is visible
};

AttentionResult attend(const AttentionShape& shape, const PagedLayer& layer, const AttentionParams& params);

// One token of one KV head as the packed page holds it, in the original space. [head_dim]
std::vector<double> packed_key(const PagedLayer& layer, int kv_head, int token, int position);
std::vector<double> packed_value(const PagedLayer& layer, int kv_head, int token);

}  // namespace oscar::reference
