"""The command line: `pagedlora doctor | probe | demo | generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedlora.command_errors import lines_of
from pagedlora.config import DEFAULT_MAX_LORA_RANK
from pagedlora.errors import InvalidArgumentError, PagedLoraError, PagedLoraWarning
from pagedlora.shown import quoted

app = typer.Typer(
    name="pagedlora",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_Adapters = Annotated[
    list[str] | None,
    typer.Option(help="NAME=DIRECTORY of a PEFT adapter; each answers each prompt."),
]
_Tokenizer = Annotated[
    str | None, typer.Option(help="A directory or a hub id; by default the one beside the model.")
]
_MaxLoraRank = Annotated[int, typer.Option(help="Largest rank of an adapter that loads.", min=1)]
_Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help="A module that may carry LoRA; may be given several times. By default all-linear, "
        "which may stand among others.",
    ),
]
_Strict = Annotated[
    bool, typer.Option(help="Refuse unknown fields, and patterns that match nothing.")
]
_AllowPickle = Annotated[
    bool, typer.Option("--allow-pickle", help="Read adapter_model.bin and .nemo files, too.")
]


@contextmanager
def _errors_as_lines() -> Iterator[None]:
    """Ends the command with lines on standard error instead of a traceback."""
    try:
        yield
    except (PagedLoraError, PagedLoraWarning, ValidationError) as error:
        for line in lines_of(error):
            typer.echo(f"error: {line}", err=True)
        raise typer.Exit(1) from None


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from pagedlora import _core
        from pagedlora.doctor import own_version

        typer.echo(f"pagedlora {own_version(_core)}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Thousands of LoRA adapters over one base model."""


@app.command()
def doctor() -> None:
    """Show versions, the machine and how the native part was built."""
    from pagedlora.doctor import diagnose

    report = diagnose()
    console = Console()
    for title, facts in report.sections.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        for name, value in facts.items():
            table.add_row(Text(name), Text(value))
        console.print(table)
    if report.problems:
        for problem in report.problems:
            typer.echo(f"problem: {problem}", err=True)
        raise typer.Exit(1)
    console.print("No problem found.")


@app.command()
def probe(
    path: Annotated[
        Path,
        typer.Argument(help="A PEFT directory or a .nemo file, or a directory with such below it."),
    ],
    *,
    model: Annotated[
        str | None, typer.Option(help="Base model (directory or hub id) that they must fit.")
    ] = None,
    max_lora_rank: _MaxLoraRank = DEFAULT_MAX_LORA_RANK,
    target: _Targets = None,
    strict: _Strict = True,
    allow_pickle: _AllowPickle = False,
) -> None:
    """Show what adapters hold and whether they would load, without reading their weights.

    Those below a directory have the names that `lora_dir` gives them; archives are shown, too.

    Exits with 0 if all would load, else with 1, also if there are none.
    """
    from pagedlora.model_config import ALL_LINEAR
    from pagedlora.probe_command import (
        ProbeOptions,
        find_adapters,
        print_many,
        print_one,
        probe_all,
    )

    if model is not None:
        from pagedlora.engine.pretrained import skeleton

    console = Console()
    paths = find_adapters(path)
    if not paths:
        typer.echo(
            f"error: no adapter is in {quoted(str(path))} or below: no directory has an "
            "adapter_config.json",
            err=True,
        )
        raise typer.Exit(1)
    options = ProbeOptions(max_lora_rank, strict, allow_pickle, target or [ALL_LINEAR])
    with _errors_as_lines():
        verdicts = list(probe_all(paths, None if model is None else skeleton(model), options))
        if paths != [path]:
            raise typer.Exit(1 if print_many(path, verdicts, options, console) else 0)
        if verdicts[0].error is not None:
            raise verdicts[0].error
        print_one(verdicts[0], options, console)


@app.command()
def demo(
    tiny: Annotated[
        bool, typer.Option("--tiny", help="A tiny random model; nothing is downloaded.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Directory of SmolLM2-135M-Instruct; fetched and cached by default."),
    ] = None,
    adapters: Annotated[
        Path | None,
        typer.Option(help="Directory of the trained adapters; by default examples/adapters."),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of generated adapters and the stream.", min=0, max=2**32)
    ] = 0,
) -> None:
    """Answer with many adapters from room for four, and check the answers against PEFT."""
    from pagedlora.demo.run import run_demo

    raise typer.Exit(run_demo(tiny=tiny, model=model, adapters=adapters, seed=seed))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Base model: a directory or a hub id.")],
    *,
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line; - for standard input.")
    ] = None,
    adapter: _Adapters = None,
    base: Annotated[bool, typer.Option("--base", help="The base model answers as well.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer.")] = None,
    tokenizer: _Tokenizer = None,
    max_lora_rank: _MaxLoraRank = DEFAULT_MAX_LORA_RANK,
    target: _Targets = None,
    strict: _Strict = True,
    allow_pickle: _AllowPickle = False,
    host_cache_size: Annotated[str, typer.Option(help="Host tier of adapters.")] = "1GiB",
    device_cache_size: Annotated[str, typer.Option(help="Device tier of adapters.")] = "256MiB",
) -> None:
    """Answer prompts with adapters, all in shared batches."""
    from pagedlora import LoraConfig, PeftCacheConfig, SamplingParams
    from pagedlora.generate_command import Job, open_llm, parse_adapters, run

    with _errors_as_lines():
        job = Job(
            _prompts(prompt or [], prompts),
            parse_adapters(adapter or []),
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or []
            ),
            base,
        )
        lora = LoraConfig(
            max_lora_rank=max_lora_rank,
            lora_target_modules=target or "all-linear",
            strict=strict,
            allow_pickle=allow_pickle,
        )
        tiers = PeftCacheConfig(
            host_cache_size=host_cache_size,  # type: ignore[arg-type]
            device_cache_size=device_cache_size,  # type: ignore[arg-type]
        )
        with open_llm(model, tokenizer, lora, tiers) as llm:
            status = run(llm, job, output=Console(), progress=Console(stderr=True))
    raise typer.Exit(status)


def _prompts(given: list[str], file: Path | None) -> list[str]:
    """The prompts of both options; raises InvalidArgumentError if there is none."""
    found = list(given)
    if file is not None:
        try:
            lines = typer.get_text_stream("stdin") if str(file) == "-" else file.open()
            with lines:
                found += [line.rstrip("\n") for line in lines if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"--prompts {file}: {error}") from error
    if not found:
        raise InvalidArgumentError("there is no prompt: give --prompt TEXT or --prompts FILE")
    return found


if __name__ == "__main__":
    app()
