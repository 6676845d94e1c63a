"""NeMo archives of known content, well made or not."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

KQV = "self_attention.adapter_layer.lora_kqv_adapter"
CONFIG = "model_config.yaml"
WEIGHTS = "model_weights.ckpt"


@dataclass(frozen=True)
class Heads:
    """Of a model's attention."""

    heads: int
    groups: int
    size: int

    @property
    def parts(self) -> tuple[int, int, int]:
        """Outputs of q, k and v."""
        kv = self.groups * self.size
        return self.heads * self.size, kv, kv

    def fields(self, **lora: Any) -> dict[str, Any]:
        """What NeMo saves, as far as it matters."""
        return {
            "num_attention_heads": self.heads,
            "num_query_groups": self.groups,
            "hidden_size": self.heads * self.size,
            "kv_channels": None,
            "peft": {"peft_scheme": "lora", "lora_tuning": {"weight_tying": False, **lora}},
        }

    def to_nemo(self, b: torch.Tensor) -> torch.Tensor:
        """Rows of q|k|v in NeMo's order, head by head: an oracle that moves one row at a time."""
        q_end, k_end, _ = torch.tensor(self.parts).cumsum(0).tolist()
        rows = []
        for group in range(self.groups):
            per_group = self.heads // self.groups
            for head in range(group * per_group, (group + 1) * per_group):
                rows += [b[head * self.size + i] for i in range(self.size)]
            rows += [b[q_end + group * self.size + i] for i in range(self.size)]
            rows += [b[k_end + group * self.size + i] for i in range(self.size)]
        return torch.stack(rows)


Pairs = Mapping[int, tuple[torch.Tensor, torch.Tensor]]
"""Layer to A and B of its q|k|v, B in the order of models here."""


def draw_pairs(heads: Heads, layers: Sequence[int], rank: int, seed: int) -> Pairs:
    """Small numbers, other ones for other seeds."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.4

    hidden, total = heads.heads * heads.size, sum(heads.parts)
    return {layer: (draw(rank, hidden), draw(total, rank)) for layer in layers}


def state_of(heads: Heads, pairs: Pairs, prefix: str = "model.") -> dict[str, Any]:
    """What NeMo saves as weights."""
    state: dict[str, Any] = {}
    for layer, (a, b) in pairs.items():
        state[f"{prefix}layers.{layer}.{KQV}.linear_in.weight"] = a
        state[f"{prefix}layers.{layer}.{KQV}.linear_out.weight"] = heads.to_nemo(b)
    return state


def pickled(state: Any) -> bytes:
    """As `torch.save` writes it."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def member(name: str, content: bytes = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A member of an archive; `fields` are put into its header."""
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, content


def tar_of(members: Sequence[tuple[tarfile.TarInfo, bytes]], **options: Any) -> bytes:
    """An archive; headers say what they were given, whether it is true or not."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", **options) as archive:
        for info, content in members:
            archive.addfile(info)
            buffer.write(content + bytes(-len(content) % 512))
            archive.offset += len(content) + -len(content) % 512
    return buffer.getvalue()


def write_nemo(
    path: Path,
    heads: Heads,
    pairs: Pairs,
    *,
    state: Any = None,
    fields: Any = None,
    prefix: str = "",
    zipped: bool = False,
) -> Path:
    """A .nemo file.

    Args:
        path: The file.
        heads: Of the model.
        pairs: The adapter.
        state: Put instead of its weights.
        fields: Put instead of its configuration; bytes are written as they are.
        prefix: Of the members' names.
        zipped: Whether by gzip.
    """
    fields = heads.fields() if fields is None else fields
    config = fields if isinstance(fields, bytes) else yaml.safe_dump(fields).encode()
    weights = pickled(state_of(heads, pairs) if state is None else state)
    content = tar_of([member(prefix + CONFIG, config), member(prefix + WEIGHTS, weights)])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if zipped else content)
    return path
