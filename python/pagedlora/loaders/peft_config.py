"""Reads PEFT's adapter configuration: every field is used, harmless, or refused by name.

`peft_fields.py` says which is which. A field that it does not know is refused as soon as it says
anything: ignoring it could change answers without anybody noticing.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedlora import _core
from pagedlora.errors import (
    AdapterNotFoundError,
    AdapterReadError,
    PagedLoraError,
    UnsupportedAdapterError,
)
from pagedlora.loaders.peft_fields import PEFT_FIELDS, says_nothing, starts_at_zero
from pagedlora.loaders.peft_values import FieldReader, format_error, shorten
from pagedlora.loaders.wrong_place import why_missing
from pagedlora.paths import is_possible_path
from pagedlora.shown import quoted

CONFIG_NAME = "adapter_config.json"
MAX_CONFIG_BYTES = 4 << 20
_MAX_NOTES = 20
_NO_SETTINGS = ("starts_at_zero", "notes", "base_model", "path")


@dataclass(frozen=True, slots=True)
class PeftLoraConfig:
    """What of a PEFT configuration decides an adapter's answers.

    Attributes:
        r: Rank of the modules that `rank_pattern` does not mean.
        lora_alpha: Scaling numerator of those that `alpha_pattern` does not mean.
        use_rslora: Whether the scale is alpha / sqrt(r) (rank-stabilised LoRA) or alpha / r.
        target_modules: Names, a regular expression, or "all-linear".
        rank_pattern: Key to rank, in the order of the file.
        alpha_pattern: Key to alpha, in the order of the file.
        exclude_modules: Names or a regular expression; empty: none.
        layers_to_transform: Numbers of the layers that are meant; empty: all.
        layers_pattern: What stands before the number of a layer; empty: anything.
        use_dora: Whether each module has a magnitude vector.
        lora_bias: Whether each B has a bias.
        starts_at_zero: Whether target modules without tensors answer like the base model.
        notes: What was ignored, and why.
        base_model: What it was trained on, for errors; "" if it does not say.
        path: Names the file in errors.
    """

    r: int
    lora_alpha: float
    use_rslora: bool
    target_modules: tuple[str, ...] | str
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    exclude_modules: tuple[str, ...] | str = ()
    layers_to_transform: tuple[int, ...] = ()
    layers_pattern: tuple[str, ...] = ()
    use_dora: bool = False
    lora_bias: bool = False
    starts_at_zero: bool = True
    notes: tuple[str, ...] = ()
    base_model: str = field(default="", compare=False)
    path: str = field(default="", compare=False)

    def key(self) -> tuple[object, ...]:
        """Equal for configurations that say the same, in whatever order."""
        targets = self.target_modules
        return (
            self.r,
            self.lora_alpha,
            self.use_rslora,
            targets if isinstance(targets, str) else tuple(sorted(targets)),
            tuple(self.rank_pattern.items()),
            tuple(self.alpha_pattern.items()),
            self.exclude_modules,
            self.layers_to_transform,
            self.layers_pattern,
            self.use_dora,
            self.lora_bias,
            self.starts_at_zero,
            self.notes,
        )

    def settings(self) -> dict[str, Any]:
        """The fields of the file that are there and decide the answers."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        always = ("r", "lora_alpha", "target_modules")
        return {
            name: value
            for name, value in values.items()
            if name in always or (value and name not in _NO_SETTINGS)
        }


def read_peft_config(
    directory: str | os.PathLike[str],
    root: _core.AdapterRoot | None = None,
    *,
    strict: bool = True,
) -> PeftLoraConfig:
    """Reads `adapter_config.json` of a PEFT directory.

    Args:
        directory: Holds the file.
        root: Where the file must lie; None: anywhere.
        strict: As in `parse_peft_config`.

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
    return parse_peft_config(_read_json(path, root), str(path), strict=strict)


def read_base_model(directory: str | os.PathLike[str]) -> str:
    """What an adapter in a directory says that it was trained on; "" if that cannot be read."""
    try:
        return _base_model(_read_json(Path(directory) / CONFIG_NAME, None))
    except PagedLoraError:
        return ""


def parse_peft_config(
    fields: Mapping[str, Any], path: str, *, strict: bool = True
) -> PeftLoraConfig:
    """Checks a PEFT configuration given as its fields.

    Args:
        fields: As in `adapter_config.json`.
        path: Named in errors.
        strict: Whether fields that nobody knows are refused, or noted.

    Returns:
        The checked configuration.

    Raises:
        AdapterFormatError: A used field is missing or has an impossible value.
        UnsupportedAdapterError: A field asks for something that is not supported.
    """
    notes: list[str] = []
    for name in sorted(fields, key=_says_less):
        _check_supported(name, fields[name], strict, notes)
    values = FieldReader(fields, path)
    return PeftLoraConfig(
        r=values.rank("r"),
        lora_alpha=values.number("lora_alpha"),
        use_rslora=values.flag("use_rslora"),
        target_modules=values.targets(),
        rank_pattern=values.rank_pattern(),
        alpha_pattern=values.alpha_pattern(),
        exclude_modules=values.names_or_expression("exclude_modules"),
        layers_to_transform=values.layers(),
        layers_pattern=values.layers_pattern(),
        use_dora=values.flag("use_dora"),
        lora_bias=_lora_bias(values),
        starts_at_zero=starts_at_zero(fields.get("init_lora_weights", True)),
        notes=tuple(notes),
        base_model=_base_model(fields),
        path=path,
    )


def _base_model(fields: Mapping[str, Any]) -> str:
    name = fields.get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def _lora_bias(values: FieldReader) -> bool:
    lora_bias = values.flag("lora_bias")
    if lora_bias and values.flag("use_dora"):
        raise UnsupportedAdapterError(
            "the adapter's configuration has lora_bias=True together with use_dora=True, which "
            "PEFT does not define. Way out: train with one of them",
            field="lora_bias",
        )
    return lora_bias


def _read_json(path: Path, root: _core.AdapterRoot | None) -> Mapping[str, Any]:
    try:
        content = _read_regular_file(path, root)
    except AdapterNotFoundError:
        raise AdapterNotFoundError(why_missing(path, root), name=str(path)) from None
    return fields_of(content, str(path))


def fields_of(content: bytes, path: str) -> Mapping[str, Any]:
    """The fields of a configuration as its file has them.

    Args:
        content: JSON.
        path: Named in errors.

    Raises:
        AdapterFormatError: It is longer than `MAX_CONFIG_BYTES`, or no JSON object, or has a member
            twice.
    """
    if len(content) > MAX_CONFIG_BYTES:
        raise format_error(path, f"is longer than {MAX_CONFIG_BYTES} bytes")
    try:
        fields = json.loads(content, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise format_error(path, f"is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise format_error(path, "is not a JSON object")
    return fields


def _read_regular_file(path: Path, root: _core.AdapterRoot | None) -> bytes:
    """At most one byte more than `MAX_CONFIG_BYTES`."""
    if not is_possible_path(str(path)):
        raise AdapterNotFoundError(f"no file can be at {quoted(str(path))}", name=str(path))
    try:
        with open(_core.open_file(str(path), root), "rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except PagedLoraError:
        raise  # some are OSErrors themselves
    except OSError as error:
        raise AdapterReadError(
            f"{quoted(str(path))} cannot be read: {error.strerror}",
            path=str(path),
            errno=error.errno,
        ) from error


def _check_supported(name: str, value: Any, strict: bool, notes: list[str]) -> None:
    known = PEFT_FIELDS.get(name)
    if known is None:
        _check_unknown(name, value, strict, notes)
    elif known.rule == "nested":
        for inner, inner_value in value.items() if isinstance(value, dict) else ():
            _check_supported(f"{name}.{inner}", inner_value, strict, notes)
    elif known.is_refused(value):
        unless = f"; {known.accepted} would load" if known.accepted else ""
        raise UnsupportedAdapterError(
            f"the adapter's configuration has {name}={shorten(value)}, which is not supported: "
            f"{known.why}{unless}. Way out: {known.way_out}",
            field=name,
        )


def _says_less(name: str) -> tuple[bool, bool]:
    """Of several fields that are refused the first one is named: the method, then known ones."""
    return name != "peft_type", name not in PEFT_FIELDS


def _check_unknown(name: str, value: Any, strict: bool, notes: list[str]) -> None:
    if says_nothing(value):
        return
    problem = f"{name:.80}={shorten(value)}, a field that this release does not know"
    if strict:
        raise UnsupportedAdapterError(
            f"the adapter's configuration has {problem}: it could change the answers. Way out: "
            "remove it if it does not, or ignore such fields with strict=False",
            field=name,
        )
    if len(notes) < _MAX_NOTES:
        notes.append(f"ignored {problem}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r:.80} is there twice")
    return members
