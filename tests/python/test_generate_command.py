"""`pagedlora generate`: every prompt by every adapter, plainly, with exit code 1 on an error."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from tests.support.adapters import (
    WEIGHTS_FILE,
    adapter_tensors,
    write_adapter,
    write_random_adapter,
)
from tests.support.saved_models import save_model_with_tokenizer
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner, Result

from pagedlora import LLM, LoraModelConfig, SamplingParams, command_errors
from pagedlora.cli import app


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and two adapters."""
    root = tmp_path_factory.mktemp("generate")
    config = LoraModelConfig.from_module(save_model_with_tokenizer(root / "model"))
    for seed, name in enumerate(("one", "two")):
        write_random_adapter(root / name, config, rank=4, seed=seed)
    return root


SMALL_TIERS = ["--host-cache-size", "4MiB", "--device-cache-size", "4MiB"]
"""Instead of a gigabyte that is touched each time."""


def generate(home: Path, *arguments: str, stdin: str | None = None) -> Result:
    """Runs the command."""
    options = ["--max-tokens", "6", *SMALL_TIERS]
    command = ["generate", str(home / "model"), *options, *arguments]
    return CliRunner().invoke(app, command, input=stdin, env={"COLUMNS": "200"})


def test_every_adapter_answers_every_prompt(home: Path) -> None:
    adapters = [f"--adapter=one={home / 'one'}", f"--adapter=two={home / 'two'}", "--base"]
    result = generate(home, "--prompt", "Hello", "--prompt", "[bold]", *adapters)
    assert result.exit_code == 0, result.output
    with LLM(home / "model") as llm:
        for name in ("one", "two"):
            llm.load_lora(name, home / name)
        prompts = ["Hello"] * 3 + ["[bold]"] * 3
        names = [None, "one", "two"] * 2
        params = SamplingParams(temperature=0, max_tokens=6)
        right = [output.outputs[0].text for output in llm.generate(prompts, params, names)]
    answers = result.stdout
    for prompt, name, text in zip(prompts, names, right, strict=True):
        assert f"{name or 'base model'}  {prompt}" in answers
        first_line = text.split("\n")[0].rstrip()
        assert first_line in answers


def test_prompts_come_from_a_file_or_standard_input(home: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("first\n\nsecond\n")
    result = generate(home, "--prompts", str(tmp_path / "prompts.txt"))
    assert result.exit_code == 0, result.output
    assert "base model  first" in result.stdout
    assert "base model  second" in result.stdout
    assert "base model  third" in generate(home, "--prompts", "-", stdin="third\n").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no prompt"),
        (["--prompts", "/nowhere/prompts.txt"], "/nowhere/prompts.txt"),
        (["--prompt", "x", "--adapter", "one"], "NAME=DIRECTORY"),
        (["--prompt", "x", "--adapter", "a=/b", "--adapter", "a=/c"], "given twice"),
        (["--prompt", "x", "--adapter", "a=/nowhere/at/all"], "/nowhere/at/all"),
        (
            ["--prompt", "x", "--device-cache-size", "much"],
            "error: --device-cache-size: size 'much'",
        ),
        (["--prompt", "x" * 5000], "error:"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(home: Path, arguments: list[str], message: str) -> None:
    result = generate(home, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def with_adapter(home: Path, path: Path, *arguments: str) -> Result:
    return generate(home, "--prompt", "x", f"--adapter=a={path}", *arguments)


@pytest.mark.filterwarnings("default::pagedlora.PagedLoraWarning")
def test_the_way_out_of_a_refusal_is_named_as_an_option_and_works(
    home: Path, tmp_path: Path
) -> None:
    config = LoraModelConfig.from_module(save_model_with_tokenizer(tmp_path / "model"))
    high = write_random_adapter(tmp_path / "high", config, rank=65, seed=1)
    odd = write_random_adapter(tmp_path / "odd", config, rank=2, seed=1, a_field_of_tomorrow=1)
    tensors = adapter_tensors(config.modules, 2, seed=1)
    pickled = write_adapter(tmp_path / "pickled", tensors)
    (pickled / WEIGHTS_FILE).unlink()
    torch.save(tensors, pickled / "adapter_model.bin")
    for path, library, option in (
        (high, "raise max_lora_rank", ["--max-lora-rank", "65"]),
        (odd, "strict=False", ["--no-strict"]),
        (pickled, "allow_pickle=True", ["--allow-pickle"]),
    ):
        refused = with_adapter(home, path)
        assert refused.exit_code == 1
        assert library in refused.stderr
        assert f"(here: {option[0]})" in refused.stderr
        result = with_adapter(home, path, *option)
        assert result.exit_code == 0, result.output
    told = with_adapter(home, odd, "--no-strict").stderr
    assert re.search("^warning: adapter .*: ignored a_field_of_tomorrow=1", told, re.MULTILINE)


@pytest.fixture
def odd(home: Path, tmp_path: Path) -> Path:
    """An adapter that loads with a warning."""
    config = LoraModelConfig.from_module(AutoModelForCausalLM.from_pretrained(home / "model"))
    return write_random_adapter(tmp_path / "odd", config, rank=2, seed=1, a_field_of_tomorrow=1)


@pytest.mark.filterwarnings("default::pagedlora.PagedLoraWarning")
def test_warnings_are_printed_also_where_a_later_adapter_fails(home: Path, odd: Path) -> None:
    result = with_adapter(home, odd, "--no-strict", "--adapter=b=/nowhere/at/all")
    assert result.exit_code == 1
    warned, failed = re.findall("^(?:warning|error): .*", result.stderr, re.MULTILINE)
    assert re.match("warning: adapter .*: ignored a_field_of_tomorrow=1", warned)
    assert failed.startswith("error: '/nowhere/at/all' does not exist")


@pytest.mark.filterwarnings("error")
def test_warnings_that_python_raises_are_errors(home: Path, odd: Path) -> None:
    result = with_adapter(home, odd, "--no-strict")
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    [line] = re.findall("^(?:warning|error): .*", result.stderr, re.MULTILINE)
    assert re.match("error: adapter .*: ignored a_field_of_tomorrow=1", line)


@pytest.mark.filterwarnings("default::UserWarning")
def test_warnings_of_others_are_no_lines_of_ours(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(llm: LLM, name: str, directory: str) -> None:
        warnings.warn("from elsewhere", UserWarning, stacklevel=2)

    monkeypatch.setattr(LLM, "load_lora", load)
    with pytest.warns(UserWarning, match="from elsewhere"):
        result = with_adapter(home, home / "one")
    assert "from elsewhere" not in result.stdout
    assert "warning:" not in result.stderr


def test_the_output_embedding_is_a_target_where_it_is_named(home: Path, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    config = LoraModelConfig.from_module(model, ["all-linear", "lm_head"])
    path = write_random_adapter(tmp_path / "a", config, rank=2, seed=1)
    assert "(here: --target)" in with_adapter(home, path).stderr
    result = with_adapter(home, path, "--target", "all-linear", "--target", "lm_head")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "nosuch"], r"error: target_modules \['nosuch'\] match no linear module"),
        (["--max-lora-rank", "100000"], "error: max_lora_rank.* 100000"),
    ],
)
def test_options_that_do_not_fit_the_model_are_refused_before_its_weights_are_read(
    home: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    result = generate(home, "--prompt", "x", *arguments)
    assert isinstance(result.exception, SystemExit)
    assert result.exit_code == 1
    assert re.match(message, result.stderr)


def test_an_error_of_a_request_names_the_option_too(home: Path) -> None:
    config = LoraModelConfig.from_module(AutoModelForCausalLM.from_pretrained(home / "model"))
    path = write_random_adapter(home / "large", config, rank=64, seed=1)
    result = with_adapter(home, path, "--device-cache-size", "8KiB")
    assert result.exit_code == 1
    assert "(here: --device-cache-size)" in " ".join(result.stderr.split())


def test_without_a_tokenizer_it_is_said_what_can_be_done_here(home: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(home / "model").save_pretrained(tmp_path / "bare")
    prompt = ["--prompt", "x", "--max-tokens", "2", *SMALL_TIERS]
    command = ["generate", str(tmp_path / "bare"), *prompt]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 1
    assert f"no tokenizer is beside the model '{tmp_path / 'bare'}'" in refused.stderr
    assert "--tokenizer" in refused.stderr
    result = CliRunner().invoke(app, [*command, "--tokenizer", str(home / "model")])
    assert result.exit_code == 0, result.output
    assert "base model  x" in result.stdout


def test_every_option_that_errors_name_exists() -> None:
    words = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).output.split()
    named = re.findall("--[a-z-]+", " ".join(command_errors._OPTIONS.values()))
    assert set(named) <= set(words)


def test_each_option_is_named_by_the_errors_that_it_helps_with(home: Path, tmp_path: Path) -> None:
    model = save_model_with_tokenizer(tmp_path / "model")
    config = LoraModelConfig.from_module(model, ["all-linear", "lm_head"])
    paths = {
        name: write_random_adapter(
            tmp_path / name, config, rank=rank, seed=1, targets=[target], **fields
        )
        for name, rank, target, fields in (
            ("high", 65, "q_proj", {}),
            ("odd", 2, "q_proj", {"a_field_of_tomorrow": 1}),
            ("pickled", 2, "q_proj", {}),
            ("head", 2, "lm_head", {}),
        )
    }
    (paths["pickled"] / WEIGHTS_FILE).rename(paths["pickled"] / "adapter_model.bin")
    use = {name: [f"--adapter=a={path}"] for name, path in paths.items()}
    one = f"--adapter=a={home / 'one'}"
    errors: dict[str, list[list[str]]] = {
        "max_lora_rank": [use["high"], ["--max-lora-rank", "100000"]],
        "allow_pickle": [use["pickled"]],
        "strict=False": [use["odd"]],
        "LoRA target modules": [use["head"]],
        "match no linear module": [["--target", ""], ["--target", "nosuch"]],
        "load_lora()": [[]],
        "a tier of": [["--host-cache-size", "100"], ["--device-cache-size", "100"]],
        "host_cache_size": [["--host-cache-size", "5000", one], ["--host-cache-size", "900TiB"]],
        "device_cache_size": [["--device-cache-size", "5000", one]],
    }
    assert errors.keys() == command_errors._OPTIONS.keys()
    for words, commands in errors.items():
        for arguments in commands:
            place = tmp_path / "head" if words == "load_lora()" else home / "model"
            command = ["generate", str(place), "--prompt", "x", *SMALL_TIERS, *arguments]
            result = CliRunner().invoke(app, command, env={"COLUMNS": "400"})
            assert result.exit_code == 1
            assert words in result.stderr
            hint = f"(here: {command_errors._OPTIONS[words]})\n"
            assert result.stderr.endswith(hint), result.stderr


def test_a_model_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert result.exit_code == 1
    assert "cannot be loaded" in result.stderr
