"""`pagedlora demo`: answers, a stream and a proof, on a real or on a tiny model."""

from __future__ import annotations

import importlib.util
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from pagedlora.demo.report import make_console
from pagedlora.demo.scenario import DemoError, Scenario
from pagedlora.demo.smollm2 import default_cache_dir
from pagedlora.errors import PagedLoraError


def run_demo(
    *,
    tiny: bool = False,
    model: Path | None = None,
    adapters: Path | None = None,
    seed: int = 0,
    console: Console | None = None,
) -> int:
    """Runs the three parts of the demo.

    Args:
        tiny: Use a tiny random model; nothing is downloaded.
        model: Directory of SmolLM2-135M-Instruct; None: fetched and cached. Not with `tiny`.
        adapters: Directory of the trained adapters; None: those of the checkout. Not with `tiny`.
        seed: Of everything random.
        console: Where to print; None: standard output.

    Returns:
        0 if every answer is what PEFT gives, else 1: the exit code.
    """
    console = console or make_console()
    began = time.perf_counter()
    try:
        _check_installed()
        with _quiet_libraries(), _scratch_directory(tiny) as scratch:
            scenario = _make_scenario(
                scratch, console, tiny=tiny, model=model, adapters=adapters, seed=seed
            )
            right = _run(scenario, console)
    except (DemoError, PagedLoraError) as error:
        console.print(f"error: {error}", style="bold red", markup=False)
        return 1
    console.print(f"\nThe demo took {time.perf_counter() - began:.0f} s.")
    return 0 if right else 1


def _run(scenario: Scenario, console: Console) -> bool:
    from pagedlora.demo.answers import show_answers
    from pagedlora.demo.peft_check import check_against_peft
    from pagedlora.demo.stream import run_stream

    console.print(
        f"Base model: {scenario.title}. Adapters: {len(scenario.shown)} {scenario.shown_kind}, "
        f"{len(scenario.generated)} generated."
    )
    model = scenario.load_model(scenario.dtype)
    show_answers(scenario, model, console)
    run_stream(scenario, model, console)
    del model
    return check_against_peft(scenario, console)


def _make_scenario(
    scratch: Path,
    console: Console,
    *,
    tiny: bool,
    model: Path | None,
    adapters: Path | None,
    seed: int,
) -> Scenario:
    if not tiny:
        from pagedlora.demo.smollm2_scenario import smollm2_scenario

        return smollm2_scenario(scratch, console, model=model, adapters=adapters, seed=seed)
    from pagedlora.demo.tiny_scenario import tiny_scenario

    if model is not None or adapters is not None:
        raise DemoError("--tiny brings its own model and adapters: leave out --model, --adapters")
    return tiny_scenario(scratch, seed=seed)


def _check_installed() -> None:
    missing = [p for p in ("peft", "safetensors") if importlib.util.find_spec(p) is None]
    if missing:
        raise DemoError(
            f"the demo compares with PEFT and needs {' and '.join(missing)}: "
            "pip install 'pagedlora[demo]'"
        )


@contextmanager
def _scratch_directory(tiny: bool) -> Iterator[Path]:
    """A directory for generated adapters that is gone afterwards.

    The real demo's lies beside the model: where temporary files are kept in memory, there may be
    no room for it.
    """
    parent = None
    if not tiny:
        parent = default_cache_dir()
        parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="pagedlora-demo-", dir=parent) as directory:
        yield Path(directory)


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Keeps progress bars and known warnings of transformers and PEFT out of the output."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing")
            warnings.filterwarnings("ignore", message="The PEFT config's `base_model_name_or_path`")
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
