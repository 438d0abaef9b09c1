/* The CUDA library's C ABI from C, without a GPU: the header compiles as C, the library loads, and what cannot work is
 * refused with a message that names the thing. Prints the first difference and exits with 1. */
#include <oscar/c_api.h>
#include <stdio.h>
#include <string.h>

static int failures = 0;

static void expect_refused(const char* what, int status, const char* part) {
  const char* message = oscar_last_error();
  if (status != 0 && strstr(message, part) != NULL) return;
  printf("%s: status %d, message '%s', expected one with '%s'\n", what, status, message, part);
  ++failures;
}

int main(void) {
  size_t bytes = 0, schedule = 0;
  oscar_decode_shape decode;
  memset(&decode, 0, sizeof decode);
  decode.struct_size = sizeof decode;
  decode.num_requests = 4;
  decode.query_length = 1;
  decode.num_qo_heads = 32;
  decode.num_kv_heads = 8;
  decode.head_dim = 128;
  decode.max_pages = 512;
  decode.num_sms = 132;
  if (oscar_cuda_decode_workspace(&decode, &bytes, &schedule) != 0 || bytes == 0 || schedule == 0) {
    printf("decode workspace: %s\n", oscar_last_error());
    ++failures;
  }
  decode.struct_size -= 4;
  expect_refused("smaller shape", oscar_cuda_decode_workspace(&decode, &bytes, &schedule),
                 "oscar_decode_shape.struct_size");
  decode.struct_size = sizeof decode;
  oscar_decode_params decode_params;
  memset(&decode_params, 0, sizeof decode_params);
  expect_refused("params without a size", oscar_cuda_decode(&decode, &decode_params, NULL),
                 "oscar_decode_params.struct_size");
  expect_refused("schedule without a size", oscar_cuda_decode_schedule(&decode, &decode_params, NULL),
                 "oscar_decode_params.struct_size");
  decode.head_dim = 100;
  expect_refused("head_dim", oscar_cuda_decode_workspace(&decode, &bytes, &schedule), "head_dim");

  oscar_store_shape store;
  oscar_store_params store_params;
  memset(&store, 0, sizeof store);
  memset(&store_params, 0, sizeof store_params);
  expect_refused("store shape", oscar_cuda_store(&store, &store_params, NULL), "oscar_store_shape.struct_size");
  store.struct_size = sizeof store;
  expect_refused("store params", oscar_cuda_store(&store, &store_params, NULL), "oscar_store_params.struct_size");

  oscar_prefill_shape prefill;
  oscar_prefill_params prefill_params;
  memset(&prefill, 0, sizeof prefill);
  memset(&prefill_params, 0, sizeof prefill_params);
  expect_refused("prefill shape", oscar_cuda_prefill(&prefill, &prefill_params, NULL),
                 "oscar_prefill_shape.struct_size");
  oscar_merge_params merge;
  memset(&merge, 0, sizeof merge);
  expect_refused("merge", oscar_cuda_merge(&merge, NULL), "oscar_merge_params.struct_size");

  printf("%d failures, library %s\n", failures, oscar_version());
  return failures != 0;
}
