"""From a path, a hub id or a live module to what the engine needs to know about a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagedlora.engine.devices import parse_device
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


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
        InvalidArgumentError: A path does not exist, device or dtype is not possible, or a live
            module is on another device.
        GpuUnavailableError: A GPU was asked for and there is none.
        UnsupportedModelError: The module is not a transformers model.
    """
    place = parse_device(device)
    wanted = None if dtype == "auto" else parse_dtype(dtype)
    if not isinstance(model, nn.Module):
        source = _source(model)
        place = place or torch.device("cpu")
        model = _from_pretrained(source, wanted).to(place)
        if tokenizer is None:
            tokenizer = _tokenizer_beside(source)
    if isinstance(tokenizer, (str, os.PathLike)):
        tokenizer = _tokenizer_from(_source(tokenizer))
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
    if found not in _DTYPES.values():
        raise InvalidArgumentError(
            f"dtype {dtype!r}: it must be 'auto' or one of {', '.join(map(repr, _DTYPES))}"
        )
    assert found is not None
    return found


def skeleton(model: str | os.PathLike[str]) -> nn.Module:
    """The modules of a model without memory for its weights.

    Args:
        model: A directory or a hub id.

    Raises:
        InvalidArgumentError: A path does not exist.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(_source(model))
    with torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config)
    return module


def _source(path: str | os.PathLike[str]) -> str:
    """The path as a string; a path that cannot be a hub id must exist."""
    source = os.fspath(path)
    is_path = isinstance(path, os.PathLike) or source.startswith(("/", ".", "~"))
    source = os.path.expanduser(source)
    if is_path and not os.path.exists(source):
        raise InvalidArgumentError(f"{source} does not exist: give a directory or a hub id")
    return source


def _from_pretrained(source: str, dtype: torch.dtype | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        source, dtype="auto" if dtype is None else dtype
    )
    return model


def _tokenizer_from(source: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source)


def _tokenizer_beside(source: str) -> Any | None:
    """The tokenizer of a model directory or hub id; None if a directory has none."""
    directory = Path(source)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    return _tokenizer_from(source)


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
