"""`pagedlora generate`: every prompt by every adapter, plainly, with exit code 1 on an error."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.adapters import write_random_adapter
from tests.support.saved_models import save_model_with_tokenizer
from typer.testing import CliRunner, Result

from pagedlora import LLM, LoraModelConfig, SamplingParams
from pagedlora.cli import app


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model and two adapters."""
    root = tmp_path_factory.mktemp("generate")
    config = LoraModelConfig.from_module(save_model_with_tokenizer(root / "model"))
    for seed, name in enumerate(("one", "two")):
        write_random_adapter(root / name, config, rank=4, seed=seed)
    return root


def generate(home: Path, *arguments: str, stdin: str | None = None) -> Result:
    """Runs the command."""
    options = ["--max-tokens", "6", "--host-cache-size", "4MiB", "--device-cache-size", "4MiB"]
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
        (["--prompt", "x", "--device-cache-size", "much"], "much"),
        (["--prompt", "x" * 5000], "error:"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(home: Path, arguments: list[str], message: str) -> None:
    result = generate(home, *arguments)
    assert result.exit_code == 1
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_model_that_is_none_is_said_in_a_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "x"])
    assert result.exit_code == 1
    assert "cannot be loaded" in result.stderr
