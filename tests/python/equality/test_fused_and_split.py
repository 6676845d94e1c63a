"""Split adapters on fused models and fused ones on split models (design 3.1, 3.5), as PEFT.

PEFT knows no such maps: its judgement is on an adapter with the model's own names that is the same
by arithmetic. A of the parts stand one above the other, B of the parts form a diagonal of blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import PREFIX, Tensors, write_adapter
from tests.support.equality_bench import Bench, open_bench
from tests.support.peft_oracle import Case, PeftOracle, assert_equal_to_peft
from tests.support.row_kinds import silent_peft
from tests.support.sharded_model import ShardedModel
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model, tiny_config

from pagedlora.loaders import binding, fused_modules
from pagedlora.loaders.fused_modules import FusedNames, Part
from pagedlora.loaders.stored import StoredTensor

HIDDEN, LAYERS = 32, 2
OUTS = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
GATED = {"gate_proj": 48, "up_proj": 48}
RANKS = {"q_proj": 5, "k_proj": 2, "v_proj": 9, "gate_proj": 3, "up_proj": 4}
FUSED = {"qkv_proj": (OUTS, "self_attn"), "gate_up_proj": (GATED, "mlp")}


def draw(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * 0.4


def module(layer: int, fused: str, last: str) -> str:
    return f"{PREFIX}model.layers.{layer}.{FUSED[fused][1]}.{last}"


def put(
    tensors: Tensors, name: str, a: torch.Tensor, b: torch.Tensor, m: torch.Tensor | None
) -> None:
    tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"] = a, b
    if m is not None:
        tensors[f"{name}.lora_magnitude_vector"] = m


def make_split(
    seed: int, parts_of: Mapping[str, tuple[str, ...]], *, with_dora: bool
) -> tuple[Tensors, Tensors]:
    """An adapter for parts, and the same for the fused modules, both of scale 1."""
    generator = torch.Generator().manual_seed(seed)
    split: Tensors = {}
    fused: Tensors = {}
    for layer in range(LAYERS):
        for name, trained in parts_of.items():
            outs = FUSED[name][0]
            a = {part: draw(generator, RANKS[part], HIDDEN) for part in trained}
            b = {part: draw(generator, outs[part], RANKS[part]) for part in trained}
            m = {part: 1 + draw(generator, outs[part]).abs() for part in trained}
            for part in trained:
                own_m = m[part] if with_dora else None
                put(split, module(layer, name, part), a[part], b[part], own_m)
            blocks = [b.get(part, torch.zeros(out, 0)) for part, out in outs.items()]
            all_a = torch.cat([a[part] for part in outs if part in a])
            all_m = torch.cat([m[part] for part in outs]) if with_dora else None
            put(fused, module(layer, name, name), all_a, torch.block_diag(*blocks), all_m)
    return split, fused


def make_fused(seed: int, *, with_dora: bool) -> tuple[Tensors, Tensors]:
    """An adapter for fused modules, and the same for their parts, both of scale 1."""
    generator = torch.Generator().manual_seed(seed)
    fused: Tensors = {}
    split: Tensors = {}
    for layer in range(LAYERS):
        for name, (outs, _) in FUSED.items():
            total = sum(outs.values())
            a, b = draw(generator, 6, HIDDEN), draw(generator, total, 6)
            m = 1 + draw(generator, total).abs() if with_dora else None
            put(fused, module(layer, name, name), a, b, m)
            first = 0
            for part, out in outs.items():
                piece = slice(first, first + out)
                own_m = None if m is None else m[piece].clone()
                put(split, module(layer, name, part), a.clone(), b[piece].clone(), own_m)
                first += out
    return fused, split


def write(path: Path, tensors: Tensors, **fields: object) -> Path:
    """With a scale of 1 whatever the ranks."""
    ranks = {
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight"): tensor.shape[0]
        for name, tensor in tensors.items()
        if name.endswith("lora_A.weight")
    }
    patterns = {"rank_pattern": ranks, "alpha_pattern": ranks}
    return write_adapter(path, tensors, r=1, lora_alpha=1, **patterns, **fields)


CASES: dict[str, tuple[str, Callable[[], tuple[Tensors, Tensors]], bool]] = {
    "split on fused": (
        "phi3",
        lambda: make_split(1, {n: tuple(outs) for n, (outs, _) in FUSED.items()}, with_dora=False),
        False,
    ),
    "some parts on fused": (
        "phi3",
        lambda: make_split(
            2,
            {"qkv_proj": ("q_proj", "v_proj"), "gate_up_proj": ("up_proj",)},
            with_dora=False,
        ),
        False,
    ),
    "split DoRA on fused": (
        "phi3",
        lambda: make_split(3, {"qkv_proj": tuple(OUTS)}, with_dora=True),
        True,
    ),
    "fused on split": ("llama", lambda: make_fused(4, with_dora=False), False),
    "fused DoRA on split": ("llama", lambda: make_fused(5, with_dora=True), True),
}


class Exam:
    """An engine, what it is asked, and PEFT with the adapter that is the same by arithmetic."""

    def __init__(self, name: str, path: Path) -> None:
        self.family, make, with_dora = CASES[name]
        ours, theirs = make()
        fields = {"use_dora": with_dora}
        self.adapters = {
            "a": write(path / "ours", ours, **fields),
            "plain": write(path / "plain", make_plain(self.family)),
        }
        with silent_peft():
            self.judge = PeftOracle(
                self.family,
                {"a": write(path / "theirs", theirs, **fields), "plain": self.adapters["plain"]},
            )
        generator = random.Random(7)
        prompts = [[generator.randrange(VOCAB_SIZE) for _ in range(n)] for n in (6, 21)]
        self.cases = [
            Case(name, tuple(prompt)) for name in ("a", "plain", None) for prompt in prompts
        ]

    def check(self, bench: Bench) -> None:
        assert_equal_to_peft(self.judge, self.cases, bench.ask(self.cases))


def make_plain(family: str) -> Tensors:
    """A neighbour in the batch, for a module that is alike in both kinds of models."""
    generator = torch.Generator().manual_seed(9)
    tensors: Tensors = {}
    name = f"{PREFIX}model.layers.1.self_attn.o_proj"
    put(tensors, name, draw(generator, 3, HIDDEN), draw(generator, HIDDEN, 3), None)
    return tensors


@pytest.mark.parametrize("name", CASES)
def test_they_answer_as_the_same_adapter_under_the_models_names(name: str, tmp_path: Path) -> None:
    exam = Exam(name, tmp_path)
    with open_bench(exam.family, exam.adapters) as bench:
        exam.check(bench)
        cache = bench.llm.peft_cache_manager
        cache.evict_unowned("device")
        cache.evict_unowned("host")
        exam.check(bench)
        assert cache.stats.source_rereads == len(exam.adapters)


@pytest.mark.parametrize("tp_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_ranks_answer_together_as_that_adapter(name: str, tp_size: int, tmp_path: Path) -> None:
    """Over four ranks two have the same head of keys and values."""
    exam = Exam(name, tmp_path)
    base = build_tiny_model(exam.family)
    model = ShardedModel(exam.family, base, exam.adapters, tp_size, targets=["all-linear"])
    for case in exam.cases:
        if case.adapter is not None:
            (wanted,) = exam.judge.logits(case, [0])
            got = model.run(case.adapter, torch.tensor([case.prompt]))[-1]
            assert (got - wanted).abs().max() < 1e-4 * wanted.std(), case
    model.close()


def _parts_swapped(names: FusedNames, module: str) -> Part | None:
    """A fault: k lies where v does, and the other way round."""
    swapped = module.replace("k_proj", "x").replace("v_proj", "k_proj").replace("x", "v_proj")
    return _PART(names, swapped)


def _one_row_further(tensor: StoredTensor, first: int, count: int) -> StoredTensor:
    """A fault: every part but the first gets rows of the one before."""
    return _ROWS_OF(tensor, max(0, first - 1), count)


_PART = FusedNames.part
_ROWS_OF = binding.rows_of


FAULTS: list[tuple[str, Any, str, Any]] = [
    ("split on fused", FusedNames, "part", _parts_swapped),
    ("fused on split", binding, "rows_of", _one_row_further),
    ("fused DoRA on split", binding, "rows_of", _one_row_further),
]


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_wrong_offset_is_seen(
    fault: tuple[str, Any, str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, owner, attribute, change = fault
    exam = Exam(name, tmp_path)
    monkeypatch.setattr(owner, attribute, change)
    with (
        open_bench(exam.family, exam.adapters) as bench,
        pytest.raises(AssertionError, match=r"differ|below"),
    ):
        exam.check(bench)


def test_llm_knows_the_sizes_of_parts() -> None:
    assert fused_modules.fused_modules_of(tiny_config("phi3")) == {
        "qkv_proj": OUTS,
        "gate_up_proj": GATED,
    }
