"""What can be asked of the two-tier cache of adapters; nothing here changes it."""

from __future__ import annotations

from typing import Literal

from pagedlora._core import LoraModelConfig, PeftCacheManager, PeftCacheStats

Tier = Literal["host", "device"]


class PeftCacheQueries:
    """The questions of a `PeftCacheManager`; see there."""

    _core: PeftCacheManager
    _model_config: LoraModelConfig
    _device: str

    @property
    def core(self) -> PeftCacheManager:
        """The C++ manager."""
        return self._core

    @property
    def model_config(self) -> LoraModelConfig:
        """What it was made for."""
        return self._model_config

    @property
    def device(self) -> str:
        """Where the device tier lies: "cpu", "cuda:N", or the name of a device made for tests."""
        return self._device

    @property
    def max_host_pages(self) -> int:
        """Pages of the host tier."""
        return self._core.max_pages("host")

    @property
    def max_device_pages(self) -> int:
        """Pages of the device tier."""
        return self._core.max_pages("device")

    def free_pages(self, tier: Tier) -> int:
        """Pages of a tier that no task holds."""
        return self._core.free_pages(tier)

    def resident_tasks(self, tier: Tier) -> int:
        """Number of tasks in a tier."""
        return self._core.resident_tasks(tier)

    @property
    def page_bytes(self) -> int:
        """Size of a page, the same in both tiers."""
        return self._core.layout_params.page_bytes

    @property
    def max_part_bytes(self) -> int:
        """Most bytes of a matrix that lie in one piece of a page."""
        return self._core.layout_params.max_part_bytes

    def is_task_cached(self, task_id: int) -> bool:
        """Whether the task is resident in the host tier."""
        return self._core.is_task_cached(task_id, "host")

    def is_task_cached_device(self, task_id: int) -> bool:
        """Whether the task is resident in the device tier."""
        return self._core.is_task_cached(task_id, "device")

    def is_task_done(self, task_id: int) -> bool:
        """Whether the task has no active and no paused owner."""
        return self._core.is_task_done(task_id)

    def is_task_done_device(self, task_id: int) -> bool:
        """Whether the task has no active owner."""
        return self._core.is_task_done_device(task_id)

    @property
    def active_tasks(self) -> dict[int, set[int]]:
        """Task id to the ids of its active requests; no empty sets."""
        return self._core.active_tasks()

    @property
    def paused_tasks(self) -> dict[int, set[int]]:
        """Task id to the ids of its paused requests; no empty sets."""
        return self._core.paused_tasks()

    @property
    def stats(self) -> PeftCacheStats:
        """Counters since construction."""
        return self._core.stats
