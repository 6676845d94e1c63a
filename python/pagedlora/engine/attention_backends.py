"""Who computes attention over the paged cache: native code on the CPU, torch anywhere else.

A backend is made once per model. For each step it makes one `StepAttention`, which does what all
layers of the step share and then answers layer by layer.
"""

from __future__ import annotations

from typing import Protocol

import torch

from pagedlora import _core
from pagedlora.engine.attention import AttentionCall
from pagedlora.engine.dtypes import to_core_dtype
from pagedlora.engine.kv_tensors import KvTensors
from pagedlora.engine.model_spec import LayerSpec
from pagedlora.engine.step import StepBatch


class StepAttention(Protocol):
    """The attention of one step."""

    def run(self, call: AttentionCall, layer: LayerSpec) -> torch.Tensor:
        """Writes the new keys and values of a layer into the cache, and attends.

        Args:
            call: Its tensors have the shapes that `layer` says.
            layer: The layer that calls.

        Returns:
            `[1, T, num_heads, value_dim]`, of the type of the query.
        """
        ...


class AttentionBackend(Protocol):
    """Makes the attention of steps over one cache."""

    def begin(self, step: StepBatch) -> StepAttention:
        """Prepares a step.

        Raises:
            InvalidArgumentError: A block table does not fit.
        """
        ...


def make_backend(kv: KvTensors) -> AttentionBackend:
    """The backend for a cache, by where its memory lies."""
    if kv.device.type == "cpu":
        return NativeAttention(kv)
    from pagedlora.engine.torch_attention import TorchAttention

    return TorchAttention(kv)


class NativeAttention:
    """The native operator on the CPU."""

    def __init__(self, kv: KvTensors) -> None:
        self._kv = kv
        self._operator = _core.PagedAttention()
        self._core_dtype = to_core_dtype(kv.dtype)

    def begin(self, step: StepBatch) -> StepAttention:
        """See `AttentionBackend.begin`."""
        batch = _core.AttentionBatch(
            [sequence.block_table for sequence in step.sequences],
            [sequence.past_tokens for sequence in step.sequences],
            [len(sequence.token_ids) for sequence in step.sequences],
            self._kv.block_size,
        )
        return _NativeStep(self._operator, self._kv, batch, self._core_dtype)


class _NativeStep:
    def __init__(
        self,
        operator: _core.PagedAttention,
        kv: KvTensors,
        batch: _core.AttentionBatch,
        core_dtype: _core.Dtype,
    ) -> None:
        self._operator = operator
        self._kv = kv
        self._batch = batch
        self._core_dtype = core_dtype

    def run(self, call: AttentionCall, layer: LayerSpec) -> torch.Tensor:
        # The operator reads raw memory: possible copies must live until it returns.
        query, key, value = map(_dim_contiguous, (call.query, call.key, call.value))
        num_tokens = query.shape[2]
        output = query.new_empty((1, num_tokens, layer.num_heads, layer.value_dim))
        self._operator.run(
            self._batch,
            query=_view(query),
            key=_view(key),
            value=_view(value),
            output=output.data_ptr(),
            key_cache=self._kv.keys[call.layer_idx].data_ptr(),
            value_cache=self._kv.values[call.layer_idx].data_ptr(),
            num_blocks=self._kv.num_blocks,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            scaling=call.scaling,
            sliding_window=call.sliding_window,
            softcap=call.softcap,
            sinks=0 if call.sinks is None else call.sinks.data_ptr(),
            dtype=self._core_dtype,
        )
        return output


def _dim_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A `[1, heads, T, dim]` tensor whose last dimension has stride 1."""
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _view(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Pointer, head stride and token stride (in elements) of a `[1, heads, T, dim]` tensor."""
    return tensor.data_ptr(), tensor.stride(1), tensor.stride(2)
