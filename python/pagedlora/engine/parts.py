"""What an `LLM` is made of, built in one go and dropped in one go."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

from pagedlora.base_weights import ModelWeights
from pagedlora.config import KvCacheConfig, LoraConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.engine.adapter_names import AdapterNames
from pagedlora.engine.admission import admit
from pagedlora.engine.devices import free_memory_bytes
from pagedlora.engine.engine_core import EngineCore
from pagedlora.engine.gpu_lora import GpuLoraSizes
from pagedlora.engine.kv_tensors import bytes_per_block
from pagedlora.engine.live_requests import LiveRequests
from pagedlora.engine.loading import LoadedModel, parse_dtype
from pagedlora.engine.model_runner import ModelRunner
from pagedlora.engine.model_spec import ModelSpec
from pagedlora.engine.request_processor import RequestProcessor
from pagedlora.engine.sizing import num_host_kv_blocks, num_kv_blocks, with_adapter_counts
from pagedlora.engine.step_stats import StepStats
from pagedlora.errors import PagedLoraError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.loaders.fused_modules import fused_modules_of
from pagedlora.lora_manager import LoraManager
from pagedlora.model_config import LoraModelConfig
from pagedlora.peft_cache import PeftCacheManager
from pagedlora.requests import LoRARequest
from pagedlora.sampling_params import SamplingParams
from pagedlora.scheduler.admission_window import AdmissionWindow
from pagedlora.scheduler.kv_cache_v2 import KVCacheV2Scheduler

_KNOWN_BATCHES = 4
"""Full batches of adapters whose tables a GPU keeps."""
_WINDOW_BATCHES = 4
"""Full batches of waiting requests that a step looks at, and that may own their adapters."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an open engine; whoever drops it after `close()` gives back their memory.

    Attributes:
        loaded: The model and what its configuration says.
        peft_cache_manager: The two tiers of adapters.
        lora_manager: The registry over it.
        adapters: Names, numbers and paths of requests.
        processor: Prompts to requests, requests to outputs.
        core: Runs the requests.
        stats: What its steps did; None if nobody wants to know.
        closers: What `close()` undoes, last first.
    """

    loaded: LoadedModel
    peft_cache_manager: PeftCacheManager
    lora_manager: LoraManager
    adapters: AdapterNames
    processor: RequestProcessor
    core: EngineCore
    stats: StepStats | None
    closers: ExitStack

    def begin(
        self,
        request_id: int,
        token_ids: list[int],
        params: SamplingParams,
        lora: LoRARequest | str | None,
        *,
        streams: bool = False,
    ) -> None:
        """Hands a request to the core; whoever hears of its end releases its adapter.

        Args and errors are those of `RequestProcessor.make_request` and `EngineCore.add`; a request
        that was not taken holds nothing.
        """
        request = self.processor.make_request(request_id, token_ids, params, lora, streams=streams)
        self.adapters.acquire(lora, request)
        try:
            self.core.add(request)
        except PagedLoraError:
            self.adapters.release(request)
            raise

    def close(self) -> None:
        """Gives the model back as it was and closes the cache; idempotent."""
        self.closers.close()


def build_parts(
    loaded: LoadedModel,
    lora_config: LoraConfig,
    peft_config: PeftCacheConfig,
    kv_config: KvCacheConfig,
    scheduler_config: SchedulerConfig,
    *,
    enable_stats: bool = False,
) -> EngineParts:
    """Makes the parts of an engine; if one fails, those before it are closed.

    Args and errors are those of `LLM.__init__`; the model is left as it was if this fails, and
    `peft_config.max_lora_rank` is resolved.
    """
    with ExitStack() as closers:
        spec = admit(loaded.model)
        cache = _adapter_cache(loaded, lora_config, peft_config)
        closers.callback(cache.close)
        runner = _runner(loaded, spec, cache, kv_config, scheduler_config)
        closers.callback(runner.close)
        kv = KVCacheManager(
            runner.kv.num_blocks,
            runner.kv.block_size,
            num_host_blocks=runner.kv.num_host_blocks,
            copier=runner.kv,
        )
        manager = LoraManager(
            cache.model_config,
            cache,
            adapter_root=lora_config.adapter_root,
            lora_dir=lora_config.lora_dir,
            base_model_id=str(getattr(loaded.model.config, "name_or_path", "")),
            base_weights=ModelWeights(loaded.model),
            fused_modules=fused_modules_of(loaded.model.config),
            strict=lora_config.strict,
            allow_pickle=lora_config.allow_pickle,
        )
        adapters = AdapterNames(manager)
        stats = StepStats(kv, cache) if enable_stats else None
        return EngineParts(
            loaded=loaded,
            peft_cache_manager=cache,
            lora_manager=manager,
            adapters=adapters,
            processor=RequestProcessor(loaded, adapters),
            core=_core(
                runner,
                kv,
                cache,
                scheduler_config,
                eos_token_ids=loaded.eos_token_ids,
                stats=stats,
            ),
            stats=stats,
            closers=closers.pop_all(),
        )


def _core(
    runner: ModelRunner,
    kv: KVCacheManager,
    cache: PeftCacheManager,
    config: SchedulerConfig,
    *,
    eos_token_ids: frozenset[int],
    stats: StepStats | None,
) -> EngineCore:
    """The step loop with its scheduler."""
    scheduler = KVCacheV2Scheduler(
        kv,
        cache,
        policy=config.policy,
        max_batch_size=config.max_batch_size,
        max_num_tokens=config.max_num_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
        max_skip_passes=config.max_skip_passes,
    )
    live = LiveRequests(
        kv,
        cache,
        max_num_tokens=config.max_num_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
    )
    front_size = _WINDOW_BATCHES * config.max_batch_size
    window = AdmissionWindow(cache, size=front_size, max_skip_passes=config.max_skip_passes)
    return EngineCore(
        runner,
        scheduler,
        live,
        cache,
        window,
        eos_token_ids=eos_token_ids,
        front_size=front_size,
        stats=stats,
    )


def _adapter_cache(
    loaded: LoadedModel, lora_config: LoraConfig, peft_config: PeftCacheConfig
) -> PeftCacheManager:
    """The two tiers for the model's targets."""
    dtype = loaded.dtype if peft_config.dtype == "auto" else parse_dtype(peft_config.dtype)
    model_config = LoraModelConfig.from_module(
        loaded.model,
        lora_config.lora_target_modules,
        dtype=dtype,
        max_lora_rank=peft_config.max_lora_rank or lora_config.max_lora_rank,
    )
    sized = with_adapter_counts(
        peft_config, lora_config, model_config, free_bytes=free_memory_bytes(loaded.device)
    )
    return PeftCacheManager(model_config, sized, device=str(loaded.device))


def _runner(
    loaded: LoadedModel,
    spec: ModelSpec,
    cache: PeftCacheManager,
    kv_config: KvCacheConfig,
    scheduler_config: SchedulerConfig,
) -> ModelRunner:
    """Takes hold of the model, with memory for keys and values; the adapters have theirs."""
    block_bytes = bytes_per_block(spec, kv_config.block_size, spec.dtype)
    num_blocks = num_kv_blocks(
        kv_config,
        scheduler_config,
        block_bytes=block_bytes,
        max_model_tokens=loaded.max_model_tokens,
        free_bytes=free_memory_bytes(loaded.device),
    )
    return ModelRunner(
        loaded.model,
        cache.model_config,
        num_blocks=num_blocks,
        block_size=kv_config.block_size,
        num_host_blocks=num_host_kv_blocks(kv_config, block_bytes=block_bytes),
        weights_dtype=cache.model_config.dtype,
        gpu_sizes=_gpu_sizes(cache, scheduler_config) if loaded.device.type == "cuda" else None,
        spec=spec,
    )


def _gpu_sizes(cache: PeftCacheManager, scheduler_config: SchedulerConfig) -> GpuLoraSizes:
    """Tables for steps as large as the scheduler makes them, and for the adapters of some more."""
    return GpuLoraSizes(
        layout=cache.core.layout_params,
        max_rows=max(scheduler_config.max_num_tokens, scheduler_config.max_batch_size),
        max_tasks=_KNOWN_BATCHES * scheduler_config.max_batch_size,
    )
