// One register function per file of bindings; module.cc lists them.
#pragma once

#include <pybind11/pybind11.h>

namespace pagedlora::bindings {

void register_errors(pybind11::module_& module);
void register_build_info(pybind11::module_& module);
void register_gpu(pybind11::module_& module);
void register_gpu_lora(pybind11::module_& module);
void register_gpu_scatter(pybind11::module_& module);
void register_model(pybind11::module_& module);
void register_layout(pybind11::module_& module);
void register_adapter(pybind11::module_& module);
void register_batch_lease(pybind11::module_& module);
void register_lease_pages(pybind11::module_& module);
void register_fakes(pybind11::module_& module);
void register_stats(pybind11::module_& module);
void register_peft_cache_manager(pybind11::module_& module);
void register_pool_view(pybind11::module_& module);
void register_process_mark(pybind11::module_& module);
void register_lora_operator(pybind11::module_& module);
void register_paged_attention(pybind11::module_& module);

}  // namespace pagedlora::bindings
