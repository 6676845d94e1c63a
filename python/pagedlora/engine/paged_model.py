"""A base model that runs ragged steps over a paged KV cache; no adapters here."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from pagedlora.engine.attention import AttentionCall, attention_step
from pagedlora.engine.attention_backends import make_backend
from pagedlora.engine.kv_tensors import KvTensors
from pagedlora.engine.live_model import LiveModelHold
from pagedlora.engine.model_spec import LayerSpec, ModelSpec
from pagedlora.engine.step import StepBatch


class _PagedStep:
    """Answers the attention calls of one forward from the paged cache."""

    def __init__(self, model: PagedModel, step: StepBatch) -> None:
        self._model = model
        self._num_tokens = step.num_tokens
        self._attention = model.attention.begin(step)
        self.num_calls = 0

    def _check_shapes(self, call: AttentionCall, layer: LayerSpec) -> None:
        heads, tokens = layer.num_kv_heads, self._num_tokens
        if (
            call.query.shape != (1, layer.num_heads, tokens, layer.key_dim)
            or call.key.shape != (1, heads, tokens, layer.key_dim)
            or call.value.shape != (1, heads, tokens, layer.value_dim)
            or not call.query.dtype == call.key.dtype == call.value.dtype == self._model.spec.dtype
        ):
            raise RuntimeError(
                f"layer {layer.layer_idx} attends with shapes {tuple(call.query.shape)}, "
                f"{tuple(call.key.shape)}, {tuple(call.value.shape)} for {tokens} tokens; the "
                f"probe saw {layer}"
            )

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """See `AttentionStep.attend`; also writes the new keys and values."""
        model = self._model
        layer = model.spec.layers[call.layer_idx]
        self._check_shapes(call, layer)
        output = self._attention.run(call, layer)
        self.num_calls += 1
        return output


class PagedModel:
    """Holds a live model and its KV memory; thread-compatible (one step at a time).

    Attributes:
        model: The live model.
        spec: Its attention layers.
        kv: The KV tensors.
        device: Where the model computes.
        attention: Who computes attention there.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        spec: ModelSpec,
        *,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int = 0,
    ) -> None:
        """Takes hold of the model.

        Args:
            model: A decoder that passed admission, all of it on one device.
            spec: What `probe` returned for it.
            num_blocks: KV blocks, at least 1.
            block_size: Tokens per block.
            num_host_blocks: KV blocks of the host pool, for suspended requests; at least 0.

        Raises:
            InvalidArgumentError: A size is below that.
            UnsupportedModelError: The model keeps its own attention.
        """
        self.spec = spec
        self.device = next(model.parameters()).device
        self.kv = KvTensors(
            spec,
            num_blocks,
            block_size,
            spec.dtype,
            num_host_blocks=num_host_blocks,
            device=self.device,
        )
        self.attention = make_backend(self.kv)
        self.model = model
        self._hold = LiveModelHold(model)

    def forward(self, step: StepBatch) -> torch.Tensor:
        """Computes a step and writes the new tokens' keys and values.

        Args:
            step: The row; block ids must belong to the sequences alone.

        Returns:
            float32 logits `[num_sampled, vocab]` on the CPU, in row order.

        Raises:
            InvalidArgumentError: A block table does not fit.
            RuntimeError: The model did not run our attention once per layer in this step; its
                result was dropped.
        """
        paged = _PagedStep(self, step)
        with torch.inference_mode(), attention_step(paged):
            output = self.model(
                input_ids=torch.tensor([step.token_ids]).to(self.device),
                position_ids=torch.tensor([step.position_ids]).to(self.device),
                use_cache=False,
                # An index tensor even when empty: the integer 0 would mean all rows.
                logits_to_keep=torch.tensor(step.logits_rows, dtype=torch.int64).to(self.device),
            )
            logits: torch.Tensor = output[0] if isinstance(output, tuple) else output.logits
            logits = logits[0].float().cpu()
        if paged.num_calls != len(self.spec.layers) or logits.shape[0] != step.num_sampled:
            raise RuntimeError(
                f"paged attention ran {paged.num_calls} times for {len(self.spec.layers)} layers "
                f"and gave {logits.shape[0]} rows of logits for {step.num_sampled} sequences: "
                "the model was changed while the engine holds it"
            )
        return logits

    def close(self) -> None:
        """Gives the model back as it was; idempotent."""
        self._hold.release()
