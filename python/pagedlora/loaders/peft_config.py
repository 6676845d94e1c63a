"""Reads PEFT's adapter configuration: every field is used, harmless, or refused by name.

A field that this release does not know is refused as soon as it says anything: ignoring it could
change answers without anybody noticing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedlora import _core
from pagedlora.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    AdapterReadError,
    PagedLoraError,
    UnsupportedAdapterError,
)
from pagedlora.paths import is_possible_path

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
_MAX_RANK = 2**31 - 1
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127

_USED = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "target_modules"})

_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
    }
)
"""They do not change what a trained adapter answers at inference."""

_HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian"),
}
"""Values that leave the base model and the formula alone; other values are refused."""


@dataclass(frozen=True, slots=True)
class PeftLoraConfig:
    """What of a PEFT configuration decides an adapter's answers.

    Attributes:
        r: Rank of every module.
        lora_alpha: Scaling numerator.
        use_rslora: Whether the scale is alpha / sqrt(r) (rank-stabilised LoRA) or alpha / r.
        target_modules: Names as PEFT wrote them, or "all-linear".
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str

    @property
    def scale(self) -> float:
        """The factor of B A x, as PEFT's `LoraLayer.update_layer` computes it."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)


def read_peft_config(
    directory: str | os.PathLike[str], root: _core.AdapterRoot | None = None
) -> PeftLoraConfig:
    """Reads `adapter_config.json` of a PEFT directory.

    Args:
        directory: Holds the file.
        root: Where the file must lie; None: anywhere.

    Returns:
        The checked configuration.

    Raises:
        AdapterNotFoundError: The directory or the file does not exist.
        AdapterPathError: The file does not lie in the root.
        AdapterReadError: The system will not read it.
        AdapterFormatError: It is not a JSON object, or a used field has an impossible value.
        UnsupportedAdapterError: A field asks for something that is not supported.
    """
    path = Path(directory) / CONFIG_NAME
    return parse_peft_config(_read_json(path, root), str(path))


def parse_peft_config(fields: Mapping[str, Any], path: str) -> PeftLoraConfig:
    """Checks a PEFT configuration given as its fields.

    Args:
        fields: As in `adapter_config.json`.
        path: Named in errors.

    Returns:
        The checked configuration.

    Raises:
        AdapterFormatError: A used field is missing or has an impossible value.
        UnsupportedAdapterError: A field asks for something that is not supported.
    """
    for name, value in fields.items():
        _check_supported(name, value)
    if fields.get("peft_type", "LORA") != "LORA":
        raise UnsupportedAdapterError(
            f"peft_type {_shorten(fields['peft_type'])} is not supported: only 'LORA' is",
            field="peft_type",
        )
    config = PeftLoraConfig(
        r=_rank(fields, path),
        lora_alpha=_alpha(fields, path),
        use_rslora=_flag(fields, "use_rslora", path),
        target_modules=_target_modules(fields, path),
    )
    if abs(config.scale) > _MAX_FLOAT32:
        raise _format_error(
            path,
            f"has r={config.r} and lora_alpha={config.lora_alpha}: the scale is over float32's "
            "range",
        )
    return config


def _read_json(path: Path, root: _core.AdapterRoot | None) -> Mapping[str, Any]:
    try:
        content = _read_regular_file(path, root)
    except AdapterNotFoundError:
        raise AdapterNotFoundError(
            f"there is no {CONFIG_NAME} in '{path.parent}': give the directory that "
            "PEFT's save_pretrained wrote",
            name=str(path),
        ) from None
    if len(content) > MAX_CONFIG_BYTES:
        raise _format_error(str(path), f"is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise _format_error(str(path), f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise _format_error(str(path), "is not a JSON object")
    return fields


def _read_regular_file(path: Path, root: _core.AdapterRoot | None) -> bytes:
    """At most one byte more than `MAX_CONFIG_BYTES`."""
    if not is_possible_path(str(path)):
        raise AdapterNotFoundError(f"no file can be at {str(path)!r}", name=str(path))
    try:
        with open(_core.open_file(str(path), root), "rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except PagedLoraError:
        raise  # some are OSErrors themselves
    except OSError as error:
        raise AdapterReadError(
            f"'{path}' cannot be read: {error.strerror}", path=str(path), errno=error.errno
        ) from error


def _check_supported(name: str, value: Any) -> None:
    if name in _USED or name in _HARMLESS:
        return
    if name in _HARMLESS_VALUES:
        if any(value is known or value == known for known in _HARMLESS_VALUES[name]):
            return
    elif value is None or value is False or value in ({}, [], ""):
        return
    raise UnsupportedAdapterError(
        f"the adapter's configuration has {name:.80}={_shorten(value)}, which would "
        "change its answers and is not supported: only plain LoRA and rank-stabilised LoRA are",
        field=name,
    )


def _rank(fields: Mapping[str, Any], path: str) -> int:
    rank = fields.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MAX_RANK:
        raise _format_error(
            path, f"has r={_shorten(rank)}: it must be an integer from 1 to {_MAX_RANK}"
        )
    return rank


def _alpha(fields: Mapping[str, Any], path: str) -> float:
    alpha: Any = fields.get("lora_alpha")
    is_number = isinstance(alpha, (int, float)) and not isinstance(alpha, bool)
    if is_number and -_MAX_FLOAT32 <= alpha <= _MAX_FLOAT32:
        return float(alpha)
    raise _format_error(
        path, f"has lora_alpha={_shorten(alpha)}: it must be a number in float32's range"
    )


def _flag(fields: Mapping[str, Any], name: str, path: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _format_error(path, f"has {name}={_shorten(value)}: it must be true or false")
    return value


def _target_modules(fields: Mapping[str, Any], path: str) -> tuple[str, ...] | str:
    targets = fields.get("target_modules")
    if targets == "all-linear":
        return "all-linear"
    if isinstance(targets, str):
        raise UnsupportedAdapterError(
            f"target_modules is the regular expression {_shorten(targets)}: only a list of names "
            "or 'all-linear' is supported",
            field="target_modules",
        )
    if not isinstance(targets, list) or not targets or not all(isinstance(t, str) for t in targets):
        raise _format_error(
            path, f"has target_modules={_shorten(targets)}: a list of names is needed"
        )
    return tuple(targets)


def _shorten(value: Any) -> str:
    return f"{value!r:.80}"


def _format_error(path: str, problem: str) -> AdapterFormatError:
    return AdapterFormatError(f"'{path}' {problem}", path=path, tensor="")
