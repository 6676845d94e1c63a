"""The examples in README and documentation run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.adapters import PREFIX, adapter_tensors, write_random_adapter
from tests.support.encoders import (
    EncoderAdapter,
    EncoderOracle,
    build_classifier,
    save_encoder_adapters,
)
from tests.support.saved_models import save_model_with_tokenizer

from pagedlora import LoraModelConfig

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"
MAX_LINES = 20


def _examples(document: Path) -> list[str]:
    """The Python blocks of a document."""
    return re.findall(r"```python\n(.*?)```", document.read_text(), flags=re.DOTALL)


def _run_example(document: Path, number: int, count: int) -> dict[str, Any]:
    """Runs one of `count` examples; returns its variables."""
    examples = _examples(document)
    assert len(examples) == count
    scope: dict[str, Any] = {}
    exec(compile(examples[number], str(document), "exec"), scope)
    return scope


def test_the_readmes_examples_are_short() -> None:
    assert max(len(example.strip().splitlines()) for example in _examples(README)) <= MAX_LINES


def test_the_readmes_example_runs_and_gives_four_different_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = LoraModelConfig.from_module(save_model_with_tokenizer(tmp_path / "my-model"))
    for seed, name in enumerate(("support", "legal", "pirate")):
        write_random_adapter(tmp_path / "adapters" / name, modules, rank=2 + 3 * seed, seed=seed)
    monkeypatch.chdir(tmp_path)

    outputs = _run_example(README, 0, 2)["outputs"]
    assert isinstance(outputs, list)
    assert all(output.error is None for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(outputs)
    printed = capsys.readouterr().out
    assert "device tier: " in printed
    assert "3 reads of files" in printed


def test_the_example_of_a_classifier_answers_each_row_with_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_classifier()
    model.save_pretrained(tmp_path / "my-classifier")
    adapters = {
        "spam": EncoderAdapter(4, ("query", "value")),
        "team/topics": EncoderAdapter(8, ("query",)),
    }
    directories = save_encoder_adapters(tmp_path / "classifiers", model, adapters)
    monkeypatch.chdir(tmp_path)

    scope = _run_example(README, 1, 2)

    names = ["spam", "team/topics", None]
    expected = EncoderOracle(build_classifier(), directories)(names, **scope["inputs"])
    torch.testing.assert_close(scope["logits"], expected, rtol=1e-4, atol=1e-4)
    assert (expected[0] - expected[1]).abs().max() > 0.01
    scope["cache"].check_invariants()


def test_the_example_without_the_engine_adds_the_adapter_to_its_rows_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = LoraModelConfig.from_module(save_model_with_tokenizer(tmp_path / "my-model"))
    write_random_adapter(tmp_path / "adapters" / "support", modules, rank=4, seed=1, lora_alpha=8)
    monkeypatch.chdir(tmp_path)

    scope = _run_example(ARCHITECTURE, 0, 1)

    x, name = scope["x"], scope["name"]
    tensors = adapter_tensors(modules.modules, 4, 1)
    a, b = (tensors[f"{PREFIX}{name}.lora_{matrix}.weight"] for matrix in "AB")
    expected = scope["module"](x).detach()
    expected[:5] += 2.0 * (x[:5] @ a.T) @ b.T
    torch.testing.assert_close(scope["y"], expected, rtol=1e-4, atol=1e-3)
    assert not torch.equal(scope["y"][:5], scope["module"](x).detach()[:5])
    assert scope["cache"].active_tasks == {}
