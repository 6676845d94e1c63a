"""Pages are full: the promise of 99 %, and the table of docs/sizing.md that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.python.utilisation_table import MODELS, Fleet, fleets, markdown, measure
from tests.support.trtllm_sizing import TrtllmPages, slot_utilisation, trtllm_utilisation

DOCUMENT = Path(__file__).parents[2] / "docs" / "sizing.md"


@pytest.mark.parametrize(
    "fleet", list(fleets()), ids=lambda f: f"{f.ranks[0]}-{f.ranks[-1]}-{f.targets}"
)
@pytest.mark.parametrize("model", MODELS)
def test_99_percent_of_page_bytes_are_weights(model: str, fleet: Fleet) -> None:
    shares = measure(model, fleet)
    assert 0.99 <= shares.pagedlora <= 1.0
    assert shares.pagedlora >= shares.trtllm


def test_the_documented_table_is_the_computed_one() -> None:
    text = DOCUMENT.read_text()
    assert markdown() in text, "run: python -m benchmarks.python.utilisation_table"
    numbers = [line for line in text.splitlines() if line.startswith("| ") and " / " in line]
    assert len(numbers) == len(list(fleets()))  # and nothing left over from an older one


# A reference model whose geometry is known: hidden 16, mlp 32, 13 modules, 2 layers, split by 2.
SPLIT_FEATURES = [40, 24, 24, 24, 24, 32, 32, 32, 40, 24, 24, 24, 24]
SPLIT_RANKS = [8, 4, 4, 4, 8, 8, 8, 8, 8, 4, 4, 4, 8]


def test_the_sizing_compared_with_has_the_known_geometry() -> None:
    features = [size for size in SPLIT_FEATURES for _ in range(2)]
    pages = TrtllmPages.of_model(features, max_rank=64)
    assert (pages.slot_elements, pages.slots_per_page) == (24, 288)
    adapter = list(enumerate(rank for rank in SPLIT_RANKS for _ in range(2)))
    slots = sum(-(-rank * features[module] // 24) for module, rank in adapter)
    assert slots == 202
    assert pages.elements_of(features, adapter) == 288 * 24


@pytest.mark.parametrize(
    ("ranks", "num_pages"),
    [
        ([64, 64], 2),
        ([32, 32, 64], 2),
        ([32, 32, 64, 24], 3),
        ([60, 1, 1, 1, 1], 2),
        ([60, 1, 1, 1, 64, 1], 4),
    ],
)
def test_rows_are_laid_down_next_fit(ranks: list[int], num_pages: int) -> None:
    pages = TrtllmPages(slot_elements=16, slots_per_page=80)
    adapter = [(0, rank) for rank in ranks]
    assert pages.elements_of([20], adapter) == num_pages * 80 * 16


def test_equal_adapters_fill_slots_of_the_maximum_rank() -> None:
    features = [10, 30]
    assert slot_utilisation(features, [[(0, 4), (1, 4)]] * 2) == 1.0
    assert slot_utilisation(features, [[(0, 4)], [(1, 4)]]) == 0.5
    assert trtllm_utilisation([10, 10], [[(0, 8), (1, 8)]]) == 1.0
