"""The command line: `pagedlora doctor | probe | demo | generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedlora.errors import InvalidArgumentError, PagedLoraError

app = typer.Typer(
    name="pagedlora",
    help="Thousands of LoRA adapters over one base model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


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
    model: Annotated[
        str | None, typer.Option(help="Base model (directory or hub id) that they must fit.")
    ] = None,
    max_lora_rank: Annotated[
        int | None, typer.Option(help="Largest rank that loads; by default any.", min=1)
    ] = None,
    strict: Annotated[
        bool, typer.Option(help="Refuse unknown fields, and patterns that match nothing.")
    ] = True,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read adapter_model.bin and .nemo files, too.")
    ] = False,
) -> None:
    """Show what adapters hold and whether they would load, without loading their weights.

    Those below a directory have the names that `lora_dir` gives them; archives, which it does not
    list, are shown too. Exits with 0 if all would load, else with 1, also if there are none.
    """
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
            f"error: no adapter is in '{path}' or below: no directory has an adapter_config.json",
            err=True,
        )
        raise typer.Exit(1)
    try:
        verdicts = list(
            probe_all(
                paths,
                None if model is None else skeleton(model),
                ProbeOptions(max_lora_rank, strict, allow_pickle),
            )
        )
    except PagedLoraError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    if paths != [path]:
        raise typer.Exit(1 if print_many(path, verdicts, console) else 0)
    if verdicts[0].error is not None:
        typer.echo(f"error: {verdicts[0].error}", err=True)
        raise typer.Exit(1)
    print_one(verdicts[0], console)


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
def generate(  # noqa: PLR0917 - typer's way of options
    model: Annotated[str, typer.Argument(help="Base model: a directory or a hub id.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="A prompt; may be given several times.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one prompt per line; - for standard input.")
    ] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="NAME=DIRECTORY of a PEFT adapter; each answers each prompt."),
    ] = None,
    base: Annotated[bool, typer.Option("--base", help="The base model answers as well.")] = False,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.", min=1)] = 64,
    temperature: Annotated[float, typer.Option(help="0: the most probable token.", min=0)] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampling.", min=0)] = 0,
    stop: Annotated[list[str] | None, typer.Option(help="A text that ends an answer.")] = None,
    host_cache_size: Annotated[str, typer.Option(help="Host tier of adapters.")] = "1GiB",
    device_cache_size: Annotated[str, typer.Option(help="Device tier of adapters.")] = "256MiB",
) -> None:
    """Answer prompts with adapters, all in shared batches."""
    from pagedlora import LLM, PeftCacheConfig, SamplingParams
    from pagedlora.engine.pretrained import skeleton
    from pagedlora.generate_command import Job, parse_adapters, run

    try:
        job = Job(
            _prompts(prompt or [], prompts),
            parse_adapters(adapter or []),
            SamplingParams(
                max_tokens=max_tokens, temperature=temperature, seed=seed, stop=stop or []
            ),
            base,
        )
        config = PeftCacheConfig(
            host_cache_size=host_cache_size,  # type: ignore[arg-type]
            device_cache_size=device_cache_size,  # type: ignore[arg-type]
        )
        skeleton(model)
        with LLM(model, peft_cache_config=config) as llm:
            status = run(llm, job, output=Console(), progress=Console(stderr=True))
    except PagedLoraError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    except ValidationError as error:
        for problem in error.errors():
            typer.echo(f"error: {problem['loc'][0]}: {problem['msg']}", err=True)
        raise typer.Exit(1) from None
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
