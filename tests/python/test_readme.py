"""The README's example runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.adapters import write_random_adapter
from tests.support.tiny_models import build_tiny_model
from transformers import PreTrainedModel

from pagedlora import LoraModelConfig

README = Path(__file__).parents[2] / "README.md"
MAX_LINES = 20


def _example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    return str(blocks[0])


def _save_model(directory: Path) -> PreTrainedModel:
    """Saves a tiny random Llama with a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    model = build_tiny_model("llama", vocab_size=len(alphabet))
    model.save_pretrained(directory)
    return model


def test_example_is_short() -> None:
    assert len(_example().strip().splitlines()) <= MAX_LINES


def test_example_runs_and_gives_four_different_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = LoraModelConfig.from_module(_save_model(tmp_path / "my-model"))
    for seed, name in enumerate(("support", "legal", "pirate")):
        write_random_adapter(tmp_path / "adapters" / name, modules, rank=2 + 3 * seed, seed=seed)
    monkeypatch.chdir(tmp_path)

    scope: dict[str, object] = {}
    exec(compile(_example(), str(README), "exec"), scope)

    outputs = scope["outputs"]
    assert isinstance(outputs, list)
    assert all(output.error is None for output in outputs)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == len(outputs)
    printed = capsys.readouterr().out
    assert "device tier: " in printed
    assert "3 reads of files" in printed
