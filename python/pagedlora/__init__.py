"""Serves thousands of LoRA adapters over one model from paged memory of a size you choose."""

from typing import TYPE_CHECKING

from pagedlora._core import BatchLease, Dtype, LoraBatch, LoraOperator, TaskLayerModuleConfig
from pagedlora.adapter_weights import AdapterWeights
from pagedlora.base_weights import ModelWeights
from pagedlora.config import KvCacheConfig, LoraConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.development import cmake_prefix_path
from pagedlora.devices import make_cuda_device
from pagedlora.errors import (
    AdapterFormatError,
    AdapterInUseError,
    AdapterLoadTimeout,
    AdapterNotFoundError,
    AdapterPathError,
    AdapterReadError,
    AdapterSourceChangedError,
    AdapterTooLargeError,
    CapacityError,
    GenerationConflictError,
    GpuCallError,
    GpuUnavailableError,
    InvalidArgumentError,
    LeaseClosedError,
    LoraCacheFullError,
    ModelLoadError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    PagedLoraError,
    PagedLoraWarning,
    PeftTaskNotCachedError,
    RequestConflictError,
    RequestNotLeasedError,
    RequestTimeoutError,
    UnsupportedAdapterError,
    UnsupportedModelError,
)
from pagedlora.kv_cache import KVCacheManager
from pagedlora.loaders.coverage import CoverageReport
from pagedlora.loaders.given_tensors import PeftTensors
from pagedlora.lora_manager import AdapterInfo, AdapterReport, LoraManager, probe_adapter
from pagedlora.model_config import LoraModelConfig
from pagedlora.peft_cache import PeftCacheManager
from pagedlora.requests import CompletionOutput, LlmRequest, LoRARequest, RequestOutput
from pagedlora.retained_adapters import RetainedAdapters
from pagedlora.sampling_params import SamplingParams
from pagedlora.scheduler.admission_window import AdmissionWindow
from pagedlora.scheduler.capacity import CapacityDecision, CapacityScheduler
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler
from pagedlora.scheduler.step import ContextChunk, SchedulerOutput

if TYPE_CHECKING:
    from pagedlora.attachment import Attachment, attach
    from pagedlora.engine.llm import LLM
    from pagedlora.engine.request_stream import RequestStream

__all__ = [
    "LLM",
    "AdapterFormatError",
    "AdapterInUseError",
    "AdapterInfo",
    "AdapterLoadTimeout",
    "AdapterNotFoundError",
    "AdapterPathError",
    "AdapterReadError",
    "AdapterReport",
    "AdapterSourceChangedError",
    "AdapterTooLargeError",
    "AdapterWeights",
    "AdmissionWindow",
    "Attachment",
    "BatchLease",
    "CapacityDecision",
    "CapacityError",
    "CapacityScheduler",
    "CompletionOutput",
    "ContextChunk",
    "CoverageReport",
    "Dtype",
    "GenerationConflictError",
    "GpuCallError",
    "GpuUnavailableError",
    "InvalidArgumentError",
    "KVCacheManager",
    "KVCacheV2Scheduler",
    "KvCacheConfig",
    "LeaseClosedError",
    "LlmRequest",
    "LoRARequest",
    "LoraBatch",
    "LoraCacheFullError",
    "LoraConfig",
    "LoraManager",
    "LoraModelConfig",
    "LoraOperator",
    "ModelLoadError",
    "ModelWeights",
    "NonFiniteLogitsError",
    "OutOfMemoryError",
    "PagedLoraError",
    "PagedLoraWarning",
    "PeftCacheConfig",
    "PeftCacheManager",
    "PeftTaskNotCachedError",
    "PeftTensors",
    "RequestConflictError",
    "RequestNotLeasedError",
    "RequestOutput",
    "RequestStream",
    "RequestTimeoutError",
    "RetainedAdapters",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerOutput",
    "TaskLayerModuleConfig",
    "UnsupportedAdapterError",
    "UnsupportedModelError",
    "attach",
    "cmake_prefix_path",
    "make_cuda_device",
    "probe_adapter",
]


def __getattr__(name: str) -> object:
    """Imports `LLM`, and with it torch and transformers, when it is first asked for."""
    if name == "LLM":
        from pagedlora.engine.llm import LLM

        return LLM
    if name in {"Attachment", "attach"}:
        from pagedlora import attachment

        return getattr(attachment, name)
    if name == "RequestStream":
        from pagedlora.engine.request_stream import RequestStream

        return RequestStream
    raise AttributeError(f"module 'pagedlora' has no attribute {name!r}")
