"""The tiny demo proves its answers, says so, and fails by name when one adapter is wrong."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from tests.support.saved_models import save_model_with_tokenizer

pytest.importorskip("pagedlora._core", reason="the native part is not built")

from pagedlora import LLM, AdapterInfo
from pagedlora.demo import answers, run, smollm2_scenario, stream, tiny_scenario
from pagedlora.demo.generated_adapters import FLEET_SHAPES, AdapterShape, write_adapters
from pagedlora.demo.run import run_demo
from pagedlora.demo.scenario import DemoError
from pagedlora.demo.smollm2_scenario import find_trained_adapters
from pagedlora.model_config import LoraModelConfig

WIDTH = 100


def run_tiny(**options: object) -> tuple[int, str]:
    """Exit code and output of the tiny demo, as a log of a program that is no terminal."""
    out = io.StringIO()
    code = run_demo(tiny=True, console=Console(file=out, width=WIDTH, highlight=False), **options)
    return code, out.getvalue()


def unwrapped(output: str) -> str:
    """The output with every run of blanks and line ends as one blank."""
    return " ".join(output.split())


def numbers_after(label: str, output: str) -> list[list[int]]:
    """The numbers of every line that starts with the label."""
    lines = re.findall(rf"^ *{label} +(.*)$", output, re.MULTILINE)
    return [[int(n) for n in re.findall(r"-?\d+", line)] for line in lines]


def test_the_tiny_demo_shows_answers_and_cache_and_proves_them() -> None:
    code, output = run_tiny()
    text = unwrapped(output)
    assert code == 0, output
    assert "8 random adapters and the base in one batch, in room for 4 of them" in text
    assert "48 adapters registered" in text
    assert re.search(r"\d+ tokens/s mixed, \d+ tokens/s on the base model alone", text)
    assert re.search(r"Device memory for adapters: \S+ KiB instead of \S+ MiB", text)
    assert "All 16 adapters and the base answer as PEFT does" in text
    assert not re.search("differs|MISMATCH|UNDECIDED|error", text)
    assert output.count("agrees") == 17
    assert len(re.findall(r"layers +re-read +0 ", output)) >= 12
    for label in ("hits", "loads", "of them again", "evictions"):
        rows = numbers_after(label, output)
        assert len(rows) == 2
        assert all(number > 0 for row in rows[1:] for number in row)
    assert all(number > 0 for row in numbers_after("of them again", output) for number in row)
    assert max(map(len, output.splitlines())) <= WIDTH
    shown = re.findall(r"^ +(?:base model|rank-\d+) +(\S.{20,})$", output, re.MULTILINE)[:9]
    assert len(set(shown)) == 9


@pytest.fixture
def only_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the parts of the demo that compare nothing."""
    monkeypatch.setattr(answers, "show_answers", lambda *args: None)
    monkeypatch.setattr(stream, "run_stream", lambda *args: None)


@pytest.mark.usefixtures("only_the_check")
def test_two_swapped_adapters_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LLM.load_lora

    def load_swapped(self: LLM, name: str, path: Path) -> AdapterInfo:
        other = {"rank-3": "rank-16", "rank-16": "rank-3"}.get(name, name)
        return original(self, name, path.with_name(other))

    monkeypatch.setattr(LLM, "load_lora", load_swapped)
    code, output = run_tiny()
    assert code == 1
    assert re.findall(r"MISMATCH +(\S+): token", output) == ["rank-3", "rank-16"]
    assert "but PEFT prefers" in unwrapped(output)


@pytest.mark.usefixtures("only_the_check")
def test_an_adapter_with_another_scale_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    original = LLM.load_lora

    def load_scaled(self: LLM, name: str, path: Path) -> AdapterInfo:
        if name == "rank-12":
            path = Path(shutil.copytree(path, tmp_path / name, dirs_exist_ok=True))
            config = json.loads((path / "adapter_config.json").read_text())
            config["lora_alpha"] *= 1.1
            (path / "adapter_config.json").write_text(json.dumps(config))
        return original(self, name, path)

    monkeypatch.setattr(LLM, "load_lora", load_scaled)
    code, output = run_tiny()
    assert code == 1
    assert re.findall(r"MISMATCH +(\S+): token", output) == ["rank-12"]


@pytest.mark.usefixtures("only_the_check")
def test_adapters_that_change_nothing_leave_the_check_undecided(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiny_scenario, "STRENGTH", 0.0)
    code, output = run_tiny()
    assert code == 1
    assert "UNDECIDED rank-1: answers exactly as base model does" in unwrapped(output)
    assert "MISMATCH" not in output


def test_a_broken_adapter_ends_the_demo_with_its_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = tiny_scenario.write_adapters

    def write_broken(root: Path, *args: object, **kwargs: object) -> dict[str, Path]:
        paths = original(root, *args, **kwargs)
        os.truncate(next(iter(paths.values())) / "adapter_model.safetensors", 100)
        return paths

    monkeypatch.setattr(tiny_scenario, "write_adapters", write_broken)
    code, output = run_tiny()
    assert code == 1
    assert "\nerror: " in output
    assert "adapter_model.safetensors': its header" in output.replace("\n", "")


def test_a_missing_peft_is_said_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        run.importlib.util, "find_spec", lambda name: None if name == "peft" else real(name)
    )
    code, output = run_tiny()
    assert code == 1
    assert "needs peft: pip install 'pagedlora[demo]'" in unwrapped(output)


def test_tiny_takes_no_model() -> None:
    code, output = run_tiny(model=Path("somewhere"))
    assert code == 1
    assert "--tiny brings its own model" in output


def test_a_directory_without_a_model_is_said(tmp_path: Path) -> None:
    out = io.StringIO()
    examples = tmp_path / "adapters"
    make_adapter_directories(examples, 8)
    console = Console(file=out, width=WIDTH)
    assert run_demo(model=tmp_path, adapters=examples, console=console) == 1
    assert "holds no config.json" in unwrapped(out.getvalue())


@pytest.fixture
def no_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A current directory outside the repository, with the package installed elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(smollm2_scenario, "__file__", "/site/pagedlora/demo/smollm2_scenario.py")
    return tmp_path


def make_adapter_directories(root: Path, count: int) -> None:
    for number in range(count):
        directory = root / f"adapter-{number}"
        directory.mkdir(parents=True)
        (directory / "adapter_config.json").write_text("{}")


def test_trained_adapters_are_found_above_the_current_directory(
    no_checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_adapter_directories(no_checkout / "examples" / "adapters", 8)
    below = no_checkout / "docs" / "deep"
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    found = find_trained_adapters(None)
    assert list(found) == [f"adapter-{number}" for number in range(8)]
    assert find_trained_adapters(no_checkout / "examples" / "adapters") == found


def test_trained_adapters_that_are_nowhere_are_said_with_the_way_out(no_checkout: Path) -> None:
    with pytest.raises(DemoError, match=r"examples/adapters here or above.*--adapters DIR.*--tiny"):
        find_trained_adapters(None)
    make_adapter_directories(no_checkout / "few", 3)
    with pytest.raises(DemoError, match=r"few has 3 adapters, .* and the demo needs 8") as error:
        find_trained_adapters(no_checkout / "few")
    assert "--adapters DIR" not in str(error.value)


def test_a_model_that_was_given_is_not_called_the_default_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_model_with_tokenizer(tmp_path / "model")
    make_adapter_directories(tmp_path / "adapters", 8)
    monkeypatch.setattr(smollm2_scenario, "_write_generated", lambda *_: {})
    monkeypatch.setattr(smollm2_scenario, "fetch_smollm2", lambda **_: tmp_path / "model")
    titles = [
        smollm2_scenario.smollm2_scenario(
            tmp_path,
            Console(file=io.StringIO()),
            model=model,
            adapters=tmp_path / "adapters",
            seed=0,
        ).title
        for model in (tmp_path / "model", None)
    ]
    assert re.fullmatch(rf"{tmp_path}/model \((bfloat16|float32)\)", titles[0])
    assert titles[1].startswith("SmolLM2-135M-Instruct (")


def test_generated_adapters_are_distinct_and_reproducible(tmp_path: Path) -> None:
    modules = LoraModelConfig.from_module(tiny_scenario.tiny_model(torch.float32)).modules
    shape = AdapterShape(4, ("q_proj",))
    shapes = [("a", shape), ("b", shape)]
    first = write_adapters(tmp_path / "1", shapes, modules, seed=3, strength=0.5)
    again = write_adapters(tmp_path / "2", shapes, modules, seed=3, strength=0.5)
    other = write_adapters(tmp_path / "3", shapes, modules, seed=4, strength=0.5)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    tensors = [
        load_file(directory / "adapter_model.safetensors")[name]
        for directory in (first["a"], again["a"], first["b"], other["a"])
    ]
    assert tensors[0].dtype == torch.bfloat16
    assert tensors[0].shape == (64, 4)
    assert torch.equal(tensors[0], tensors[1])
    assert not torch.equal(tensors[0], tensors[2])
    assert not torch.equal(tensors[0], tensors[3])


def test_the_generated_fleet_is_mixed() -> None:
    assert {4, 64} <= {shape.rank for shape in FLEET_SHAPES}
    assert len({shape.target_modules for shape in FLEET_SHAPES}) == 3


def test_the_stream_asks_some_adapters_often_and_the_base_too() -> None:
    names = [f"a{number}" for number in range(200)]
    chosen = stream.choose_adapters(names, 400, seed=0)
    assert chosen == stream.choose_adapters(names, 400, seed=0)
    assert chosen != stream.choose_adapters(names, 400, seed=1)
    assert 20 <= chosen.count(None) <= 60
    counts = sorted((chosen.count(name) for name in names), reverse=True)
    assert counts[0] >= 15
    assert counts[100] <= 3


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ("DEFAULT", torch.float32),
        ("AVX2", torch.float32),
        ("AVX512", torch.bfloat16),
        ("SVE256", torch.bfloat16),
    ],
)
def test_the_real_demo_computes_in_a_type_that_the_processor_has_products_of(
    monkeypatch: pytest.MonkeyPatch, capability: str, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert smollm2_scenario.quick_dtype() == dtype
