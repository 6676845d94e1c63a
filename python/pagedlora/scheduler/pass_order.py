"""In which order a pass looks at the requests.

By precedence (see `precedence`), but for two things, both among requests of one priority that are
not past the bound:

- Those that have begun come before new ones: a place in the batch that a new one took from one of
  them would leave that one's adapter and blocks idle.
- If the device tier cannot hold the adapters of all, new ones of one adapter come together, where
  the first of them stands. So fewer adapters share the tier at a time, each is done sooner, and
  batches stay full. The oldest new one is still the first, so the bound of its wait holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

from pagedlora.scheduler.page_budget import PageBudget
from pagedlora.scheduler.precedence import Record


def pass_order(
    records: Iterable[Record], is_begun: Callable[[Record], bool], budget: PageBudget
) -> list[Record]:
    """The records in the order in which a pass considers them.

    Args:
        records: Of the requests to consider, each once.
        is_begun: Whether a request has, or had, keys and values.
        budget: Of the pass; not changed.
    """
    by_precedence = sorted(records, key=attrgetter("precedence"))
    are_scarce = not budget.holds_all(record.request for record in by_precedence)
    order: list[Record] = []
    for (in_bound, _), group in groupby(by_precedence, key=lambda each: each.precedence[:2]):
        peers = list(group)
        order += _peers_in_order(peers, is_begun, are_scarce) if in_bound else peers
    return order


def _peers_in_order(
    peers: Iterable[Record], is_begun: Callable[[Record], bool], are_scarce: bool
) -> list[Record]:
    """Requests of one priority, given by arrival: begun ones, then new ones by adapter."""
    begun: list[Record] = []
    groups: list[list[Record]] = []  # of new ones
    group_of_task: dict[int, list[Record]] = {}
    for record in peers:
        task_id = record.request.lora_task_id
        if is_begun(record):
            begun.append(record)
        elif task_id is None or not are_scarce:
            groups.append([record])
        else:
            if task_id not in group_of_task:
                group_of_task[task_id] = []
                groups.append(group_of_task[task_id])
            group_of_task[task_id].append(record)
    return begun + [record for group in groups for record in group]
