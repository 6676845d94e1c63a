"""The attention function that transformers calls, and what it accepts.

transformers looks attention functions up by name in a table of the whole process, so ours is one
function. What a call belongs to it learns from a context variable, which a forward sets for its
own duration: any number of models can be alive, in any number of threads, and nothing is stored
on a model's modules.

A family passes its peculiarities as arguments. Each must be honoured or known to be harmless;
any other stops the forward, because ignoring it would change answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from pagedlora.errors import UnsupportedModelError
from pagedlora.shown import quoted

ATTENTION_NAME = "pagedlora"

# Arguments that may have any value: they restate what the step knows (the positions are ours, the
# cache is ours) or concern outputs that nobody asks for.
_HARMLESS = frozenset(
    {"position_ids", "cache_position", "use_cache", "output_router_logits", "output_hidden_states"}
)
# Arguments that are harmless with one value besides None.
_HARMLESS_VALUES = {"dropout": 0.0, "is_causal": True, "output_attentions": False}


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's checked request for attention.

    Attributes:
        layer_idx: The layer's number.
        query: `[1, num_heads, T, key_dim]`, any strides.
        key: `[1, num_kv_heads, T, key_dim]`, any strides.
        value: `[1, num_kv_heads, T, value_dim]`, any strides.
        scaling: Factor of the scores.
        sliding_window: Keys seen by a query, its own included; 0: all.
        softcap: Bound of the scaled scores; 0.0: none.
        sinks: `[num_heads]` float32 contiguous, an extra logit per head; None: none.
    """

    layer_idx: int
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scaling: float
    sliding_window: int
    softcap: float
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """What a forward does with its attention calls."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Answers one call.

        Args:
            call: The checked request; its tensors are valid during the call only.

        Returns:
            `[1, T, num_heads, value_dim]`.
        """
        ...


_current_step: ContextVar[AttentionStep | None] = ContextVar("pagedlora_step", default=None)


@contextmanager
def attention_step(step: AttentionStep) -> Iterator[None]:
    """Makes `step` answer the attention calls of this thread until the block ends."""
    token = _current_step.set(step)
    try:
        yield
    finally:
        _current_step.reset(token)


def _refuse(module: nn.Module, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__} {what}")


def _check_arguments(
    module: nn.Module, attention_mask: torch.Tensor | None, arguments: dict[str, Any]
) -> None:
    """Refuses whatever would be ignored.

    Raises:
        UnsupportedModelError: Names the argument.
    """
    if attention_mask is not None:
        raise _refuse(module, "makes its own attention_mask, which paged attention does not honour")
    if not getattr(module, "is_causal", True):
        raise _refuse(module, "is not causal (is_causal=False)")
    for name, value in arguments.items():
        if value is None or name in _HARMLESS:
            continue
        if name in _HARMLESS_VALUES and value == _HARMLESS_VALUES[name]:
            continue
        shown = f"of shape {tuple(value.shape)}" if torch.is_tensor(value) else repr(value)
        raise _refuse(
            module, f"passes the attention argument {quoted(name)} ({shown}), which is not honoured"
        )


def _checked_window(module: nn.Module, sliding_window: Any) -> int:
    if sliding_window is None:
        return 0
    if not isinstance(sliding_window, int) or sliding_window < 1:
        raise _refuse(module, f"passes sliding_window={sliding_window!r}; expected an int above 0")
    return sliding_window


def _checked_sinks(
    module: nn.Module, s_aux: torch.Tensor | None, num_heads: int
) -> torch.Tensor | None:
    if s_aux is None:
        return None
    if s_aux.numel() != num_heads:
        raise _refuse(module, f"passes s_aux of shape {tuple(s_aux.shape)} for {num_heads} heads")
    return s_aux.detach().reshape(-1).to(torch.float32).contiguous()


def paged_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it; see `AttentionCall` for shapes.

    Returns:
        `[1, T, num_heads, value_dim]`, and None for the attention weights.

    Raises:
        RuntimeError: The model was called by someone else while an engine holds it.
        UnsupportedModelError: An argument would not be honoured.
    """
    step = _current_step.get()
    if step is None:
        raise RuntimeError(
            "the model is in use by a pagedlora engine: close() the engine before calling the "
            "model directly"
        )
    _check_arguments(module, attention_mask, kwargs)
    layer_idx = getattr(module, "layer_idx", None)
    if layer_idx is None:
        raise _refuse(module, "has no layer_idx")
    if query.dim() != 4 or query.shape[0] != 1:  # noqa: PLR2004 - [1, heads, T, dim]
        raise _refuse(module, f"passes a query of shape {tuple(query.shape)}, not [1, H, T, D]")
    call = AttentionCall(
        layer_idx=layer_idx,
        query=query,
        key=key,
        value=value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        sliding_window=_checked_window(module, sliding_window),
        softcap=0.0 if softcap is None else float(softcap),
        sinks=_checked_sinks(module, s_aux, query.shape[1]),
    )
    return step.attend(call), None


def no_mask(*_: Any, **__: Any) -> None:
    """The mask function: who sees what follows from the block tables."""


AttentionInterface.register(ATTENTION_NAME, paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
