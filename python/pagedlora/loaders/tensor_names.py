"""What the name of a tensor says: the module, the part of it, and what savers put around both.

All rules are the tables below. `split_name` takes a name apart without a model; `NameMatcher` finds
the model's module for what is left.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

PEFT_PREFIX = "base_model.model."
_LANGUAGE_MODEL = "language_model"


class TensorKind(str, Enum):
    """Parts of an adapter's module; the values are how errors call them."""

    A = "lora_A.weight"
    B = "lora_B.weight"
    BIAS = "lora_B.bias"
    MAGNITUDE = "lora_magnitude_vector"
    EMBEDDING_A = "lora_embedding_A"
    EMBEDDING_B = "lora_embedding_B"
    BASE_COPY = "base_layer.weight"
    MODULE_BIAS = "bias"
    WHOLE = "weight"
    UNKNOWN = ""


_KIND_OF_SUFFIX = (
    (re.compile(r"lora_A(?:\.(?P<adapter>[^.]+))?\.weight"), TensorKind.A),
    (re.compile(r"lora_B(?:\.(?P<adapter>[^.]+))?\.weight"), TensorKind.B),
    (re.compile(r"lora_B(?:\.(?P<adapter>[^.]+))?\.bias"), TensorKind.BIAS),
    (
        re.compile(r"lora_magnitude_vector(?:\.(?P<adapter>(?!weight$)[^.]+))?(?:\.weight)?"),
        TensorKind.MAGNITUDE,
    ),
    (re.compile(r"lora_embedding_A(?:\.(?P<adapter>[^.]+))?"), TensorKind.EMBEDDING_A),
    (re.compile(r"lora_embedding_B(?:\.(?P<adapter>[^.]+))?"), TensorKind.EMBEDDING_B),
    (re.compile(r"(?:base_layer\.)?bias"), TensorKind.MODULE_BIAS),
    (re.compile(r"base_layer\.weight"), TensorKind.BASE_COPY),
    (
        re.compile(r"(?:modules_to_save\.(?:(?P<adapter>[^.]+)\.)?)?weight"),
        TensorKind.WHOLE,
    ),
)
_QUICK = {".lora_A.weight": TensorKind.A, ".lora_B.weight": TensorKind.B}
"""What nearly all names end in: no expression is needed for them."""
_QUICK_LENGTH = len(".lora_A.weight")

_MAX_CHARACTERS = 1000
"""Of a name. Wrappers are taken away one by one, in time that grows with the square of it."""

_UNSUPPORTED = {
    TensorKind.MODULE_BIAS: "trained biases of the base model are not supported: use bias='none'",
    TensorKind.WHOLE: "a whole weight would replace the base model's (modules_to_save, or an "
    "embedding that was saved because tokens were added), which is not supported: train LoRA on "
    "that module instead, without new tokens",
    TensorKind.UNKNOWN: "it is neither lora_A.weight nor lora_B.weight of a module, with a name of "
    f"up to {_MAX_CHARACTERS} characters",
}
"""Why a tensor of that kind cannot be used. To support a kind: take it out, and pair it in
`rows.py`."""

_OUTER_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", PEFT_PREFIX)
"""Put in front of whole names: DDP, torch.compile, FSDP, PEFT."""
_INNER_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Put in front of the name of any module inside: torch.compile, FSDP, checkpointing."""


class TensorName(NamedTuple):
    """A name, taken apart.

    Attributes:
        module: The module's name without what savers put around it.
        kind: Which part of it the tensor is.
        adapter: The adapter's name inside; "" if there is none.
        raw: The module's name without PEFT's prefix, which nearly all files have, alone.
    """

    module: str
    kind: TensorKind
    adapter: str
    raw: str


def split_name(name: str) -> TensorName:
    """Takes a tensor's name apart; what it is not used for has `TensorKind.UNKNOWN`."""
    kind = _QUICK.get(name[-_QUICK_LENGTH:])
    if len(name) > _MAX_CHARACTERS:
        return TensorName(name, TensorKind.UNKNOWN, "", name)
    if kind is not None:
        module, adapter = name[:-_QUICK_LENGTH], ""
    else:
        module, kind, adapter = _split_suffix(name)
    raw = module.removeprefix(PEFT_PREFIX)
    if raw.startswith(_OUTER_WRAPPERS):
        raw = raw.replace(PEFT_PREFIX, "", 1)
    module = _unwrap(raw)
    if not module:
        return TensorName(name, TensorKind.UNKNOWN, "", name)
    return TensorName(module, kind, adapter, raw)


def canonical_name(name: str) -> str:
    """A name without what savers put around it, by which equal content is put in one order."""
    parts = split_name(name)
    return f"{parts.module}.{parts.kind.value}"


def why_unsupported(kind: TensorKind) -> str | None:
    """Why tensors of a kind cannot be used; None if they can."""
    return _UNSUPPORTED.get(kind)


def _split_suffix(name: str) -> tuple[str, TensorKind, str]:
    for start in _dots(name):
        module, suffix = name[:start], name[start + 1 :]
        for expression, kind in _KIND_OF_SUFFIX:
            match = expression.fullmatch(suffix)
            if match is not None and not _is_lora_part(module):
                return module, kind, match.groupdict().get("adapter") or ""
    return name, TensorKind.UNKNOWN, ""


def _is_lora_part(module: str) -> bool:
    return module[module.rfind(".") + 1 :].startswith("lora_")


def _dots(name: str) -> Iterator[int]:
    """Where a name may be cut in two: its last four dots, the first of them first."""
    dots: list[int] = []
    dot = name.rfind(".")
    while dot >= 0 and len(dots) < 4:  # noqa: PLR2004
        dots.append(dot)
        dot = name.rfind(".", 0, dot)
    return reversed(dots)


def _unwrap(module: str) -> str:
    while module.startswith(_OUTER_WRAPPERS):
        wrapper = next(each for each in _OUTER_WRAPPERS if module.startswith(each))
        module = module.removeprefix(wrapper)
    for part in _INNER_WRAPPERS:
        if part in module:
            module = _without(part, module)
    return module


class AmbiguousNameError(Exception):
    """A name that could be several modules of the model; says which."""


class NameMatcher:
    """Finds a model's modules by the names that files have for them. Immutable.

    A file's name is the module's own, or differs from it by wrappers only, which the one or the
    other has: see the tables, and `language_model`, which models for several kinds of input have
    and text models have not.
    """

    __slots__ = ("_names", "_reduced")

    def __init__(self, names: Iterable[str]) -> None:
        """Takes the names of all modules that can carry LoRA."""
        self._names = frozenset(names)
        reduced: dict[str, list[str]] = {}
        for name in sorted(self._names):
            reduced.setdefault(_reduce(name), []).append(name)
        self._reduced = {short: tuple(full) for short, full in reduced.items()}

    def find(self, raw: str, module: str) -> str | None:
        """The model's name for a module; None if it has none.

        Args:
            raw: As in `TensorName`.
            module: As in `TensorName`.

        Raises:
            AmbiguousNameError: Several modules could be meant.
        """
        for name in (raw, module):
            if name in self._names:
                return name
        found = self._reduced.get(_reduce(module), ())
        if len(found) > 1:
            raise AmbiguousNameError(" or ".join(f"'{name}'" for name in found))
        return found[0] if found else None


def renamings(raw: str, model_name: str) -> Iterator[str]:
    """How a report calls what a file's name of a module has more or less than the model's."""
    if raw == model_name:
        return
    ours, theirs = Counter(model_name.split(".")), Counter(raw.split("."))
    for part in theirs - ours:
        yield f"{part}. taken away"
    for part in ours - theirs:
        yield f"{part}. put in"


def _reduce(name: str) -> str:
    name = _unwrap(name)
    return _without(_LANGUAGE_MODEL, name) if _LANGUAGE_MODEL in name else name


def _without(wrapper: str, name: str) -> str:
    return ".".join(part for part in name.split(".") if part != wrapper)
