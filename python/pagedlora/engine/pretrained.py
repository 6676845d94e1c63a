"""Models and tokenizers from directories or the Hugging Face hub, by transformers' loaders.

Whatever these raise becomes an error of this package that names the source and what to do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagedlora.arguments import check_type
from pagedlora.errors import InvalidArgumentError, ModelLoadError, UnsupportedModelError
from pagedlora.loaders.peft_config import CONFIG_NAME as ADAPTER_CONFIG_NAME
from pagedlora.loaders.peft_config import read_base_model
from pagedlora.shown import counted, printable, quoted, shown

_CONFIG_NAME = "config.json"
_SHOWN_WEIGHTS = 3
_SHOWN_REASON = 400
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
)


def to_source(path: str | os.PathLike[str], what: str) -> str:
    """A directory or a hub id as a string; a path that cannot be a hub id must exist.

    Args:
        path: As a caller gave it.
        what: What it is of, for messages: "model" or "tokenizer".

    Raises:
        InvalidArgumentError: It is neither, or empty.
        ModelLoadError: There is no such directory.
    """
    is_path = isinstance(path, os.PathLike)
    source = os.fspath(path) if is_path else path
    if not isinstance(source, str) or not source:
        raise InvalidArgumentError(
            f"{what} is {shown(path)}: give a directory, a hub id or a live one"
        )
    is_path = is_path or source.startswith(("/", ".", "~"))
    source = os.path.expanduser(source)
    if os.path.exists(source) and not os.path.isdir(source):
        raise _error(source, what, "it is no directory")
    if is_path and not os.path.exists(source):
        raise ModelLoadError(
            f"{what}: {printable(source)} does not exist: give a directory or a hub id",
            source=source,
        )
    return source


def load_pretrained(source: str, dtype: torch.dtype | None) -> nn.Module:
    """A causal language model with its weights, on the CPU; None is its own dtype.

    Raises:
        ModelLoadError: It is not there, or its files are broken or lack weights.
        UnsupportedModelError: transformers has no causal language model of that kind.
    """
    from transformers import AutoModelForCausalLM

    _check_directory(source)
    with _loading(source, "model"):
        model, info = AutoModelForCausalLM.from_pretrained(
            source, dtype="auto" if dtype is None else dtype, output_loading_info=True
        )
    if getattr(model, "_hf_peft_config_loaded", False):  # of a hub id, with it put into the model
        raise _adapter_error(source)
    missing = sorted(info["missing_keys"])
    if missing:  # transformers draws them at random, and says so in its log only
        raise _missing_error(source, model, missing)
    loaded: nn.Module = model
    return loaded


def skeleton(model: str | os.PathLike[str]) -> nn.Module:
    """The modules of a model without memory for its weights.

    Args:
        model: A directory or a hub id.

    Raises:
        ModelLoadError: It is not there, or its configuration is broken.
        UnsupportedModelError: transformers has no causal language model of that kind.
    """
    from transformers import AutoConfig

    source = to_source(model, "model")
    _check_directory(source)
    with _loading(source, "model"):
        config = AutoConfig.from_pretrained(source)
    return skeleton_of(config, source)


def skeleton_of(config: object, source: str = "") -> nn.Module:
    """The same for a configuration, which was read from the source if that is given.

    Raises:
        InvalidArgumentError: It is no configuration of transformers.
        ModelLoadError: Its values are impossible.
        UnsupportedModelError: transformers has no causal language model of that kind.
    """
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    check_type(config, PreTrainedConfig, "config")
    with _loading(source or type(config).__name__, "model"), torch.device("meta"):
        module: nn.Module = AutoModelForCausalLM.from_config(config)
    return module


def load_tokenizer(source: str) -> Any:
    """The tokenizer of a directory or hub id.

    Raises:
        ModelLoadError: There is none, or its files are broken.
    """
    from transformers import AutoTokenizer

    with _loading(source, "tokenizer"):
        return AutoTokenizer.from_pretrained(source)


def tokenizer_beside(source: str) -> Any | None:
    """The tokenizer of a model directory or hub id; None if a directory has none."""
    directory = Path(source)
    if directory.is_dir() and not any((directory / name).exists() for name in _TOKENIZER_FILES):
        return None
    return load_tokenizer(source)


@contextmanager
def _loading(source: str, what: str) -> Iterator[None]:
    """Translates what transformers raises: OSError, ValueError, and whatever its parts do."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        is_kind = isinstance(error, ValueError) and type(error) is ValueError
        if what == "model" and is_kind:  # of a model that it does not know or would not run
            raise UnsupportedModelError(
                f"model {quoted(source)} cannot be loaded: {printable(reason, _SHOWN_REASON)}"
            ) from error
        raise _error(source, what, reason.rstrip(".")) from error


def _check_directory(source: str) -> None:
    """Refuses a directory that has no model, or an adapter beside it, before anything is loaded."""
    if not os.path.isdir(source):
        return
    has_model = os.path.exists(os.path.join(source, _CONFIG_NAME))
    has_adapter = os.path.exists(os.path.join(source, ADAPTER_CONFIG_NAME))
    if has_model and has_adapter:
        raise ModelLoadError(
            f"model {quoted(source)} cannot be loaded: beside the model is an adapter, "
            f"{ADAPTER_CONFIG_NAME}, and transformers would put it into the model; move "
            f"{ADAPTER_CONFIG_NAME} and adapter_model.* into a directory of their own, and give "
            "that to load_lora()",
            source=source,
        )
    if has_adapter:
        raise _adapter_error(source)
    if not has_model:
        raise _error(source, "model", f"there is no {_CONFIG_NAME} in it")


def _adapter_error(source: str) -> ModelLoadError:
    base = read_base_model(source)
    return ModelLoadError(
        f"model {quoted(source)} cannot be loaded: it is an adapter, it has {ADAPTER_CONFIG_NAME}; "
        f"give a directory or hub id of its base model{f', {quoted(base)},' if base else ''} and "
        "the adapter to load_lora()",
        source=source,
    )


def _missing_error(source: str, model: Any, missing: list[str]) -> ModelLoadError:
    """Names the weights, and what the files are of if that is another kind of model."""
    first = ", ".join(quoted(name) for name in missing[:_SHOWN_WEIGHTS])
    rest = len(missing) - _SHOWN_WEIGHTS
    more = f" and {rest} more" if rest > 0 else ""
    lack = f"lack {counted(len(missing), 'weight')}: {first}{more}"
    saved, needed = getattr(model.config, "architectures", None) or [], type(model).__name__
    if saved and needed not in saved:
        return ModelLoadError(
            f"model {quoted(source)} cannot be loaded: its {_CONFIG_NAME} says that it is a "
            f"{printable(str(saved[0]))}, and as a causal language model, {needed}, its files "
            f"{lack}; give a causal language model, or put adapters into that one with attach()",
            source=source,
        )
    return _error(source, "model", f"its files {lack}")


def _error(source: str, what: str, reason: str) -> ModelLoadError:
    why = printable(reason, _SHOWN_REASON)
    return ModelLoadError(
        f"{what} {quoted(source)} cannot be loaded: {why}; give a directory that "
        "save_pretrained() wrote, or the id of a model on the Hugging Face hub",
        source=source,
    )
