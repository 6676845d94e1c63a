#include "bindings.h"

PYBIND11_MODULE(_core, module) {
  using namespace pagedlora::bindings;  // NOLINT(google-build-using-namespace)
  module.doc() = "The C++ core of pagedlora. Use the names of the pagedlora package instead.";
  register_errors(module);
  register_build_info(module);
  register_model(module);
  register_layout(module);
  register_adapter(module);
  register_batch_lease(module);
  register_lease_pages(module);
  register_fakes(module);
  register_gpu(module);
  register_stats(module);
  register_peft_cache_manager(module);
  register_pool_view(module);
  register_process_mark(module);
  register_lora_operator(module);
  register_gpu_lora(module);
  register_gpu_scatter(module);
  register_paged_attention(module);
}
