"""The two-tier cache of adapters, driven by what happens to requests.

In each step an engine calls `poll`, so that finished loads take effect; `add_request_peft` for
requests that enter; `prefetch` with those that wait; `ensure_batch` before the forward and
`BatchLease.close` after it; and `mark_request_done` when a request is suspended or ends. Which
copies may be evicted follows from the owner sets; see docs/states.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pagedlora import _core
from pagedlora.arguments import (
    check_type,
    id_of,
    refuse_request,
    refuse_requests,
    to_config,
    to_seconds,
)
from pagedlora.cache_budgets import cache_budgets, check_agreement, check_max_adapter
from pagedlora.config import PeftCacheConfig
from pagedlora.devices import core_device_of, free_bytes_of
from pagedlora.errors import InvalidArgumentError
from pagedlora.peft_cache_queries import PeftCacheQueries, Tier
from pagedlora.requests import PeftRequest
from pagedlora.shown import shown
from pagedlora.task_rows import GatheredRow, join_rows

if TYPE_CHECKING:
    from pagedlora.adapter_weights import AdapterWeights
    from pagedlora.task_rows import ModuleWeights

AdapterState = Literal["waiting", "loading", "ready", "failed"]

# (task id, tier, whether it was loaded) of loads that ended here, to those that ended everywhere.
LoadOutcome = tuple[int, str, bool]
Agree = Callable[[list[LoadOutcome]], list[LoadOutcome]]


class PeftCacheManager(PeftCacheQueries):
    """Keeps adapters in a host and a device tier of fixed size, and knows who uses them.

    Thread-safe. Workers read and copy without the GIL, and calls that wait release it. A call that
    raises has changed neither owners nor residency. In a child of `os.fork()` there are no workers:
    what needs them or the lock raises InvalidArgumentError there, and `close()` does nothing.
    """

    def __init__(
        self,
        model_config: _core.LoraModelConfig,
        config: PeftCacheConfig | Mapping[str, Any] | None = None,
        device: object = "cpu",
        *,
        clock: _core.Clock | None = None,
    ) -> None:
        """Allocates both tiers.

        Args:
            model_config: The modules, their sizes and the dtype of the pages.
            config: Budgets, or a mapping of fields; page counts round down, so that a tier never
                exceeds its own.
            device: "cpu", "cuda" or "cuda:N" (also as torch's), or what `make_cuda_device` gave. A
                GPU holds the device tier; the host tier is pinned then.
            clock: Decides when loads take too long; None: the system's monotonic clock.

        Raises:
            InvalidArgumentError: An argument of another type, another device, a budget that holds
                no page, a tier that cannot hold an adapter of `config.max_adapter_size`, or a dtype
                or rank in `config` that is not the model configuration's.
            GpuUnavailableError: There is no such GPU; its `reason` says what is missing.
            OutOfMemoryError: The system or the GPU does not have that much memory.
        """
        check_type(model_config, _core.LoraModelConfig, "model_config")
        config = to_config(PeftCacheConfig, config, "config")
        if clock is not None:
            check_type(clock, _core.Clock, "clock")
        core_device = core_device_of(device)
        self._device = "cpu" if core_device is None else core_device.name
        check_agreement(config, model_config)
        budgets = cache_budgets(config, model_config, free_bytes_of(core_device))
        self._model_config = model_config
        self._core = _core.PeftCacheManager(
            model_config,
            host_cache_bytes=budgets.host_bytes,
            device_cache_bytes=budgets.device_bytes,
            page_bytes=0 if config.page_size == "auto" else config.page_size,
            max_part_bytes=config.max_part_bytes,
            eviction_policy=config.eviction_policy,
            num_put_workers=config.num_put_workers,
            num_ensure_workers=config.num_ensure_workers,
            max_inflight_batches=config.max_inflight_batches,
            load_timeout_s=config.load_timeout_s,
            clock=clock,
            device=core_device,
        )
        self._load_timeout_s = config.load_timeout_s
        self._max_inflight_batches = config.max_inflight_batches
        check_max_adapter(config, model_config, self._core)

    def add_request_peft(self, request: PeftRequest, try_gpu_cache: bool = True) -> None:
        """Makes the request an owner of its task and starts to load the task into the host tier.

        The load takes effect in `poll`, `wait_idle` or the `ensure_batch` of the request; until
        then `adapter_state` is "loading". If it fails, it is "failed" until the request is marked
        done, with the error in `adapter_error` and in the `errors` of a lease.

        Args:
            request: Without a task: nothing happens. Idempotent for a live request. One with a true
                `has_started` may take the place of owners that have not started: they wait again.
            try_gpu_cache: Accepted for callers of TensorRT-LLM; `prefetch` and `ensure_batch` fill
                the device.

        Raises:
            PeftTaskNotCachedError: The task is unknown, or was evicted, and the request carries
                no weights.
            RequestConflictError: The request lives with another task, or brings other weights
                than those of the live task.
            AdapterTooLargeError: The adapter can never fit a tier beside what is pinned.
            LoraCacheFullError: Owned adapters fill the host tier; the request can wait.
        """
        del try_gpu_cache
        try:
            request_id, task_id = request.request_id, request.lora_task_id
            if task_id is None:
                return
            weights: AdapterWeights | None = request.lora_weights
        except AttributeError as error:
            refuse_request(request, error)
        carried = None if weights is None else self._carried(weights)
        started = bool(getattr(request, "has_started", False))
        self._core.add_request_peft(request_id, task_id, carried, started)

    def adapter_state(self, request: PeftRequest) -> AdapterState:
        """What the request's adapter is to its next batch.

        Returns:
            "ready" if it is resident in either tier, or the request has none; "loading"; "failed";
            "waiting" if the request owns no task: it was never added, or its place was taken.
        """
        if not self._has_adapter(request):
            return "ready"
        return self._core.adapter_state(request.request_id)  # type: ignore[return-value]

    def adapter_error(self, request: PeftRequest) -> Exception | None:
        """Why the request's adapter failed to load; None if it did not."""
        error: Exception | None = self._core.adapter_error(id_of(request))
        return error

    def poll(self, timeout_s: float = 0.0, agree: Agree | None = None) -> list[int]:
        """Lets loads that have ended take effect, and gives up those whose time is up.

        Args:
            timeout_s: Seconds to wait for one if none has ended.
            agree: For tensor parallelism: called with the loads that ended here, returns those
                that ended on every rank, as loaded if they are loaded on every rank.

        Returns:
            Ids of the requests whose adapter failed by it.
        """
        if timeout_s or not isinstance(timeout_s, float):
            timeout_s = to_seconds(timeout_s, "timeout_s")
        return self._core.poll(timeout_s, agree)

    def prefetch(self, requests: Iterable[PeftRequest]) -> None:
        """Brings in what waiting requests will need, into both tiers, as far as there is room.

        Args:
            requests: The waiting queue, next first. Replaces that of the last call. Nothing that
                is nearer, started, paused or leased is given up for them.
        """
        window = _listed(requests, "requests")
        try:
            tasks = [r.lora_task_id for r in window if r.lora_task_id is not None]
        except AttributeError as error:
            refuse_requests(window, "requests", error, ("lora_task_id",))
        self._core.prefetch(tasks)

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Waits until no load is queued or running, and lets all of them take effect.

        Args:
            timeout_s: Seconds at most; None: four times `load_timeout_s`.

        Returns:
            Whether none is left.
        """
        limit = 4 * self._load_timeout_s if timeout_s is None else timeout_s
        return self._core.wait_idle(to_seconds(limit, "timeout_s"))

    def open_lease_tasks(self) -> set[int]:
        """Tasks whose device copies open leases hold."""
        return self._core.open_lease_tasks()

    def pin(self, task_id: int) -> None:
        """Keeps the task's host copy, after bringing it in, until as many `unpin`.

        Raises:
            PeftTaskNotCachedError: The task is unknown.
            LoraCacheFullError: There is no room, or the pinned tasks would leave none for the
                largest known adapter.
        """
        self._core.pin(task_id)

    def unpin(self, task_id: int) -> None:
        """Takes one `pin` back.

        Raises:
            PeftTaskNotCachedError: The task is unknown.
            InvalidArgumentError: It is not pinned; a load that failed unpins.
        """
        self._core.unpin(task_id)

    def get_and_reset_iteration_stats(self) -> dict[str, int]:
        """What happened since the last call, and how things stand, by TensorRT-LLM's names.

        Returns:
            Since the last call: requestsPaused, requestsResumed, requestsTerminated,
            tasksReleasedDevice, tasksReleasedHost, tasksEvictedDevice, pagesEvictedDevice,
            tasksEvictedHost, pagesEvictedHost. Now: devicePagesTotal, devicePagesAvailable,
            hostPagesTotal, hostPagesAvailable, deviceTasksInProgress, deviceTasksDone, activeTasks,
            pausedTasks.
        """
        return self._core.get_and_reset_iteration_stats()

    def _has_adapter(self, request: PeftRequest) -> bool:
        # What a request was added with counts, not what it says now.
        try:
            return request.lora_task_id is not None or self._core.is_owner(request.request_id)
        except AttributeError as error:
            refuse_request(request, error)

    def mark_request_done(self, request: PeftRequest, pause: bool = False) -> None:
        """Ends the request's ownership, or with `pause` keeps only its host copy; idempotent."""
        self._core.mark_request_done(id_of(request), pause)

    def free_resources(self, request: PeftRequest) -> None:
        """The same as `mark_request_done(request)`."""
        self._core.mark_request_done(id_of(request), False)

    def ensure_batch(
        self,
        context_requests: Iterable[PeftRequest],
        generation_requests: Iterable[PeftRequest],
        reset_gpu_cache: bool = False,
        *,
        stream: object = None,
    ) -> _core.BatchLease:
        """Makes the adapters of a batch resident on the device and leases them.

        Args:
            context_requests: In the order of the batch; requests without a task are left out.
            generation_requests: Likewise.
            reset_gpu_cache: First let every device copy count as unowned.
            stream: On which the previous lease is closed: torch's, or its number. Without one a
                GPU is waited for as a whole; the CPU has none.

        Returns:
            A mapping of request id to entries, with `.errors`. Loads of these adapters are waited
            for, up to `load_timeout_s`. With one batch in flight the previous lease is closed.

        Raises:
            LoraCacheFullError: The absent adapters do not fit beside those of this batch that are
                resident, and of other open leases; nothing was changed.
            InvalidArgumentError: `max_inflight_batches` leases are open, more than one; or `stream`
                is being captured into a CUDA graph, and the previous lease stays open.
        """
        context = _listed(context_requests, "context_requests")
        requests = (*context, *_listed(generation_requests, "generation_requests"))
        ids = [r.request_id for r in requests if self._has_adapter(r)]
        return self._core.ensure_batch(ids, reset_gpu_cache, stream)

    def ensure_batch_map_task_id(
        self,
        context_requests: Iterable[PeftRequest],
        generation_requests: Iterable[PeftRequest],
        reset_gpu_cache: bool = False,
    ) -> tuple[_core.BatchLease, dict[int, list[int]]]:
        """As `ensure_batch`, with the request ids of each task beside the lease."""
        lease = self.ensure_batch(context_requests, generation_requests, reset_gpu_cache)
        requests_of_task: dict[int, list[int]] = {}
        for request_id in lease:
            requests_of_task.setdefault(lease.task_of(request_id), []).append(request_id)
        return lease, requests_of_task

    def reset_device_cache(self) -> None:
        """Lets every device copy outside an open lease count as unowned until it is used again."""
        self._core.reset_device_cache()

    def evict_unowned(self, tier: Tier) -> None:
        """Frees what tasks without owners hold in a tier."""
        self._core.evict_unowned(tier)

    def determine_num_pages(self, request: PeftRequest) -> int:
        """Pages that the request's adapter takes in either tier; 0 without an adapter.

        Raises:
            PeftTaskNotCachedError: The task is unknown and the request carries no weights.
        """
        try:
            task_id, weights = request.lora_task_id, request.lora_weights
        except AttributeError as error:
            refuse_request(request, error)
        if task_id is None:
            return 0
        if weights is not None:
            return self._core.num_pages_of_plan(self._carried(weights).plan)
        return self._core.num_pages_of_task(task_id)

    def _carried(self, weights: Any) -> _core.CarriedWeights:
        carry = getattr(weights, "carried", None)
        carried = carry(self._model_config) if callable(carry) else None
        name = f"what lora_weights {shown(weights)} carries"
        return check_type(carried, _core.CarriedWeights, name)

    @property
    def max_inflight_batches(self) -> int:
        """Leases that may be open together; with 1, each batch closes the lease before it."""
        return self._max_inflight_batches

    def task_weights(self, task_id: int, tier: Tier = "device") -> dict[str, ModuleWeights]:
        """A resident task's matrices, put together from its pages.

        Args:
            task_id: The task.
            tier: Which copy to read.

        Returns:
            Module name to (A [rank, in_features], B [out_features, rank]) in the cache's dtype;
            the scale is not applied. Rows for slices of a module stand one behind the other along
            the ranks, with zeros outside their slices. With DoRA a third tensor is its scale
            [out_features], with a bias a fourth is that (and the third None without DoRA), in
            float32. An embedding's in_features are its vocabulary.

        Raises:
            PeftTaskNotCachedError: The task is not resident in that tier.
        """
        import torch

        dtype = getattr(torch, self._model_config.dtype.name)
        rows = [GatheredRow.empty(row, dtype) for row in self._core.task_rows(task_id, tier)]
        self._core.gather_rows(task_id, tier, [row.addresses for row in rows])
        return join_rows(self._model_config, rows)

    def close(self) -> None:
        """Gives up loads and closes open leases; then nothing can be added. Idempotent."""
        self._core.close()

    def check_invariants(self) -> None:
        """Raises if pages leak, owners and pins disagree, or a counter is off.

        Raises:
            RuntimeError: Says which invariant is broken; this is a bug in the cache.
        """
        self._core.check_invariants()


def _listed(requests: Iterable[PeftRequest], name: str) -> Sequence[PeftRequest]:
    if isinstance(requests, (list, tuple)):
        return requests
    try:
        return tuple(requests)
    except TypeError:
        raise InvalidArgumentError(
            f"{name} is {shown(requests)}: give a list of requests"
        ) from None
