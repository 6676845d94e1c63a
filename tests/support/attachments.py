"""Modules with adapters attached, for tests: what they are made of, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support.cache_fixtures import check_pages
from tests.support.encoders import (
    CLASSIFIER_ADAPTERS,
    ENCODER_ADAPTERS,
    EncoderOracle,
    answer_of,
    build_classifier,
    build_encoder,
    save_encoder_adapters,
)
from torch import nn

from pagedlora import (
    Attachment,
    LoraManager,
    LoraModelConfig,
    PeftCacheConfig,
    PeftCacheManager,
    attach,
)

PAGE_BYTES = 1024


class Setup(NamedTuple):
    """A module with adapters."""

    module: Any
    cache: PeftCacheManager
    adapters: LoraManager
    attached: Attachment

    def run(self, names: list[str | None], batch: Any, **options: Any) -> torch.Tensor:
        with torch.inference_mode(), self.attached.rows(names, **options):
            return answer_of(self.module(**batch))


@pytest.fixture
def make_setup() -> Iterator[Callable[..., Setup]]:
    """Attaches modules; at teardown nothing is owned, and every page is accounted for."""
    made: list[Setup] = []

    def make(module: nn.Module, directories: dict[str, Path], **sizes: Any) -> Setup:
        config = LoraModelConfig.from_module(module, linear_modules(module), max_lora_rank=16)
        pages = {"host_pages": 400, "device_pages": 400, **sizes}
        cache = PeftCacheManager(
            config,
            PeftCacheConfig(
                host_cache_size=pages.pop("host_pages") * PAGE_BYTES,
                device_cache_size=pages.pop("device_pages") * PAGE_BYTES,
                page_size=PAGE_BYTES,
                **pages,
            ),
        )
        adapters = LoraManager(config, cache)
        for name, path in directories.items():
            adapters.register(name, path)
        made.append(Setup(module, cache, adapters, attach(module, cache, adapters)))
        return made[-1]

    yield make
    for setup in made:
        setup.attached.detach()
        assert (setup.cache.active_tasks, setup.cache.paused_tasks) == ({}, {})
        assert setup.cache.open_lease_tasks() == set()
        assert setup.adapters._names._uses == {}
        check_pages(setup.cache)
        setup.cache.close()


def linear_modules(module: nn.Module) -> list[str]:
    """Names of all linear modules, of the head too."""
    return [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]


MODELS = {
    "classifier": (build_classifier, CLASSIFIER_ADAPTERS),
    "encoder": (build_encoder, ENCODER_ADAPTERS),
}


class Saved(NamedTuple):
    """A kind of model with adapters on disk."""

    build: Callable[[], Any]
    directories: dict[str, Path]
    oracle: EncoderOracle


@pytest.fixture(scope="module")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Saved]:
    saved = {}
    for kind, (build, adapters) in MODELS.items():
        root = tmp_path_factory.mktemp(kind)
        directories = save_encoder_adapters(root, build(), adapters)
        saved[kind] = Saved(build, directories, EncoderOracle(build(), directories))
    return saved


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.std()))


def attach_to(setup: Setup, module: nn.Module) -> Attachment:
    return attach(module, setup.cache, setup.adapters)
