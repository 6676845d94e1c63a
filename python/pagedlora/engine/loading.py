"""From a path, a hub id or a live module to what the engine needs to know about a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagedlora.engine.devices import parse_device
from pagedlora.engine.pretrained import (
    load_pretrained,
    load_tokenizer,
    to_source,
    tokenizer_beside,
)
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError
from pagedlora.shown import shown

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class LoadedModel:
    """A model and what its configuration says.

    Attributes:
        model: A causal language model.
        device: Where all of it lies: the CPU, or one GPU.
        tokenizer: Of transformers, or None.
        dtype: Of its weights.
        eos_token_ids: Tokens that end an answer.
        max_model_tokens: Most tokens of prompt and answer together; None if it does not say.
        vocab_size: Token ids are 0 to this, exclusive.
    """

    model: nn.Module
    device: torch.device
    tokenizer: Any | None
    dtype: torch.dtype
    eos_token_ids: frozenset[int]
    max_model_tokens: int | None
    vocab_size: int


def load_model(
    model: str | os.PathLike[str] | nn.Module,
    tokenizer: Any | None = None,
    *,
    device: str = "auto",
    dtype: str | torch.dtype = "auto",
) -> LoadedModel:
    """Loads a model, or takes a live one as it is.

    Args:
        model: A directory, a hub id or a live module.
        tokenizer: A tokenizer, or the directory or hub id of one. None: the one beside the
            model's files if there is one; without it prompts are token ids and texts are "".
        device: "cpu", "cuda" or "cuda:N". "auto": where a live module is; for a path or hub id the
            CPU, as long as the part for GPUs has not run on one.
        dtype: "auto" is the model's own; a live module is not converted.

    Raises:
        InvalidArgumentError: An argument is of another type, device or dtype is not possible, or a
            live module is on another device.
        ModelLoadError: The model or the tokenizer is not there, or its files cannot be read.
        GpuUnavailableError: A GPU was asked for and there is none.
        UnsupportedModelError: It is no causal language model of transformers.
    """
    place = parse_device(device)
    wanted = None if isinstance(dtype, str) and dtype == "auto" else parse_dtype(dtype)
    if not isinstance(model, nn.Module):
        source = to_source(model, "model")
        place = place or torch.device("cpu")
        if tokenizer is not None:  # before the weights, which take long
            tokenizer = _checked_tokenizer(tokenizer)
        model = load_pretrained(source, wanted).to(place)
        if tokenizer is None:
            tokenizer = tokenizer_beside(source)
    tokenizer = _checked_tokenizer(tokenizer)
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model: it has no configuration"
        )
    return LoadedModel(
        model=model,
        device=_checked_device(model, place),
        tokenizer=tokenizer,
        dtype=_checked_dtype(model, wanted),
        eos_token_ids=_eos_token_ids(model, tokenizer),
        max_model_tokens=_positive(
            getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
        ),
        vocab_size=_vocab_size(model),
    )


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype:
    """The torch type of a name; a torch type passes.

    Raises:
        InvalidArgumentError: The core does not compute in it.
    """
    found = _DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or found not in _DTYPES.values():
        raise InvalidArgumentError(
            f"dtype {shown(dtype)}: it must be 'auto' or one of {', '.join(map(repr, _DTYPES))}"
        )
    return found


def _checked_tokenizer(tokenizer: Any) -> Any | None:
    """A tokenizer or its source as a tokenizer, which must turn texts into ids and back."""
    if isinstance(tokenizer, (str, os.PathLike)):
        return load_tokenizer(to_source(tokenizer, "tokenizer"))
    is_one = callable(tokenizer) and callable(getattr(tokenizer, "decode", None))
    if tokenizer is not None and not is_one:
        raise InvalidArgumentError(
            f"tokenizer is {shown(tokenizer)}: give one of transformers, which is called with a "
            "text and has decode(), or the directory or hub id of one, or None"
        )
    return tokenizer


def _checked_device(model: nn.Module, wanted: torch.device | None) -> torch.device:
    """Where the model is, which must be one device of ours."""
    devices = {parameter.device for parameter in model.parameters()} or {torch.device("cpu")}
    device = next(iter(devices))
    if len(devices) > 1:
        raise InvalidArgumentError(
            f"the module is spread over {', '.join(sorted(map(str, devices)))}: move it to one"
        )
    if wanted is not None and (
        device.type != wanted.type or wanted.index not in (None, device.index)
    ):
        raise InvalidArgumentError(
            f"the module is on {device}, and device asks for {wanted}: a live module is given back "
            f"unchanged, so move it yourself with model.to('{wanted}'), or leave device 'auto'"
        )
    parse_device(str(device))
    return device


def _checked_dtype(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    """The type of the model's weights, which must be one that the core computes in."""
    parameter = next(iter(model.parameters()), None)
    dtype = torch.float32 if parameter is None else parameter.dtype
    if wanted is not None and wanted != dtype:
        raise InvalidArgumentError(
            f"the module is {dtype}, and dtype asks for {wanted}: a live module is given back "
            f"unchanged, so convert it yourself with model.to({wanted}), or leave dtype 'auto'"
        )
    if dtype not in _DTYPES.values():
        raise UnsupportedModelError(
            f"{type(model).__name__} has weights of {dtype}: supported are {', '.join(_DTYPES)}"
        )
    return dtype


def _eos_token_ids(model: nn.Module, tokenizer: Any | None) -> frozenset[int]:
    """End-of-sequence tokens of the generation configuration, else model, else tokenizer."""
    candidates = (
        getattr(getattr(model, "generation_config", None), "eos_token_id", None),
        getattr(model.config, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    for value in candidates:
        if value is not None:
            return frozenset(value if isinstance(value, Iterable) else (int(value),))
    return frozenset()


def _vocab_size(model: nn.Module) -> int:
    """Rows of the input embedding."""
    embeddings = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embeddings, "num_embeddings", None)
    config: Any = model.config
    return int(config.vocab_size if rows is None else rows)


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
