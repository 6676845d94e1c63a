"""Runs a live Hugging Face decoder, with adapters, on ragged steps."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from pagedlora import _core
from pagedlora.engine.admission import admit
from pagedlora.engine.devices import current_stream
from pagedlora.engine.gpu_lora import GpuLoraSizes
from pagedlora.engine.kv_tensors import KvTensors
from pagedlora.engine.live_model import check_not_attached, turn_of
from pagedlora.engine.lora_hooks import LoraHooks
from pagedlora.engine.model_spec import ModelSpec
from pagedlora.engine.paged_model import PagedModel
from pagedlora.engine.step import StepBatch
from pagedlora.errors import InvalidArgumentError


class ModelRunner:
    """A live model under an engine, from construction to `close()`.

    Between steps the model computes nothing. Calling it directly while it is held raises
    RuntimeError. Any number of runners may be alive. Thread-compatible: one step at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        lora_config: _core.LoraModelConfig | None,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
        weights_dtype: _core.Dtype | None,
        gpu_sizes: GpuLoraSizes | None = None,
        spec: ModelSpec | None = None,
    ) -> None:
        """Admits the model and takes hold of it.

        Args:
            model: A causal language model, all of it on one device; given back unchanged if this
                fails.
            lora_config: Modules that carry adapters; None: base model only.
            num_blocks: KV blocks.
            block_size: Tokens per block.
            num_host_blocks: KV blocks of the host pool, for suspended requests.
            weights_dtype: Of the adapters in the cache; may be None without `lora_config`.
            gpu_sizes: Of the tables of adapters, for a model on a GPU.
            spec: What `admit(model)` returned, if it was called already.

        Raises:
            UnsupportedModelError: The model cannot be run with certainty of right answers.
            InvalidArgumentError: A size is below 1, `num_host_blocks` below 0, `lora_config` does
                not fit the model, or the model is attached.
        """
        check_not_attached(model)
        self._spec = admit(model) if spec is None else spec
        self._paged = PagedModel(
            model,
            self._spec,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
        )
        self._hooks: LoraHooks | None = None
        try:
            if lora_config is not None:
                if weights_dtype is None:
                    raise InvalidArgumentError("weights_dtype is needed with a lora_config")
                self._hooks = LoraHooks(model, lora_config, weights_dtype, gpu_sizes=gpu_sizes)
        except BaseException:
            self._paged.close()
            raise
        # Also when it is dropped without close(): a live model goes on without it.
        self._give_back = weakref.finalize(self, _give_back, self._paged, self._hooks)
        self._give_back.atexit = False

    @property
    def spec(self) -> ModelSpec:
        """The model's attention layers."""
        return self._spec

    @property
    def kv(self) -> KvTensors:
        """The KV tensors, which copy blocks for a `KVCacheManager`."""
        return self._paged.kv

    @property
    def stream(self) -> int | None:
        """The stream that steps of this thread are computed on; None on the CPU."""
        return current_stream(self._paged.device)

    def forward(self, step: StepBatch, lease: Any = None) -> torch.Tensor:
        """Computes a step; its keys and values are in the cache afterwards.

        Args:
            step: The row. Chunks with `sample=False` give no logits.
            lease: The `BatchLease` with the adapters of the sequences that use one.

        Returns:
            float32 logits `[num_sampled, vocab]` in row order; 0 rows if nothing is sampled.

        Raises:
            InvalidArgumentError: A block table does not fit, adapters are used without a
                `lora_config` or a lease, or another engine's step on the model called this.
            UnsupportedModelError: An attention argument is not honoured, or the rows of a module
                cannot be told apart.
        """
        with turn_of(self._paged.model):
            if self._hooks is None:
                if step.any_adapter:
                    raise InvalidArgumentError("this runner was made without a lora_config")
                return self._paged.forward(step)
            with self._hooks.step(step, lease):
                return self._paged.forward(step)

    def close(self) -> None:
        """Removes the hooks and gives the model back as it was; idempotent."""
        self._give_back()


def _give_back(paged: PagedModel, hooks: LoraHooks | None) -> None:
    if hooks is not None:
        hooks.remove()
    paged.close()
