"""
The C++ core of pagedlora. Use the names of the pagedlora package instead.
"""

from __future__ import annotations

import collections.abc
import enum
import typing

import typing_extensions

__all__: list[str] = [
    "AdapterPlan",
    "AdapterRoot",
    "AttentionBatch",
    "BatchLease",
    "CarriedWeights",
    "Clock",
    "Device",
    "Dtype",
    "FakeDevice",
    "FakeSource",
    "GpuLoraOperator",
    "GpuScatter",
    "LayoutParams",
    "LeasePages",
    "LoraBatch",
    "LoraModelConfig",
    "LoraModule",
    "LoraOperator",
    "ManualClock",
    "ModuleKind",
    "PagedAttention",
    "PeftCacheManager",
    "PeftCacheStats",
    "PlannedRow",
    "ProcessMark",
    "RowPages",
    "RowShape",
    "ScratchFile",
    "ScratchPiece",
    "SourceGroup",
    "TaskLayerModuleConfig",
    "TensorHeader",
    "TensorSource",
    "TierStats",
    "build_info",
    "device_pool_to_dlpack",
    "entry_transitions",
    "gpu_support",
    "make_cuda_device",
    "make_memory_source",
    "measure_layout",
    "open_file",
    "open_file_source",
    "read_safetensors_header",
    "search_layout_params",
    "source_with_tail",
]

class Dtype(enum.Enum):
    bfloat16 = ...
    float16 = ...
    float32 = ...

class ModuleKind(enum.Enum):
    embedding = ...
    linear = ...

class LoraModule:
    """
    One layer of the model that can carry LoRA.
    """
    def __eq__(self, other: object, /) -> bool: ...
    def __init__(
        self,
        name: str,
        in_features: int,
        out_features: int,
        layer_id: int = -1,
        module_id: int = -1,
        kind: ModuleKind = ModuleKind.linear,
    ) -> None: ...
    def __repr__(self) -> str: ...
    @property
    def in_features(self) -> int: ...
    @property
    def kind(self) -> ModuleKind: ...
    @property
    def layer_id(self) -> int: ...
    @property
    def module_id(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def out_features(self) -> int: ...

class LoraModelConfig:
    """
    What a model offers to LoRA.
    """
    def __init__(
        self, modules: collections.abc.Sequence[LoraModule], dtype: Dtype, max_lora_rank: int = 64
    ) -> None: ...
    def find(self, name: str) -> int | None:
        """
        Position of the module in `modules`, or None.
        """
    @property
    def dtype(self) -> Dtype: ...
    @property
    def max_lora_rank(self) -> int: ...
    @property
    def modules(self) -> list[LoraModule]: ...

class LayoutParams:
    """
    Page and part sizes in bytes.
    """
    def __init__(self, page_bytes: int, element_bytes: int, max_part_bytes: int = 0) -> None: ...
    @property
    def element_bytes(self) -> int: ...
    @property
    def max_part_bytes(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...

class AdapterRoot:
    """
    A directory that adapters' files must lie in; see adapter_root.h.
    """
    def __init__(self, directory: str) -> None: ...
    def check(self, path: str) -> None:
        """
        Raises what opening a file or directory would.
        """
    @property
    def path(self) -> str: ...
    @property
    def was_replaced(self) -> bool:
        """
        Whether its path names another directory by now.
        """

class TensorSource:
    """
    Where an adapter's bytes come from.
    """
    @property
    def description(self) -> str: ...
    @property
    def size_bytes(self) -> int: ...

class SourceGroup(TensorSource):
    """
    Several sources of the same bytes, each tried in turn.
    """
    def __init__(self, first: TensorSource) -> None: ...
    def add(self, source: TensorSource) -> None: ...

class ScratchPiece:
    """
    Some bytes of a ScratchFile; their space is given back with it.
    """
    @property
    def size_bytes(self) -> int: ...

class ScratchFile:
    """
    A nameless temporary file, for what is read again with an adapter.
    """
    def __init__(self, directory: str) -> None: ...
    def append(self, data: typing_extensions.Buffer) -> ScratchPiece:
        """
        Writes the bytes of a buffer behind all others.
        """
    @property
    def used_bytes(self) -> int: ...

class TensorHeader:
    """
    One tensor of a safetensors file.
    """
    @property
    def dtype(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def shape(self) -> list[int]: ...

class PlannedRow:
    """
    A and B of a module, or of a slice of it, in a source.

    With delta = scale * (B A x + bias), y += delta, or y += (dora_scale - 1) * (y - base bias)
    + dora_scale * delta. bias is (offset, dtype), dora_scale of float32.

    A is [rank, in length], B [out length, rank]; y[out slice] += scale * B (A x[in slice]).
    A slice is (first feature, number of features); 0 features: to the module's end. A row
    stride counts elements between the starts of stored rows; 0: they lie back to back.
    """
    def __init__(
        self,
        module: int,
        rank: int,
        scale: float,
        a_offset: int,
        a_dtype: Dtype,
        b_offset: int,
        b_dtype: Dtype,
        *,
        in_slice: tuple[int, int] = (0, 0),
        out_slice: tuple[int, int] = (0, 0),
        a_row_stride: int = 0,
        b_row_stride: int = 0,
        bias: tuple[int, Dtype] | None = None,
        dora_scale_offset: int | None = None,
    ) -> None: ...
    @property
    def in_slice(self) -> tuple[int, int]: ...
    @property
    def module(self) -> int: ...
    @property
    def out_slice(self) -> tuple[int, int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def scale(self) -> float: ...

class AdapterPlan:
    """
    What an adapter consists of and where it is read.
    """
    def __init__(
        self,
        config: LoraModelConfig,
        rows: collections.abc.Sequence[PlannedRow],
        source: TensorSource,
        checks_values: bool = False,
    ) -> None: ...
    @property
    def rows(self) -> list[PlannedRow]: ...

class CarriedWeights:
    """
    Weights that come with a request.
    """
    def __init__(self, plan: AdapterPlan, digest: str) -> None: ...
    @property
    def plan(self) -> AdapterPlan: ...

class TaskLayerModuleConfig:
    """
    One A part and one B part of a block; entries of a module add up.
    """
    @property
    def adapter_size(self) -> int: ...
    @property
    def bias_pointer(self) -> int | None:
        """
        Of float32 [out_size]; None without a bias.
        """
    @property
    def in_offset(self) -> int: ...
    @property
    def in_size(self) -> int: ...
    @property
    def layer_id(self) -> int: ...
    @property
    def module_id(self) -> int: ...
    @property
    def module_name(self) -> str: ...
    @property
    def num_slots(self) -> int: ...
    @property
    def out_offset(self) -> int: ...
    @property
    def out_page_id(self) -> int: ...
    @property
    def out_size(self) -> int: ...
    @property
    def out_slot_idx(self) -> int: ...
    @property
    def page_id(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def scaling_vec_pointer(self) -> int | None:
        """
        Of float32 [out_size]; None without DoRA.
        """
    @property
    def slot_idx(self) -> int: ...
    @property
    def weights_in_pointer(self) -> int: ...
    @property
    def weights_out_pointer(self) -> int: ...

class BatchLease:
    """
    A batch's hold on the device copies that it reads: a mapping of request ids to entries.

    Entries are made when asked for. Close it after the last read; it is a context manager.
    Whatever reads pages raises LeaseClosedError afterwards. Thread-safe.
    """
    def __contains__(self, arg0: typing.Any) -> bool: ...
    def __enter__(self) -> BatchLease: ...
    def __exit__(self, *args: object) -> None: ...
    def __getitem__(self, arg0: int) -> list[TaskLayerModuleConfig]: ...
    def __iter__(self) -> collections.abc.Iterator[int]: ...
    def __len__(self) -> int: ...
    def close(self, stream: typing.Any = None) -> None:
        """
        Ends the hold once what is launched on the stream is done; idempotent.

        The stream is one of torch or its number. Without one a GPU is waited for as a whole. Raises
        InvalidArgumentError, and leaves the lease open, if the stream is being captured.
        """
    def get(self, request_id: int, default: typing.Any = None) -> typing.Any: ...
    def items(self) -> list[tuple[int, list[TaskLayerModuleConfig]]]: ...
    def keys(self) -> list[int]: ...
    def task_of(self, request_id: int) -> int: ...
    def touched_modules(self) -> set[int]:
        """
        Indices of the modules that any adapter of the batch touches.
        """
    def values(self) -> list[list[TaskLayerModuleConfig]]: ...
    @property
    def errors(self) -> dict[int, BaseException]:
        """
        Requests whose adapter could not be brought in, with their errors.
        """
    @property
    def is_open(self) -> bool: ...

class RowPages:
    """
    Where a row of a leased adapter lies: addresses are the device tier's.

    Slices are (first feature, features). A tile is (features, address).
    """
    @property
    def a(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """
        Blocks (ranks, tiles); a tile is [ranks, features], of an embedding
        [features, ranks].
        """
    @property
    def b(self) -> list[tuple[int, list[tuple[int, int]]]]:
        """
        Blocks (ranks, tiles); a tile is [features, ranks].
        """
    @property
    def bias(self) -> list[tuple[int, int]]:
        """
        Tiles of float32; none without a bias.
        """
    @property
    def dora_scale(self) -> list[tuple[int, int]]:
        """
        Likewise.
        """
    @property
    def in_slice(self) -> tuple[int, int]: ...
    @property
    def out_slice(self) -> tuple[int, int]: ...
    @property
    def rank(self) -> int: ...
    @property
    def scale(self) -> float: ...

class LeasePages:
    """
    Within `with`: a lease that cannot be closed, and where its rows lie.

    Launch in the block what reads the pages; whoever closes the lease waits for its end.
    Of one thread. Entering raises LeaseClosedError.
    """
    def __enter__(self) -> LeasePages: ...
    def __exit__(self, *args: object) -> None: ...
    def __init__(self, lease: BatchLease) -> None: ...
    def rows(self, request_id: int, module_index: int) -> list[RowPages]:
        """
        The rows of the request's adapter for a module; none if it does not touch it.
        """

class Clock:
    pass

class ManualClock(Clock):
    """
    Stands still until it is told to go on.
    """
    def __init__(self) -> None: ...
    def advance(self, seconds: float) -> None: ...

class Device:
    def memory_info(self) -> tuple[int, int]:
        """
        Free and total bytes.
        """
    @property
    def name(self) -> str: ...

class FakeDevice(Device):
    """
    Ordinary memory with copies that are late, out of order, never done or failing.
    """
    def __init__(self, is_host_memory: bool = False) -> None: ...
    def fail_copy_after(self, number: int) -> None: ...
    def finish_reads(self) -> None: ...
    def hold_copies(self) -> None: ...
    def hold_reads(self) -> None: ...
    def release_copies(self) -> None: ...
    def release_copy(self, number: int) -> None: ...
    @property
    def num_copies(self) -> int: ...
    @property
    def num_held(self) -> int: ...

class FakeSource(TensorSource):
    """
    Bytes in memory with reads that are late, never done or failing.
    """
    def __init__(self, content: bytes, description: str = "fake source") -> None: ...
    def fail_finish(self) -> None: ...
    def fail_open(self) -> None: ...
    def fail_read_after(self, number: int) -> None: ...
    def hold_reads(self) -> None: ...
    def release_reads(self) -> None: ...
    def wait_for_reads(self, number: int) -> None: ...
    @property
    def num_held(self) -> int: ...
    @property
    def num_opens(self) -> int: ...

class TierStats:
    """
    Counters of one tier since construction.
    """
    def __repr__(self) -> str: ...
    @property
    def bytes_loaded(self) -> int:
        """
        Of adapters brought in.
        """
    @property
    def hits(self) -> int:
        """
        There, or on its way, when a request was added (host) or a batch asked for it (device).
        """
    @property
    def load_seconds(self) -> float:
        """
        That workers took to bring them in.
        """
    @property
    def misses(self) -> int:
        """
        It was not: a load had to be started.
        """
    @property
    def pages_evicted(self) -> int: ...
    @property
    def tasks_evicted(self) -> int: ...
    @property
    def tasks_loaded(self) -> int:
        """
        Adapters brought in, for a miss or ahead of one.
        """

class PeftCacheStats:
    """
    Counters of a manager since construction.
    """
    def __repr__(self) -> str: ...
    @property
    def device(self) -> TierStats: ...
    @property
    def failed_loads(self) -> int: ...
    @property
    def host(self) -> TierStats: ...
    @property
    def source_bytes(self) -> int:
        """
        Read from files.
        """
    @property
    def source_reads(self) -> int:
        """
        Whole adapters read from their files.
        """
    @property
    def source_rereads(self) -> int:
        """
        Of them, those that had been read before.
        """

class RowShape:
    """
    A row of a task: (first feature, number of features) of its slices.
    """
    @property
    def has_bias(self) -> bool: ...
    @property
    def has_dora_scale(self) -> bool: ...
    @property
    def in_slice(self) -> tuple[int, int]: ...
    @property
    def module(self) -> int: ...
    @property
    def out_slice(self) -> tuple[int, int]: ...
    @property
    def rank(self) -> int: ...

class PeftCacheManager:
    """
    The two-tier cache; see pagedlora.PeftCacheManager.
    """
    def __init__(
        self,
        config: LoraModelConfig,
        *,
        host_cache_bytes: int,
        device_cache_bytes: int,
        page_bytes: int = 0,
        max_part_bytes: int = 0,
        eviction_policy: str = "lru",
        num_put_workers: int = 4,
        num_ensure_workers: int = 2,
        max_inflight_batches: int = 1,
        load_timeout_s: float = 60.0,
        clock: Clock | None = None,
        device: Device | None = None,
    ) -> None: ...
    def active_tasks(self) -> dict[int, set[int]]: ...
    def adapter_error(self, request_id: int) -> typing.Any: ...
    def adapter_state(self, request_id: int) -> str: ...
    def add_request_peft(
        self,
        request_id: int,
        task_id: int,
        weights: CarriedWeights | None = None,
        started: bool = False,
    ) -> None: ...
    def check_invariants(self) -> None: ...
    def close(self) -> None: ...
    def ensure_batch(
        self,
        request_ids: collections.abc.Sequence[int],
        reset_device_cache: bool = False,
        stream: typing.Any = None,
    ) -> BatchLease: ...
    def evict_unowned(self, tier: str) -> None: ...
    def free_pages(self, tier: str) -> int: ...
    def gather_rows(
        self,
        task_id: int,
        tier: str,
        targets: collections.abc.Sequence[tuple[RowShape, int, int, int, int]],
    ) -> None: ...
    def get_and_reset_iteration_stats(self) -> dict[str, int]: ...
    def has_started(self, request_id: int) -> bool: ...
    def is_owner(self, request_id: int) -> bool: ...
    def is_task_cached(self, task_id: int, tier: str) -> bool: ...
    def is_task_done(self, task_id: int) -> bool: ...
    def is_task_done_device(self, task_id: int) -> bool: ...
    def load_error(self, task_id: int) -> typing.Any: ...
    def mark_request_done(self, request_id: int, pause: bool = False) -> None: ...
    def max_pages(self, tier: str) -> int: ...
    def num_pages_of_plan(self, plan: AdapterPlan) -> int: ...
    def num_pages_of_task(self, task_id: int) -> int: ...
    def open_lease_tasks(self) -> set[int]: ...
    def paused_tasks(self) -> dict[int, set[int]]: ...
    def pin(self, task_id: int) -> None: ...
    def poll(
        self,
        timeout_s: float = 0.0,
        agree: collections.abc.Callable[[list[tuple[int, str, bool]]], typing.Any] | None = None,
    ) -> list[int]: ...
    def pool_range(self, tier: str) -> tuple[int, int]: ...
    def prefetch(self, task_ids: collections.abc.Sequence[int]) -> None: ...
    def register_task(self, plan: AdapterPlan) -> int: ...
    def reset_device_cache(self) -> None: ...
    def resident_tasks(self, tier: str) -> int: ...
    def task_rows(self, task_id: int, tier: str) -> list[RowShape]: ...
    def unpin(self, task_id: int) -> None: ...
    def unregister_task(self, task_id: int) -> None: ...
    def wait_idle(self, timeout_s: float) -> bool: ...
    def was_revoked(self, request_id: int) -> bool: ...
    @property
    def layout_params(self) -> LayoutParams: ...
    @property
    def stats(self) -> PeftCacheStats: ...

class ProcessMark:
    """
    The process in which an object was made; see process_mark.h.
    """
    def __init__(self) -> None: ...
    def check(self, what: str) -> None:
        """
        Raises InvalidArgumentError, which begins with `what`, in such a child.
        """
    @property
    def is_here(self) -> bool:
        """
        False in a child that was forked from that process.
        """

class LoraBatch:
    """
    Which rows of a batch use which leased adapter.
    """
    def __init__(
        self, lease: BatchLease | None, segments: collections.abc.Sequence[tuple[int | None, int]]
    ) -> None:
        """
        Segments (request id or None, number of rows) in row order.
        """
    @property
    def has_dora_scales(self) -> bool: ...
    @property
    def num_rows(self) -> int: ...
    @property
    def num_runs(self) -> int: ...
    @property
    def touched_modules(self) -> bytes:
        """
        By module index, 1 where an adapter of the batch has weights; empty without adapters.
        """

class LoraOperator:
    """
    y += scale * B (A x), from cache pages. Thread-safe.
    """
    def __init__(self, dtype: Dtype, isa: str = "auto") -> None: ...
    def apply(
        self,
        batch: LoraBatch,
        module_index: int,
        x_ptr: int,
        y_ptr: int,
        num_rows: int,
        x_row_stride: int,
        y_row_stride: int,
        dtype: Dtype,
        base_bias_ptr: int = 0,
    ) -> None:
        """
        Adds the adapters' outputs for one module to y [num_rows, out_features], in place.

        x is [num_rows, in_features]; strides count elements between rows, and the elements of
        a row lie back to back; dtype is that of x, y and base_bias [out_features], the module's
        own bias, which adapters with DoRA do not scale (0: it has none). Rows of the base
        model, and of adapters that do not touch the module, are left alone. Raises
        LeaseClosedError after the batch's lease was closed, InvalidArgumentError if num_rows is
        not the batch's, a pointer is 0, or a row's stride is less than what adapters use of it.
        """
    def apply_embedding(
        self,
        batch: LoraBatch,
        module_index: int,
        token_ids_ptr: int,
        y_ptr: int,
        num_rows: int,
        y_row_stride: int,
        dtype: Dtype,
        factor: float = 1.0,
    ) -> None:
        """
        The same for an embedding, of int64 token_ids [num_rows].

        factor is what the module multiplies its output by after looking it up.
        """

class GpuLoraOperator:
    """
    y += scale * B (A x) on a GPU, from the pages of its cache. Thread-safe.
    """
    def __init__(
        self,
        config: LoraModelConfig,
        layout: LayoutParams,
        *,
        max_rows: int,
        max_tasks: int,
        ordinal: int = 0,
        for_graphs: bool = False,
        starts_early: bool = False,
    ) -> None:
        """
        Tables for max_rows rows of a batch and max_tasks adapters. for_graphs: launches do not
        depend on the batch, so that a captured graph may be replayed after the next one.
        starts_early: kernels load their weights while the one before them still runs.
        """
    def apply(
        self,
        module_index: int,
        x_ptr: int,
        y_ptr: int,
        num_rows: int,
        x_row_stride: int,
        y_row_stride: int,
        dtype: Dtype,
        base_bias_ptr: int = 0,
        stream: int = 0,
    ) -> None:
        """
        Enqueues what LoraOperator.apply does; pointers are the GPU's.
        """
    def apply_embedding(
        self,
        module_index: int,
        token_ids_ptr: int,
        y_ptr: int,
        num_rows: int,
        y_row_stride: int,
        dtype: Dtype,
        factor: float = 1.0,
        stream: int = 0,
    ) -> None:
        """
        Enqueues what LoraOperator.apply_embedding does; pointers are the GPU's.
        """
    def clear_batch(self) -> None: ...
    def set_batch(
        self,
        lease: BatchLease,
        segments: collections.abc.Sequence[tuple[int | None, int]],
        stream: int = 0,
    ) -> None:
        """
        Says which rows use which leased adapter: (request id or None, number of rows) in row
        order. stream is a CUDA stream's number, as torch's cuda_stream; 0: the default one.
        """
    @property
    def device_bytes(self) -> int: ...

class GpuScatter:
    """
    Fills leased pages on a GPU by the scatter kernel; see cuda_scatter.h.

    For tests and measurements. Thread-safe.
    """
    def __init__(self, *, staging_bytes: int, staging: str = "device", ordinal: int = 0) -> None:
        """
        staging: "pinned" memory that kernels read, or "device", which it is uploaded to.
        """
    def execute(
        self,
        lease: BatchLease,
        adapters: collections.abc.Sequence[tuple[int, AdapterPlan]],
        stream: int = 0,
    ) -> list[int]:
        """
        Reads the adapters (request id, plan) into the pages of those requests, and waits.

        Returns the bytes read of each, or raises the first error of one.
        """
    def repeat(self, stream: int = 0) -> None:
        """
        Enqueues the last launch of the last execute() again, while its lease is open.
        """
    @property
    def device_bytes(self) -> int: ...
    @property
    def num_launches(self) -> int:
        """
        Of the last execute().
        """

class AttentionBatch:
    """
    Block tables and token counts of the sequences of one step.
    """
    def __init__(
        self,
        block_tables: collections.abc.Sequence[collections.abc.Sequence[int]],
        past_tokens: collections.abc.Sequence[int],
        new_tokens: collections.abc.Sequence[int],
        block_size: int,
    ) -> None: ...
    @property
    def num_tokens(self) -> int: ...

class PagedAttention:
    """
    Attention on the CPU over a paged KV cache.
    """
    def __init__(self, isa: str = "auto") -> None: ...
    def run(
        self,
        batch: AttentionBatch,
        *,
        query: tuple[int, int, int],
        key: tuple[int, int, int],
        value: tuple[int, int, int],
        output: int,
        key_cache: int,
        value_cache: int,
        num_blocks: int,
        num_heads: int,
        num_kv_heads: int,
        key_dim: int,
        value_dim: int,
        scaling: float,
        sliding_window: int = 0,
        softcap: float = 0.0,
        sinks: int = 0,
        dtype: Dtype,
    ) -> None:
        """
        Writes the new keys and values into the cache and attends.

        query, key and value are (pointer, head stride, token stride) of [heads, tokens, dim]
        views, strides in elements; output is [tokens, num_heads, value_dim], contiguous.
        """

def build_info() -> dict[str, typing.Any]:
    """
    What this extension was built with, and which instruction set it uses here.
    """

def device_pool_to_dlpack(
    manager: PeftCacheManager, cuda_ordinal: int | None
) -> typing_extensions.CapsuleType:
    """
    The device tier's pages as a DLPack capsule of uint8, which keeps the manager.

    cuda_ordinal says which GPU they are on; None: the CPU can read them.
    """

def entry_transitions() -> list[tuple[str, str, str]]:
    """
    The state table of a cache entry: (from, event, to).
    """

def gpu_support() -> dict[str, typing.Any]:
    """
    Whether a GPU can be used, asked anew each time.

    Returns state ("available", "built without CUDA", "no driver", "driver too old", "no device" or
    "broken"), num_devices, driver_version and runtime_version (CUDA's, 13000 for 13.0; 0: none),
    and detail, a sentence on what to do.
    """

def make_cuda_device(ordinal: int = 0, memory: typing.Any = None) -> Device:
    """
    A GPU as a device; see pagedlora.make_cuda_device.
    """

def make_memory_source(buffer: typing_extensions.Buffer, description: str) -> TensorSource:
    """
    Bytes of a buffer that is kept alive.
    """

def measure_layout(
    config: LoraModelConfig, rows: collections.abc.Sequence[tuple[int, int]], params: LayoutParams
) -> tuple[int, int]:
    """
    Pages and bytes of weights of an adapter with these (module index, rank) rows.
    """

def open_file(path: str, root: AdapterRoot | None = None) -> int:
    """
    A descriptor of the regular file, beneath the root if there is one; the caller closes it.
    """

def open_file_source(path: str, root: AdapterRoot | None = None) -> TensorSource:
    """
    The regular file as it is now; later reads fail if it changed.
    """

def read_safetensors_header(source: TensorSource) -> list[TensorHeader]:
    """
    The tensors of a safetensors source, by offset; refuses what the format forbids.
    """

def search_layout_params(config: LoraModelConfig, budget_bytes: int) -> LayoutParams:
    """
    The sizes that a cache of `budget_bytes` with page_size="auto" uses.
    """

def source_with_tail(head: TensorSource, tail: ScratchPiece) -> TensorSource:
    """
    A source of the bytes of `head`, with its checks, and then those of `tail`.
    """

__version__: str = "0.1.0"
