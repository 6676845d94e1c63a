"""`pagedlora generate`: prompts by adapters, with a progress bar."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from pagedlora.command_errors import said
from pagedlora.errors import InvalidArgumentError, PagedLoraWarning
from pagedlora.shown import quoted, shown

if TYPE_CHECKING:
    from pagedlora.config import LoraConfig, PeftCacheConfig
    from pagedlora.engine.llm import LLM
    from pagedlora.engine.request_stream import RequestStream
    from pagedlora.sampling_params import SamplingParams


@dataclass(frozen=True)
class Job:
    """What to answer.

    Attributes:
        prompts: At least one.
        adapters: Name to directory; each answers each prompt.
        params: The same for all.
        base: Whether the base model answers as well; it does if there is no adapter.
    """

    prompts: Sequence[str]
    adapters: dict[str, str]
    params: SamplingParams
    base: bool = False


@dataclass
class Answer:
    """One request and its answer."""

    prompt: str
    adapter: str | None
    stream: RequestStream
    text: str = ""
    error: str | None = None
    num_tokens: int = field(default=0)


def parse_adapters(pairs: Sequence[str]) -> dict[str, str]:
    """NAME=DIRECTORY pairs as a dictionary.

    Raises:
        InvalidArgumentError: One is no such pair, or a name comes twice.
    """
    adapters: dict[str, str] = {}
    for pair in pairs:
        name, equals, directory = pair.partition("=")
        if not (name and equals and directory):
            raise InvalidArgumentError(f"--adapter {shown(pair)}: give NAME=DIRECTORY")
        if name in adapters:
            raise InvalidArgumentError(f"--adapter: the name {quoted(name)} is given twice")
        adapters[name] = directory
    return adapters


def open_llm(
    model: str, tokenizer: str | None, lora: LoraConfig, peft_cache: PeftCacheConfig
) -> LLM:
    """The model with its tokenizer; what can be wrong without its weights is found before them.

    Args:
        model: A directory or a hub id.
        tokenizer: Likewise; None: the one beside the model.
        lora: Which adapters are accepted.
        peft_cache: Memory for them.

    Raises:
        InvalidArgumentError: There is no tokenizer, or no such model with these targets and rank.
        PagedLoraError: Model or tokenizer cannot be loaded, or the model cannot be run.
    """
    import torch

    from pagedlora.engine.llm import LLM
    from pagedlora.engine.pretrained import load_tokenizer, skeleton, to_source, tokenizer_beside
    from pagedlora.model_config import LoraModelConfig

    LoraModelConfig.from_module(
        skeleton(model),
        lora.lora_target_modules,
        dtype=torch.float32,  # files may have another than the configuration says
        max_lora_rank=lora.max_lora_rank,
    )
    if tokenizer is not None:
        found = load_tokenizer(to_source(tokenizer, "tokenizer"))
    else:
        found = tokenizer_beside(to_source(model, "model"))
    if found is None:
        raise InvalidArgumentError(
            f"no tokenizer is beside the model {quoted(model)}: name one with --tokenizer, or save "
            "it there with its save_pretrained()"
        )
    return LLM(model, found, lora_config=lora, peft_cache_config=peft_cache)


def run(llm: LLM, job: Job, *, output: Console, progress: Console) -> int:
    """Answers everything and prints it in order.

    Args:
        llm: Has none of the adapters yet.
        job: What to answer.
        output: Gets the answers.
        progress: Gets the bar, warnings and errors.

    Returns:
        The exit status: 1 if a request failed.

    Raises:
        PagedLoraError: An adapter cannot be used.
        PagedLoraWarning: Something of one was ignored, and Python was told to raise that.
    """
    with _warnings_as_lines(progress):
        for name, directory in job.adapters.items():
            llm.load_lora(name, directory)
    names: list[str | None] = [None] if job.base or not job.adapters else []
    names += job.adapters
    answers = [
        Answer(prompt, name, llm.generate_async(prompt, job.params, name))
        for prompt in job.prompts
        for name in names
    ]
    _collect(answers, job.params.max_tokens, progress)
    for answer in answers:
        _print(answer, output if answer.error is None else progress)
    return 1 if any(answer.error is not None for answer in answers) else 0


@contextmanager
def _warnings_as_lines(console: Console) -> Iterator[None]:
    """Prints this package's warnings when they come; those of others are shown as ever.

    Python's filters decide which: `-W error` and `-W ignore` have their say.
    """
    with warnings.catch_warnings():
        show_other = warnings.showwarning

        def show(  # noqa: PLR0917 - as Python calls it
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, PagedLoraWarning):
                console.print(Text(f"warning: {message}"))
            else:
                show_other(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield


def _collect(answers: Sequence[Answer], max_tokens: int, console: Console) -> None:
    """Reads the streams to their ends; all of them run meanwhile."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{len(answers)} answers", total=len(answers) * max_tokens)
        for answer in answers:
            for item in answer.stream:
                for completion in item.outputs:
                    answer.text += completion.text
                    answer.num_tokens += len(completion.token_ids)
                    progress.advance(task, len(completion.token_ids))
                if item.error is not None:
                    answer.error = said(item.error)
            progress.advance(task, max_tokens - answer.num_tokens)  # it ended earlier


def _print(answer: Answer, console: Console) -> None:
    """What models and files say is text, never markup."""
    console.print(Text.assemble((answer.adapter or "base model", "bold"), f"  {answer.prompt}"))
    console.print(Text(answer.text if answer.error is None else f"error: {answer.error}"))
