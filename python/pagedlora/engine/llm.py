"""The front door: one base model, many adapters, `generate`."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pagedlora.config import (
    KvCacheConfig,
    LoraConfig,
    PeftCacheConfig,
    SchedulerConfig,
    resolve_max_lora_rank,
)
from pagedlora.engine.adapter_names import AdapterNames
from pagedlora.engine.admission import admit
from pagedlora.engine.dtypes import to_core_dtype
from pagedlora.engine.engine_core import EngineCore
from pagedlora.engine.kv_tensors import bytes_per_block
from pagedlora.engine.loading import load_model, parse_dtype
from pagedlora.engine.model_runner import ModelRunner
from pagedlora.engine.prompts import Prompt, as_prompt_list, one_per_prompt
from pagedlora.engine.request_processor import RequestProcessor
from pagedlora.engine.sizing import num_kv_blocks, with_adapter_counts
from pagedlora.errors import InvalidArgumentError, PagedLoraError
from pagedlora.kv_cache import KVCacheManager
from pagedlora.lora_manager import AdapterInfo, LoraManager
from pagedlora.memory import available_memory_bytes
from pagedlora.model_config import LoraModelConfig
from pagedlora.peft_cache import PeftCacheManager
from pagedlora.requests import LoRARequest, RequestOutput
from pagedlora.sampling_params import SamplingParams
from pagedlora.scheduler.arrival_order import ArrivalOrderScheduler


class LLM:
    """A base model that answers with any of its registered adapters.

    Use as a context manager, or call `close()`: a live module is given back unchanged then, and
    must not be called by others before. One thread at a time: a second `generate()` beside a
    running one raises. Ctrl-C ends `generate()` and leaves the object usable.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        tokenizer: Any | None = None,
        *,
        lora_config: LoraConfig | None = None,
        peft_cache_config: PeftCacheConfig | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
    ) -> None:
        """Loads the model, checks that it can be run with certainty, and reserves the caches.

        Args:
            model: A directory, a hub id or a live causal language model on the CPU.
            tokenizer: A tokenizer, or the directory or hub id of one. None: the one beside the
                model's files; without it prompts are token ids and texts are "".
            lora_config: Which adapters are accepted; None for the defaults.
            peft_cache_config: Memory for adapters; None for the defaults.
            kv_cache_config: Memory for keys and values; None for the defaults.
            scheduler_config: What a step may hold; None for the defaults.
            device: "auto" or "cpu".
            dtype: Of the weights when loading; "auto" is the model's own.

        Raises:
            InvalidArgumentError: Arguments contradict each other or the model.
            UnsupportedModelError: The model cannot be run with certainty of right answers.
            OutOfMemoryError: A cache could not be allocated.
        """
        lora_config = lora_config or LoraConfig()
        peft_cache_config = peft_cache_config or PeftCacheConfig()
        max_rank = resolve_max_lora_rank(lora_config, peft_cache_config)
        self._loaded = load_model(model, tokenizer, device=device, dtype=dtype)
        self._request_ids = itertools.count()
        self._busy = threading.Lock()
        with ExitStack() as parts:
            self._build(
                parts,
                lora_config,
                peft_cache_config.model_copy(update={"max_lora_rank": max_rank}),
                kv_cache_config or KvCacheConfig(),
                scheduler_config or SchedulerConfig(),
            )
            self._parts = parts.pop_all()
        self._closed = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | str | Sequence[LoRARequest | str | None] | None = None,
    ) -> list[RequestOutput]:
        """Answers prompts, requests of different adapters in one batch.

        Args:
            prompts: A string, a list of token ids, or a list of such.
            sampling_params: One for all prompts or one per prompt; None for the defaults.
            lora_request: The adapter by registered name or `LoRARequest`, one for all or one per
                prompt; None is the base model.

        Returns:
            One result per prompt, in order. A request that cannot be answered has its error and
            no outputs; the others are answered.

        Raises:
            InvalidArgumentError: Lengths or types do not fit, the `LLM` is closed, or another
                thread is in `generate()`.
            Exception: The forward failed; no request is left behind.
        """
        texts = as_prompt_list(prompts)
        params = one_per_prompt(
            sampling_params or SamplingParams(), len(texts), "sampling_params", (SamplingParams,)
        )
        loras: list[LoRARequest | str | None] = one_per_prompt(
            lora_request, len(texts), "lora_request", (LoRARequest, str, type(None))
        )
        self._check_open()
        if not self._busy.acquire(blocking=False):
            raise InvalidArgumentError("generate() is running in another thread: wait for it")
        try:
            return self._run(list(zip(texts, params, loras, strict=True)))
        finally:
            self._busy.release()

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Registers an adapter under a name.

        Args:
            name: How requests will name it.
            path: A PEFT directory.

        Returns:
            What is known about the adapter.

        Raises:
            InvalidArgumentError: The name is registered from another path.
            PagedLoraError: The adapter cannot be used; nothing was registered.
        """
        self._check_open()
        info: AdapterInfo = self._adapters.load(name, path)
        return info

    def list_loras(self) -> list[AdapterInfo]:
        """The registered adapters."""
        self._check_open()
        return list(self._lora_manager.list())

    @property
    def lora_manager(self) -> LoraManager:
        """Names and sources of the adapters."""
        return self._lora_manager

    @property
    def peft_cache_manager(self) -> PeftCacheManager:
        """The two tiers of adapter memory."""
        return self._peft_cache_manager

    def close(self) -> None:
        """Gives the model back as it was and frees the caches; idempotent."""
        if not self._closed:
            self._closed = True
            self._parts.close()

    def __enter__(self) -> LLM:
        """The object itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def _build(
        self,
        parts: ExitStack,
        lora_config: LoraConfig,
        peft_config: PeftCacheConfig,
        kv_config: KvCacheConfig,
        scheduler_config: SchedulerConfig,
    ) -> None:
        """Makes the parts; `parts` closes those that were made, last first."""
        model = self._loaded.model
        spec = admit(model)
        dtype = self._loaded.dtype
        if peft_config.dtype != "auto":
            dtype = parse_dtype(peft_config.dtype)
        max_rank = peft_config.max_lora_rank or lora_config.max_lora_rank
        model_config = LoraModelConfig.from_module(
            model, lora_config.lora_target_modules, dtype=dtype, max_lora_rank=max_rank
        )
        cache = PeftCacheManager(
            model_config,
            with_adapter_counts(
                peft_config, lora_config, model_config, free_bytes=available_memory_bytes()
            ),
            device="cpu",
        )
        parts.callback(cache.close)
        kv = KVCacheManager(
            num_kv_blocks(
                kv_config,
                scheduler_config,
                block_bytes=bytes_per_block(spec, kv_config.block_size, spec.dtype),
                max_model_tokens=self._loaded.max_model_tokens,
                free_bytes=available_memory_bytes(),
            ),
            kv_config.block_size,
        )
        runner = ModelRunner(
            model,
            model_config,
            num_blocks=kv.num_blocks,
            block_size=kv.block_size,
            weights_dtype=to_core_dtype(dtype),
            spec=spec,
        )
        parts.callback(runner.close)
        scheduler = ArrivalOrderScheduler(
            kv,
            cache,
            max_batch_size=scheduler_config.max_batch_size,
            max_num_tokens=scheduler_config.max_num_tokens,
            enable_chunked_prefill=scheduler_config.enable_chunked_prefill,
        )
        self._peft_cache_manager = cache
        self._lora_manager = LoraManager(model_config, cache)
        self._adapters = AdapterNames(self._lora_manager)
        self._processor = RequestProcessor(self._loaded, self._adapters)
        self._core = EngineCore(
            runner, scheduler, kv, cache, eos_token_ids=self._loaded.eos_token_ids
        )

    def _run(
        self,
        inputs: Sequence[tuple[str | list[int], SamplingParams, LoRARequest | str | None]],
    ) -> list[RequestOutput]:
        """Runs all requests to their end."""
        outputs: dict[int, RequestOutput] = {}
        order: list[int] = []
        interrupted = PagedLoraError("generate() was interrupted")
        if self._core.has_unfinished:  # a second Ctrl-C cut the last call's clean-up short
            self._core.abort_all(interrupted)
        try:
            for prompt, params, lora in inputs:
                request_id = next(self._request_ids)
                order.append(request_id)
                token_ids: list[int] = []
                try:
                    token_ids = self._processor.token_ids(prompt)
                    self._core.add(
                        self._processor.make_request(request_id, token_ids, params, lora)
                    )
                except PagedLoraError as error:
                    outputs[request_id] = RequestOutput(request_id, token_ids, [], error=error)
            while self._core.has_unfinished:
                for ended in self._core.step():
                    outputs[ended.request_id] = self._processor.make_output(ended)
        except BaseException:
            self._core.abort_all(interrupted)
            raise
        return [outputs[request_id] for request_id in order]

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgumentError("this LLM is closed: make a new one")
