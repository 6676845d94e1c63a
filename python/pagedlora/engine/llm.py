"""The front door: one base model, many adapters, `generate`."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pagedlora import _core
from pagedlora.arguments import check_type, to_config, to_integer
from pagedlora.config import (
    KvCacheConfig,
    LoraConfig,
    PeftCacheConfig,
    SchedulerConfig,
    resolve_max_lora_rank,
)
from pagedlora.engine.loading import load_model
from pagedlora.engine.parts import EngineParts, build_parts
from pagedlora.engine.prompts import Prompt, as_prompt_list, one_per_prompt
from pagedlora.engine.request_stream import RequestStream
from pagedlora.engine.step_loop import StepLoop
from pagedlora.errors import InvalidArgumentError, PagedLoraError
from pagedlora.lora_manager import AdapterInfo, LoraManager
from pagedlora.peft_cache import PeftCacheManager
from pagedlora.requests import LoRARequest, RequestOutput
from pagedlora.sampling_params import SamplingParams


class LLM:
    """A base model that answers with any of its registered adapters.

    Use as a context manager, or call `close()`: a live module is given back unchanged then, and
    must not be called by others before. Threads: `generate_async()`, `abort()` and loading and
    unloading adapters are for any thread at any time; requests of several `generate_async()` share
    batches. `generate()` computes on the caller's thread: it raises beside a running one and while
    streams are unfinished, and a stream begun beside it starts after it. `close()` waits for
    `generate()` and aborts streams. Ctrl-C ends `generate()` and leaves the object usable. After
    `close()` all else raises.

    Processes: in a child of `os.fork()` all calls raise but `close()`, which gives the child's copy
    of a live module back. Make the object after the fork, or start workers with "spawn".
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | nn.Module,
        tokenizer: Any | None = None,
        *,
        lora_config: LoraConfig | Mapping[str, Any] | None = None,
        peft_cache_config: PeftCacheConfig | Mapping[str, Any] | None = None,
        kv_cache_config: KvCacheConfig | Mapping[str, Any] | None = None,
        scheduler_config: SchedulerConfig | Mapping[str, Any] | None = None,
        device: str = "auto",
        dtype: str | torch.dtype = "auto",
        enable_stats: bool = False,
    ) -> None:
        """Loads the model, checks that it can be run with certainty, and reserves the caches.

        Args:
            model: A directory, a hub id or a live causal language model on the CPU.
            tokenizer: A tokenizer, or the directory or hub id of one. None: the one beside the
                model's files; without it prompts are token ids and texts are "".
            lora_config: Which adapters are accepted; None for the defaults. This and the next three
                may also be mappings of their fields.
            peft_cache_config: Memory for adapters; None for the defaults.
            kv_cache_config: Memory for keys and values; None for the defaults.
            scheduler_config: What a step may hold; None for the defaults.
            device: "cpu", "cuda" or "cuda:N"; "auto": where a live module is, else the CPU.
            dtype: Of the weights when loading; "auto" is the model's own.
            enable_stats: Whether each step is recorded for `get_stats()`.

        Raises:
            InvalidArgumentError: An argument is of another type, or they contradict each other or
                the model.
            ModelLoadError: The model or the tokenizer is not there, or its files cannot be read.
            ValidationError: Of pydantic: a mapping has unknown fields or impossible values.
            UnsupportedModelError: The model cannot be run with certainty of right answers.
            OutOfMemoryError: A cache could not be allocated.
        """
        lora = to_config(LoraConfig, lora_config, "lora_config")
        peft_cache = to_config(PeftCacheConfig, peft_cache_config, "peft_cache_config")
        kv_cache = to_config(KvCacheConfig, kv_cache_config, "kv_cache_config")
        scheduler = to_config(SchedulerConfig, scheduler_config, "scheduler_config")
        check_type(enable_stats, bool, "enable_stats")
        self._process = _core.ProcessMark()
        max_rank = resolve_max_lora_rank(lora, peft_cache)
        self._request_ids = itertools.count()
        self._lock = threading.Lock()
        self._generating: int | None = None  # the thread inside generate()
        self._parts: EngineParts | None
        self._parts = build_parts(
            load_model(model, tokenizer, device=device, dtype=dtype),
            lora,
            peft_cache.model_copy(update={"max_lora_rank": max_rank}),
            kv_cache,
            scheduler,
            enable_stats=enable_stats,
        )
        self._loop = StepLoop(self._parts, self._lock)

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
                call is running.
            Exception: The forward failed; no request is left behind.
        """
        self._open_parts()
        texts = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        params = one_per_prompt(sampling_params, len(texts), "sampling_params", (SamplingParams,))
        loras: list[LoRARequest | str | None] = one_per_prompt(
            lora_request, len(texts), "lora_request", (LoRARequest, str, type(None))
        )
        self._loop.wait_if_done()
        if self._lock.locked():
            raise InvalidArgumentError(
                "generate() or close() is running already, or streams are unfinished: wait for them"
            )
        with self._lock:  # and no call of acquire: Ctrl-C between that and its try would leak it
            return self._run(list(zip(texts, params, loras, strict=True)))

    def generate_async(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        lora_request: LoRARequest | str | None = None,
    ) -> RequestStream:
        """Answers one prompt token by token, in the background.

        Args:
            prompt: A string or a list of token ids.
            sampling_params: None for the defaults.
            lora_request: The adapter by registered name or `LoRARequest`; None is the base model.

        Returns:
            What to iterate over, with `for` or `async for`, or to ask for its `result()`. A request
            that cannot be answered has its error there.

        Raises:
            InvalidArgumentError: A type does not fit, or the `LLM` is closed.
        """
        self._open_parts()
        (text,) = as_prompt_list([prompt])
        if sampling_params is None:
            sampling_params = SamplingParams()
        (params,) = one_per_prompt(sampling_params, 1, "sampling_params", (SamplingParams,))
        (lora,) = one_per_prompt(lora_request, 1, "lora_request", (LoRARequest, str, type(None)))
        return self._loop.submit(next(self._request_ids), text, params, lora)

    def abort(self, request_id: int) -> None:
        """Ends a request with what it has, in the next step; unknown ones are ignored.

        Raises:
            InvalidArgumentError: It is no integer, or the `LLM` is closed.
        """
        self._open_parts()
        self._loop.abort(to_integer(request_id, "request_id"))

    def get_stats(self) -> list[dict[str, Any]]:
        """What the steps since the last call did, oldest first; at most the last 1,000.

        Returns:
            One per step; see docs/statistics.md.

        Raises:
            InvalidArgumentError: The `LLM` was made without `enable_stats`.
        """
        stats = self._open_parts().stats
        if stats is None:
            raise InvalidArgumentError(
                "there are no statistics: make the LLM with enable_stats=True"
            )
        return stats.take()

    def load_lora(self, name: str, path: str | os.PathLike[str]) -> AdapterInfo:
        """Registers an adapter under a name.

        Args:
            name: How requests will name it.
            path: A PEFT directory.

        Returns:
            What is known about the adapter.

        Raises:
            InvalidArgumentError: The name is registered from another path, or name or path is
                none.
            PagedLoraError: The adapter cannot be used; nothing was registered.
        """
        info: AdapterInfo = self._open_parts().adapters.load(name, path)
        return info

    def unload_lora(self, name: str, *, timeout_s: float = 30.0) -> None:
        """Gives up an adapter's name, after the requests that use it have ended.

        Args:
            name: A registered adapter; requests of later calls do not find it any more.
            timeout_s: Seconds to wait for a `generate()` of another thread, 0 or more.

        Raises:
            AdapterNotFoundError: No such name is registered.
            AdapterInUseError: Requests use it still, `owners`; the name works again.
        """
        self.lora_manager.unload(name, timeout_s=timeout_s)

    def list_loras(self) -> list[AdapterInfo]:
        """The registered adapters."""
        return self.lora_manager.list()

    @property
    def lora_manager(self) -> LoraManager:
        """Names and sources of the adapters."""
        return self._open_parts().lora_manager

    @property
    def peft_cache_manager(self) -> PeftCacheManager:
        """The two tiers of adapter memory."""
        return self._open_parts().peft_cache_manager

    def close(self) -> None:
        """Gives the model back as it was and frees the caches; idempotent.

        Waits for a `generate()` of another thread, and aborts streams.

        Raises:
            InvalidArgumentError: It was called from inside a step, by the model or the tokenizer;
                nothing was closed.
        """
        if self._generating == threading.get_ident() or self._loop.is_current_thread:
            # Waiting for it would never end.
            raise InvalidArgumentError("close() was called from inside generate(): call it after")
        self._loop.close()
        # In a child process nobody else is inside, and nobody gives the lock back.
        with self._lock if self._process.is_here else nullcontext():
            if self._parts is not None:
                self._parts.close()
                self._parts = None

    def __enter__(self) -> LLM:
        """The object itself, if it is open."""
        self._open_parts()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Closes."""
        self.close()

    def _run(
        self,
        inputs: Sequence[tuple[str | list[int], SamplingParams, LoRARequest | str | None]],
    ) -> list[RequestOutput]:
        """Answers all requests and says meanwhile who does; the caller holds the lock."""
        try:
            self._generating = threading.get_ident()
            return self._answer(self._open_parts(), inputs)
        finally:
            self._generating = None

    def _answer(
        self,
        parts: EngineParts,
        inputs: Sequence[tuple[str | list[int], SamplingParams, LoRARequest | str | None]],
    ) -> list[RequestOutput]:
        """Runs all requests to their end."""
        core, processor = parts.core, parts.processor
        outputs: dict[int, RequestOutput] = {}
        order: list[int] = []
        interrupted = PagedLoraError("generate() was interrupted")
        if core.has_unfinished:  # a second Ctrl-C cut the last call's clean-up short
            core.abort_all(interrupted)
        parts.adapters.release_all()
        try:
            for prompt, params, lora in inputs:
                request_id = next(self._request_ids)
                order.append(request_id)
                token_ids: list[int] = []
                try:
                    token_ids = processor.token_ids(prompt)
                    parts.begin(request_id, token_ids, params, lora)
                except PagedLoraError as error:
                    outputs[request_id] = RequestOutput(request_id, token_ids, [], error=error)
            while core.has_unfinished:
                for request in core.step():
                    if request.has_ended:
                        outputs[request.request_id] = processor.make_output(request)
                        parts.adapters.release(request)
        except BaseException:
            core.abort_all(interrupted)
            raise
        finally:
            parts.adapters.release_all()
        return [outputs[request_id] for request_id in order]

    def _open_parts(self) -> EngineParts:
        self._process.check("this LLM")
        parts = self._parts
        if parts is None:
            raise InvalidArgumentError("this LLM is closed: make a new one")
        return parts
