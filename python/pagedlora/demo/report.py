"""What the demo prints: plain lines and tables that fit 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from pagedlora import _core
from pagedlora.demo.fleet import Fleet
from pagedlora.engine.llm import LLM
from pagedlora.peft_cache_queries import Tier
from pagedlora.sizes import format_size

LOG_COLUMNS = 100


def make_console() -> Console:
    """A console for standard output; 100 columns wide where that is no terminal, as in CI."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_COLUMNS
    return console


def print_heading(console: Console, text: str) -> None:
    """Starts a part of the demo."""
    console.print()
    console.rule(Text(text, style="bold"), align="left")


def print_answers(console: Console, question: str, answers: dict[str, str]) -> None:
    """Who answered what; the first one is the base model."""
    table = Table(box=SIMPLE_HEAD, title=Text(f"“{question}”"), title_justify="left")
    table.add_column("who", no_wrap=True)
    table.add_column("answer")
    for number, (who, answer) in enumerate(answers.items()):
        table.add_row(
            Text(who), Text(" ".join(answer.split())), style="bold" if number == 0 else ""
        )
    console.print(table)


def print_cache(console: Console, llm: LLM, fleet: Fleet, asked: Sequence[str]) -> None:
    """What the cache did since the engine was opened.

    Args:
        console: Where to.
        llm: The engine; only the adapters in `asked` were used.
        fleet: Its adapters.
        asked: Distinct names.
    """
    cache = llm.peft_cache_manager
    stats = cache.stats
    tiers: tuple[tuple[Tier, _core.TierStats, int], ...] = (
        ("host", stats.host, cache.max_host_pages),
        ("device", stats.device, cache.max_device_pages),
    )
    table = Table(box=SIMPLE_HEAD)
    table.add_column("adapter cache")
    for tier, _, _ in tiers:
        table.add_column(f"{tier} tier", justify="right")

    def add(label: str, *values: object) -> None:
        table.add_row(
            label, *(value if isinstance(value, str) else f"{value:,}" for value in values)
        )

    page = cache.page_bytes
    add("room", *(format_size(pages * page) for _, _, pages in tiers))
    add(
        "in use",
        *(format_size((pages - cache.free_pages(tier)) * page) for tier, _, pages in tiers),
    )
    add("adapters in it", *(cache.resident_tasks(tier) for tier, _, _ in tiers))
    add("hits", *(counters.hits for _, counters, _ in tiers))
    add("misses", *(counters.misses for _, counters, _ in tiers))
    add("loads", *(counters.tasks_loaded for _, counters, _ in tiers))
    device_again = stats.device.tasks_loaded - len(asked)
    add("of them again", f"{stats.source_rereads:,} from file", f"{device_again:,}")
    add("evictions", *(counters.tasks_evicted for _, counters, _ in tiers))
    console.print(table)
    console.print(
        "(Hits and misses are counted in host by request, on the device by adapter and step. What "
        "the scheduler fetches ahead is a load without a miss.)",
        style="dim",
    )
    device_bytes = cache.max_device_pages * page
    console.print(
        f"{len(fleet.infos)} adapters registered, {len(asked)} asked, "
        f"{format_size(stats.source_bytes)} read from files. Device memory for adapters: "
        f"{format_size(device_bytes)} instead of {format_size(fleet.total_bytes)} with all of "
        f"them on the device ({device_bytes / fleet.total_bytes:.0%})."
    )
