"""`pagedlora probe` says what adapters hold, whether they would load, and if not why."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.adapters import (
    WEIGHTS_FILE,
    adapter_tensors,
    write_adapter,
    write_random_adapter,
)
from tests.support.nemo import Heads, draw_pairs, write_nemo
from tests.support.tiny_models import build_tiny_model
from typer.testing import CliRunner, Result

from pagedlora import LoraManager, LoraModelConfig, PeftCacheConfig, PeftCacheManager
from pagedlora.cli import app
from pagedlora.sizes import format_size

CONFIG = LoraModelConfig.from_module(build_tiny_model("llama"))
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def probe(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["probe", *map(str, arguments)])


def row_of(result: Result, name: str) -> list[str]:
    """The cells of an adapter's row."""
    rows = [line.strip("│ ").split("│") for line in result.output.splitlines() if "│" in line]
    [row] = [row for row in rows if row[0].strip() == name]
    return [cell.strip() for cell in row]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny_model("llama").save_pretrained(path)
    return path


# ---- one adapter -------------------------------------------------------------------------------


def test_one_adapter_is_shown_with_its_modules_and_settings(tmp_path: Path) -> None:
    path = write_random_adapter(
        tmp_path / "mine", CONFIG, rank=3, seed=1, targets=["q_proj"], alpha_pattern={"q_proj": 9}
    )
    result = probe(path)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"mine  {path}")
    assert "384 parameters in 4 tensors of float32" in result.output
    assert (
        "r=3, lora_alpha=16.0, target_modules=q_proj, alpha_pattern={'q_proj': 9.0}"
        in result.output
    )
    for layer in (0, 1):
        assert row_of(result, f"model.layers.{layer}.self_attn.q_proj")[1:] == ["3", "3"]


def test_with_a_model_its_pages_renames_and_casts_are_shown(tmp_path: Path, model: Path) -> None:
    tensors = adapter_tensors(CONFIG.modules[:3], 2, seed=1, dtype=torch.bfloat16)
    path = write_adapter(tmp_path, {f"module.{name}": each for name, each in tensors.items()})
    result = probe(path, "--model", model)
    assert result.exit_code == 0, result.output
    cache = PeftCacheManager(
        CONFIG,
        PeftCacheConfig(device_cache_size=2**26),
    )
    info = LoraManager(cache.model_config, cache).register("a", path)
    assert info.num_pages == 1
    page = f"{cache.page_bytes:,} bytes, {format_size(cache.page_bytes)}"
    cache.close()
    assert f"1 page of {page}, with a host tier of 1 GiB" in result.output
    assert "module. taken away in 3 modules" in result.output
    assert "6 tensors of bfloat16 kept as float32" in result.output
    assert "no tensors for 3 target modules: there it answers as the base model" in result.output
    assert "Not checked: the values of weights, which are not read" in result.output


def test_one_of_a_kind_is_counted_as_one(tmp_path: Path, model: Path) -> None:
    tensors = adapter_tensors(CONFIG.modules[1:], 2, seed=1)
    name = next(iter(tensors))
    tensors[name] = tensors[name].to(torch.bfloat16)
    result = probe(write_adapter(tmp_path, tensors), "--model", model)
    assert result.exit_code == 0, result.output
    assert "no tensors for 1 target module:" in result.output
    assert "1 tensor of bfloat16 kept as float32" in result.output


def test_of_many_names_the_first_are_shown_whole_and_their_number(tmp_path: Path) -> None:
    names = [module.name for module in CONFIG.modules]
    tensors = adapter_tensors(CONFIG.modules, 2, seed=1)
    path = write_adapter(tmp_path, tensors, target_modules=names)
    output = probe(path).output
    [line] = [line for line in output.splitlines() if "target_modules=" in line]
    assert line.endswith(f"target_modules={', '.join(names[:6])}, … (14 in all)")


def test_one_that_is_refused_is_an_error_in_one_line(tmp_path: Path) -> None:
    result = probe(write_random_adapter(tmp_path, CONFIG, rank=2, seed=1, bias="all"))
    assert result.exit_code == 1
    assert result.output.startswith("error: the adapter's configuration has bias='all'")
    assert len(result.output.splitlines()) == 1


def test_one_that_does_not_fit_the_model_is_refused(tmp_path: Path, model: Path) -> None:
    tensors = adapter_tensors(CONFIG.modules, 2, seed=1)
    tensors[f"{Q}.lora_A.weight"] = torch.ones(2, 5)
    path = write_adapter(tmp_path, tensors)
    assert probe(path).exit_code == 0
    result = probe(path, "--model", model)
    assert result.exit_code == 1
    assert "the model needs [2, 32]" in result.output


def test_what_files_say_is_no_markup(tmp_path: Path) -> None:
    name = "model.[bold]q_proj[/x]"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(2, 3),
        f"{name}.lora_B.weight": torch.ones(3, 2),
    }
    fields = {"target_modules": [name], "rank_pattern": {"[/red]": 7, "model.*": 2}}
    path = write_adapter(tmp_path / "[red]name[", tensors, **fields)
    result = probe(path, "--no-strict")
    assert result.exit_code == 0, result.output
    for text in (path.name, name, "ignored rank_pattern['[/red]']"):
        assert text in result.output


def test_what_files_say_is_no_emoji(tmp_path: Path) -> None:
    fields = {"a_field_of_:x:": ":warning:"}
    path = write_random_adapter(tmp_path / ":x:", CONFIG, rank=2, seed=1, **fields)
    result = probe(path, "--no-strict")
    assert result.exit_code == 0, result.output
    assert "ignored a_field_of_:x:=':warning:'" in result.output
    assert ":x: is refused: " in probe(tmp_path).output


def test_terminals_get_no_controls_of_files(tmp_path: Path) -> None:
    name = "model.\x1b[31mq_proj"
    tensors = {
        f"{name}.lora_A.weight": torch.ones(2, 3),
        f"{name}.lora_B.weight": torch.ones(3, 2),
    }
    path = write_adapter(tmp_path / "\x1b[31mred", tensors, target_modules=[name])
    for result in (probe(path), probe(tmp_path)):
        assert result.exit_code == 0, result.output
        assert "\\x1b[31mred" in result.output
        assert "\x1b" not in result.output
    assert "\\x1b[31mq_proj" in probe(path).output


def test_nothing_there_is_an_error(tmp_path: Path, model: Path) -> None:
    result = probe(tmp_path / "none")
    assert result.exit_code == 1
    assert result.output.startswith(
        f"error: '{tmp_path / 'none'}' does not exist: give the directory"
    )
    for name in ("empty", "no adapter/at all"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "no adapter" / "README.md").touch()
    for arguments in ((), ("--model", model)):
        result = probe(tmp_path, *arguments)
        assert result.exit_code == 1
        assert result.output == (
            f"error: no adapter is in '{tmp_path}' or below: no directory has an "
            "adapter_config.json\n"
        )


def test_a_directory_of_no_adapters_is_named_without_controls(tmp_path: Path) -> None:
    path = tmp_path / "\x1b[31m\nempty"
    path.mkdir()
    [line] = probe(path).output.splitlines()
    assert "\\x1b[31m\\nempty' or below: no directory" in line


def test_options_decide_what_loads(tmp_path: Path, model: Path) -> None:
    path = write_random_adapter(tmp_path / "a", CONFIG, rank=4, seed=1, a_field_of_tomorrow=1)
    assert probe(path).exit_code == 1
    for arguments in ((), ("--model", model)):
        result = probe(path, "--no-strict", *arguments)
        assert result.exit_code == 0, result.output
        assert "ignored a_field_of_tomorrow=1" in result.output
        assert probe(path, "--no-strict", "--max-lora-rank", 4, *arguments).exit_code == 0
        refused = probe(path, "--no-strict", "--max-lora-rank", 3, *arguments)
        assert refused.exit_code == 1
        assert "LoRA rank 4 is greater than max_lora_rank 3" in refused.output
    tensors = adapter_tensors(CONFIG.modules, 2, seed=1)
    pickled = write_adapter(tmp_path / "b", tensors)
    (pickled / WEIGHTS_FILE).unlink()
    torch.save(tensors, pickled / "adapter_model.bin")
    assert probe(pickled).exit_code == 1
    assert probe(pickled, "--allow-pickle").exit_code == 0
    assert probe(pickled, "--allow-pickle", "--model", model).exit_code == 0


def test_archives_are_adapters_too(tmp_path: Path, model: Path) -> None:
    heads = Heads(heads=4, groups=2, size=8)
    path = write_nemo(tmp_path / "a.nemo", heads, draw_pairs(heads, [0, 1], 2, seed=1))
    write_random_adapter(tmp_path / "b", CONFIG, rank=2, seed=1)
    refused = probe(path)
    assert refused.exit_code == 1
    assert "allow_pickle=True (here: --allow-pickle)" in refused.output
    for arguments in ((), ("--model", model)):
        assert "layers.1.attn_qkv" in probe(path, "--allow-pickle", *arguments).output
        both = probe(tmp_path, "--allow-pickle", *arguments)
        assert both.exit_code == 0, both.output
        assert row_of(both, "a.nemo")[:5] == ["a.nemo", "yes", "2", "1", "2"]


def test_the_largest_rank_is_that_of_other_commands_and_is_said(
    tmp_path: Path, model: Path
) -> None:
    """What `LoraConfig` would refuse by default would not load here either."""
    write_random_adapter(tmp_path / "high", CONFIG, rank=65, seed=1)
    write_random_adapter(tmp_path / "low", CONFIG, rank=64, seed=1)
    for arguments in ((), ("--model", model)):
        result = probe(tmp_path, *arguments)
        assert result.exit_code == 1
        assert row_of(result, "high")[:3] == ["high", "no", "65"]
        assert row_of(result, "low")[:3] == ["low", "yes", "64"]
        assert "Judged with max_lora_rank 64 (--max-lora-rank)." in result.output
        assert "raise max_lora_rank to serve" in result.output
        assert result.output.rstrip().endswith("(here: --max-lora-rank)")
        raised = probe(tmp_path, "--max-lora-rank", 65, *arguments)
        assert raised.exit_code == 0, raised.output
        assert "Judged with max_lora_rank 65" in raised.output


def test_targets_are_those_that_the_model_is_served_with(tmp_path: Path, model: Path) -> None:
    path = write_random_adapter(tmp_path, CONFIG, rank=2, seed=1, targets=["q_proj", "v_proj"])
    refused = probe(path, "--model", model, "--target", "q_proj")
    assert refused.exit_code == 1
    assert "(here: --target)" in refused.output
    both = probe(path, "--model", model, "--target", "q_proj", "--target", "v_proj")
    assert both.exit_code == 0, both.output
    wrong = probe(path, "--model", model, "--target", "nowhere")
    assert wrong.exit_code == 1
    assert wrong.output.startswith("error: target_modules ['nowhere'] match no linear module")


def test_without_a_model_it_is_said_that_targets_are_not_judged(
    tmp_path: Path, model: Path
) -> None:
    path = write_random_adapter(tmp_path / "a", CONFIG, rank=2, seed=1, targets=["q_proj"])
    words = "Not checked: the fit to a model (--model) and to its modules that --target names, and"
    for place in (path, tmp_path):
        assert words in probe(place, "--target", "nosuch").output
        assert "--target" not in probe(place).output
        assert "--target" not in probe(place, "--target", "q_proj", "--model", model).output


def test_modules_that_the_model_has_are_told_from_those_that_it_lacks(
    tmp_path: Path, model: Path
) -> None:
    """They are known without weights: only for the former is there another target to name."""
    tensors = adapter_tensors(CONFIG.modules, 2, seed=1)
    strange = {name.replace("layers.1", "layers.9"): value for name, value in tensors.items()}
    lacks = probe(write_adapter(tmp_path / "a", strange), "--model", model)
    assert "which the model does not have; serve the model" in lacks.output
    assert "--target" not in lacks.output
    head = LoraModelConfig.from_module(build_tiny_model("llama"), ["lm_head"])
    has = probe(write_random_adapter(tmp_path / "b", head, rank=2, seed=1), "--model", model)
    assert "the model has, but not among its LoRA target modules" in has.output
    assert has.output.endswith("(here: --target)\n")


def test_help_breaks_no_line_within_a_sentence() -> None:
    lines = [line.strip() for line in probe("--help").output.splitlines()]
    for start, end in (
        ("Those below a directory", "shown, too."),
        ("Exits with", "there are none."),
    ):
        assert any(line.startswith(start) and line.endswith(end) for line in lines)


# ---- a directory of adapters -------------------------------------------------------------------


def test_a_directory_of_adapters_is_a_table(tmp_path: Path, model: Path) -> None:
    write_random_adapter(tmp_path / "b", CONFIG, rank=8, seed=1, dtype=torch.float16)
    write_random_adapter(tmp_path / "a", CONFIG, rank=2, seed=2, targets=["q_proj"])
    (tmp_path / "no adapter").mkdir()
    (tmp_path / "a file").write_text("x")
    result = probe(tmp_path)
    assert result.exit_code == 0, result.output
    assert row_of(result, "a")[:6] == ["a", "yes", "2", "8", "2", "float32"]
    size = (tmp_path / "a" / WEIGHTS_FILE).stat().st_size
    assert row_of(result, "a")[6] == format_size(size)
    assert row_of(result, "b")[:6] == ["b", "yes", "8", "2", str(len(CONFIG.modules)), "float16"]
    assert result.output.index(" a ") < result.output.index(" b ")
    assert "no adapter" not in result.output
    with_model = probe(tmp_path, "--model", model)
    assert with_model.exit_code == 0, with_model.output
    assert [int(row_of(with_model, name)[7]) > 0 for name in "ab"] == [True, True]
    cache = PeftCacheManager(CONFIG, PeftCacheConfig(device_cache_size=2**26))
    pages = f"Pages: {cache.page_bytes:,} bytes, with a host tier of 1 GiB."
    cache.close()
    assert pages in with_model.output
    assert "Pages:" not in result.output
    assert "Not checked: the fit to a model (--model), and the values" in result.output
    assert "Not checked: the values" in with_model.output


def test_adapters_below_are_found_as_lora_dir_finds_them_under_its_names(tmp_path: Path) -> None:
    for name in ("sql", "org/sql", "org/sql/checkpoint-5", "org/deep/er"):
        write_random_adapter(tmp_path / name, CONFIG, rank=2, seed=1)
    write_random_adapter(tmp_path / "org" / "refused", CONFIG, rank=2, seed=1, bias="all")
    (tmp_path / "loop").symlink_to(".")
    (tmp_path / "alias").symlink_to("org/sql")
    heads = Heads(heads=4, groups=2, size=8)
    write_nemo(tmp_path / "org" / "a.nemo", heads, draw_pairs(heads, [0, 1], 2, seed=1))
    result = probe(tmp_path, "--allow-pickle")
    assert result.exit_code == 1
    rows = [line.strip("│ ").split("│") for line in result.output.splitlines() if "│" in line]
    names = [row[0].strip() for row in rows]
    cache = PeftCacheManager(CONFIG, PeftCacheConfig(device_cache_size=2**26))
    listed = LoraManager(CONFIG, cache, lora_dir=tmp_path).names
    cache.close()
    assert names == sorted([*listed, "alias", "org/a.nemo"])
    assert "org/refused is refused" in result.output


def test_the_exit_code_tells_that_some_are_refused_and_the_reasons_follow(
    tmp_path: Path, model: Path
) -> None:
    write_random_adapter(tmp_path / "good", CONFIG, rank=2, seed=1)
    write_random_adapter(tmp_path / "biased", CONFIG, rank=2, seed=1, bias="all")
    write_random_adapter(tmp_path / "half", CONFIG, rank=2, seed=1)
    (tmp_path / "half" / WEIGHTS_FILE).unlink()
    tensors = adapter_tensors(CONFIG.modules, 2, seed=1)
    tensors["model.layers.9.q_proj.lora_A.weight"] = torch.ones(2, 5)
    tensors["model.layers.9.q_proj.lora_B.weight"] = torch.ones(5, 2)
    write_adapter(tmp_path / "stranger", tensors)
    without = probe(tmp_path)
    assert without.exit_code == 1
    loads = {name: row_of(without, name)[1] for name in ("good", "biased", "half", "stranger")}
    assert loads == {"good": "yes", "biased": "no", "half": "no", "stranger": "yes"}
    result = probe(tmp_path, "--model", model)
    assert result.exit_code == 1
    assert row_of(result, "stranger")[1] == "no"
    assert "biased is refused: the adapter's configuration has bias='all'" in result.output
    assert "half is refused: there is no adapter_model.safetensors" in result.output
    assert "stranger is refused: tensor 'model.layers.9.q_proj.lora_A.weight'" in result.output
    assert "good is refused" not in result.output
