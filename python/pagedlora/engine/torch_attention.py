"""Attention over the paged cache in torch: for devices that have no native operator of ours.

The sequences of a step are put into at most two groups: those with one new token, which is what a
decode step has, and the others. Within a group everything is padded to the longest, so a layer
takes a fixed number of torch calls whatever the number of sequences. What does not depend on the
layer (slots, masks) is made once per step and uploaded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from pagedlora.engine.attention import AttentionCall
from pagedlora.engine.kv_tensors import KvTensors
from pagedlora.engine.model_spec import LayerSpec
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.errors import InvalidArgumentError


class TorchAttention:
    """The `AttentionBackend` of any torch device."""

    def __init__(self, kv: KvTensors) -> None:
        """Attends over `kv`, on its device."""
        self._kv = kv

    def begin(self, step: StepBatch) -> TorchStepAttention:
        """See `AttentionBackend.begin`."""
        return TorchStepAttention(self._kv, step)


@dataclass(slots=True)
class _Group:
    """Sequences of a step, padded to one size; n of them, q new tokens and k keys at most.

    Padding among the new tokens repeats a sequence's last one, so that it sees something; padding
    among the keys is never seen.

    Attributes:
        rows: `[n, q]`, the row of each new token in the step.
        kept: `[m]`, which of the `n * q` are no padding.
        kept_rows: `[m]`, their rows.
        slots: `[n, k]`, the place of each key in the cache.
        positions: `[n, q]`, of the new tokens in their sequences.
        masks: By window, `[n, 1, q, k]`: which keys a query sees.
    """

    rows: torch.Tensor
    kept: torch.Tensor
    kept_rows: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    masks: dict[int, torch.Tensor] = field(default_factory=dict)

    def mask(self, window: int) -> torch.Tensor:
        """Which keys each query sees; window 0: all up to its own."""
        found = self.masks.get(window)
        if found is None:
            keys = torch.arange(self.slots.shape[1], device=self.slots.device)
            distance = self.positions.unsqueeze(2) - keys
            found = distance >= 0
            if window:
                found &= distance < window
            self.masks[window] = found = found.unsqueeze(1)
        return found


class TorchStepAttention:
    """The `StepAttention` of one step."""

    def __init__(self, kv: KvTensors, step: StepBatch) -> None:
        """Prepares a step.

        Raises:
            InvalidArgumentError: A block table is too short, or names a block that is not there.
        """
        self._kv = kv
        for sequence in step.sequences:
            _check_blocks(sequence, kv)
        ends = list(accumulate(len(sequence.token_ids) for sequence in step.sequences))
        self._groups = [
            _make_group(kv, [(step.sequences[i], ends[i]) for i in members])
            for members in _by_length(step.sequences)
        ]
        self._new_slots = torch.empty(step.num_tokens, dtype=torch.int64, device=kv.device)
        for group in self._groups:
            own = group.slots.gather(1, group.positions).flatten()
            self._new_slots[group.kept_rows] = own[group.kept]

    def run(self, call: AttentionCall, layer: LayerSpec) -> torch.Tensor:
        """See `StepAttention.run`."""
        keys = self._kv.keys[call.layer_idx].flatten(0, 1)
        values = self._kv.values[call.layer_idx].flatten(0, 1)
        keys.index_copy_(0, self._new_slots, call.key[0].transpose(0, 1))
        values.index_copy_(0, self._new_slots, call.value[0].transpose(0, 1))
        query = call.query[0].transpose(0, 1)
        output = query.new_empty((query.shape[0], layer.num_heads, layer.value_dim))
        for group in self._groups:
            attended = _attend(group, query[group.rows], keys, values, call)
            output.index_copy_(0, group.kept_rows, attended.flatten(0, 1)[group.kept])
        return output.unsqueeze(0)


def _by_length(sequences: Sequence[ScheduledSequence]) -> Iterator[list[int]]:
    """Who is in which group: positions in `sequences`."""
    decodes = [i for i, sequence in enumerate(sequences) if len(sequence.token_ids) == 1]
    others = [i for i, sequence in enumerate(sequences) if len(sequence.token_ids) > 1]
    yield from filter(None, (decodes, others))


def _check_blocks(sequence: ScheduledSequence, kv: KvTensors) -> None:
    num_keys = sequence.past_tokens + len(sequence.token_ids)
    used = sequence.block_table[: -(-num_keys // kv.block_size)]
    if len(used) * kv.block_size < num_keys:
        raise InvalidArgumentError(
            f"request {sequence.request_id} has {len(used)} blocks of {kv.block_size} for "
            f"{num_keys} tokens"
        )
    if min(used) < 0 or max(used) >= kv.num_blocks:
        raise InvalidArgumentError(
            f"request {sequence.request_id} has blocks {min(used)} to {max(used)}; the cache has 0 "
            f"to {kv.num_blocks - 1}"
        )


def _make_group(kv: KvTensors, members: Sequence[tuple[ScheduledSequence, int]]) -> _Group:
    """A group.

    Args:
        kv: The cache.
        members: Sequences, and the row after the last one of each in the step.
    """
    num_new = torch.tensor([len(sequence.token_ids) for sequence, _ in members])
    past = torch.tensor([sequence.past_tokens for sequence, _ in members])
    starts = torch.tensor([end for _, end in members]) - num_new
    num_keys = int((past + num_new).max())
    num_blocks = -(-num_keys // kv.block_size)
    tables = torch.tensor(
        [
            sequence.block_table[:num_blocks] + [0] * (num_blocks - len(sequence.block_table))
            for sequence, _ in members
        ]
    )
    offsets = torch.arange(int(num_new.max()))
    places = torch.minimum(offsets, num_new.unsqueeze(1) - 1)
    rows = starts.unsqueeze(1) + places
    kept = (offsets < num_new.unsqueeze(1)).flatten().nonzero().flatten()
    in_block = torch.arange(kv.block_size, device=kv.device)
    slots = tables.to(kv.device).unsqueeze(2) * kv.block_size + in_block
    return _Group(
        rows=rows.to(kv.device),
        kept=kept.to(kv.device),
        kept_rows=rows.flatten()[kept].to(kv.device),
        slots=slots.flatten(1)[:, :num_keys],
        positions=(past.unsqueeze(1) + places).to(kv.device),
    )


def _attend(
    group: _Group,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attention of a group.

    The query heads that share a key head are put behind one another as further queries of it, so
    that keys and values are not repeated.

    Args:
        group: Who sees what.
        query: `[n, q, num_heads, key_dim]`.
        keys: `[slots, num_kv_heads, key_dim]`.
        values: `[slots, num_kv_heads, value_dim]`.
        call: Scale, window, soft cap and sinks.

    Returns:
        `[n, q, num_heads, value_dim]`.
    """
    n, q, num_heads, _ = query.shape
    num_kv_heads = keys.shape[1]
    shared = num_heads // num_kv_heads
    # [n, q, kv, shared, dim] -> [n, kv, shared * q, dim]
    by_key_head = query.reshape(n, q, num_kv_heads, shared, -1)
    folded = by_key_head.permute(0, 2, 3, 1, 4).flatten(2, 3)
    key = keys[group.slots].transpose(1, 2)
    value = values[group.slots].transpose(1, 2)
    mask = group.mask(call.sliding_window).repeat(1, 1, shared, 1)
    if call.softcap or call.sinks is not None:
        attended = _explicit(folded, key, value, mask, call)
    else:
        with _chosen_kernel(folded):
            attended = functional.scaled_dot_product_attention(
                folded, key, value, attn_mask=mask, scale=call.scaling
            )
    by_query_head = attended.reshape(n, num_kv_heads, shared, q, -1)
    return by_query_head.permute(0, 3, 1, 2, 4).reshape(n, q, num_heads, -1)


def _chosen_kernel(query: torch.Tensor) -> AbstractContextManager[None]:
    """Which of torch's kernels a GPU takes.

    In float32 the plain one, as others round products to TF32. In half precision not cuDNN, which
    plans for each number of keys anew.
    """
    if query.device.type == "cpu":
        return nullcontext()
    plain = SDPBackend.MATH
    backends = [plain] if query.dtype is torch.float32 else [SDPBackend.EFFICIENT_ATTENTION, plain]
    chosen: AbstractContextManager[None] = sdpa_kernel(backends)
    return chosen


def _explicit(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """What `scaled_dot_product_attention` cannot do: a soft cap, a sink per head; in float32."""
    scores = (query.float() @ key.float().transpose(2, 3)) * call.scaling
    if call.softcap:
        scores = torch.tanh(scores / call.softcap) * call.softcap
    scores = scores.masked_fill(~mask, -torch.inf)
    if call.sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        # One more logit for each query, whose weight is dropped.
        n, num_kv_heads, rows, _ = scores.shape
        sinks = call.sinks.reshape(num_kv_heads, -1)
        per_query = sinks.repeat_interleave(rows // sinks.shape[1], dim=1)
        column = per_query.expand(n, -1, -1).unsqueeze(3)
        weights = torch.softmax(torch.cat((scores, column), dim=3), dim=-1)[..., :-1]
    return (weights @ value.float()).to(query.dtype)
