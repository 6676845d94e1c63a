"""What a user configures: adapters, their cache, the KV cache and the scheduler.

All classes are immutable and refuse unknown fields. A bad value raises pydantic's
`ValidationError` (a `ValueError`), which names the field and what to give instead.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from pagedlora.errors import InvalidArgumentError
from pagedlora.paths import to_path
from pagedlora.shown import shown
from pagedlora.sizes import parse_size

DEFAULT_MAX_LORA_RANK = 64
DEFAULT_DEVICE_CACHE_PERCENT = 0.02

_MAX_COUNT = 2**31 - 1
_MAX_SIZE_BYTES = 2**60

_Count: TypeAlias = Annotated[int, Field(ge=1, le=_MAX_COUNT)]
_Workers: TypeAlias = Annotated[int, Field(ge=1, le=256)]
_CountOrZero: TypeAlias = Annotated[int, Field(ge=0, le=_MAX_COUNT)]


def _positive_size(value: object) -> int:
    size = parse_size(value)
    if size == 0:
        raise InvalidArgumentError("size 0 holds nothing: give at least one byte")
    return size


def _fraction(value: float) -> float:
    if not 0 < value <= 1:
        raise InvalidArgumentError(
            f"{value:g} is no fraction of the free memory, over 0 and up to 1: 0.02 is 2 %"
        )
    return value


def _path(value: object) -> str:
    return to_path(value, "the path")


def _target_modules(value: object) -> object:
    if isinstance(value, str):
        if value != "all-linear":
            raise InvalidArgumentError(
                f"{shown(value)} is neither a list of module names nor the word 'all-linear': "
                f"for one module give [{shown(value)}]"
            )
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        names = sorted(value) if isinstance(value, (set, frozenset)) else list(value)
        if not names:
            raise InvalidArgumentError("names no module: give at least one, or 'all-linear'")
        return names
    return value


_Size: TypeAlias = Annotated[int, BeforeValidator(_positive_size), Field(le=_MAX_SIZE_BYTES)]
_SizeOrZero: TypeAlias = Annotated[int, BeforeValidator(parse_size), Field(le=_MAX_SIZE_BYTES)]
_Fraction: TypeAlias = Annotated[float, AfterValidator(_fraction)]
_Path: TypeAlias = Annotated[str, BeforeValidator(_path)]
_TargetModules: TypeAlias = Annotated[
    list[str] | Literal["all-linear"], BeforeValidator(_target_modules)
]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class LoraConfig(_Config):
    """Which adapters the model accepts, and how many at once.

    Attributes:
        max_lora_rank: Largest rank of any module of any adapter.
        max_loras: Room on the device, in adapters of the maximum rank on all target modules,
            without biases and DoRA scales. Overrides the bytes of `PeftCacheConfig`.
        max_cpu_loras: The same for the host tier.
        lora_target_modules: Modules that may carry LoRA, by name or the end of their name, or
            "all-linear", which may also stand among names: embeddings and the output embedding
            are taken when they are named.
        lora_dir: A directory of adapters, at any depth: each has its relative path as its name,
            and is parsed when it is first asked for. Adapters that are put there later are found;
            where files were replaced, new requests get those that are there now.
        adapter_root: A directory that all other adapters must lie in; their paths are relative to
            it, or absolute and inside. None: they may be anywhere.
        strict: Refuses adapters with fields that this release does not know, and with patterns
            that match no module. If false, those are ignored with a `PagedLoraWarning`.
        allow_pickle: Reads `adapter_model.bin` where there is no safetensors file, and .nemo files,
            with `weights_only=True`.
    """

    max_lora_rank: _Count = DEFAULT_MAX_LORA_RANK
    max_loras: _Count | None = None
    max_cpu_loras: _Count | None = None
    lora_target_modules: _TargetModules = "all-linear"
    lora_dir: _Path | None = None
    adapter_root: _Path | None = None
    strict: bool = True
    allow_pickle: bool = False

    @model_validator(mode="after")
    def _check_counts(self) -> LoraConfig:
        if self.max_loras and self.max_cpu_loras and self.max_cpu_loras < self.max_loras:
            raise InvalidArgumentError(
                f"max_cpu_loras {self.max_cpu_loras} is less than max_loras {self.max_loras}: "
                "the host tier must hold the adapters of a whole batch; raise max_cpu_loras"
            )
        return self


class PeftCacheConfig(_Config):
    """Memory for adapters, in two tiers. Sizes are bytes or strings such as "256KiB", "4GiB".

    The last six fields are for those who have a configuration for TensorRT-LLM; docs/sizing.md
    says how they are mapped.

    Attributes:
        host_cache_size: Budget of the host tier in bytes; never exceeded.
        device_cache_size: Budget of the device tier in bytes; excludes `device_cache_percent`.
        device_cache_percent: Budget of the device tier as a fraction of the memory free at
            construction, for all its name: 0.02 is 2 %, and 1 is all of it. None: 0.02, unless
            `device_cache_size` is given. Not for ranks of a tensor parallel group: what is free
            differs between them.
        max_lora_rank: Largest rank of any adapter; None follows `LoraConfig`.
        dtype: Type in which adapters are kept; "auto" is the model's.
        page_size: Bytes of a page; "auto" searches the size that wastes least for the model,
            together with `max_part_size`.
        max_part_size: Most bytes of a matrix that lie in one piece; "auto" is what the search
            found, or the whole page where `page_size` is given.
        eviction_policy: "lru", least recently used first; or "lrfu", fewest recent uses first,
            which keeps popular adapters through a stream of one-time ones.
        num_put_workers: Adapters that are read into the host tier at a time; one that is read while
            others are idle is read by as many threads, but not more than there are cores, nor 4.
        num_ensure_workers: Threads that copy between the tiers.
        max_inflight_batches: Leases that may be open together. With one, the next batch closes
            the previous lease.
        load_timeout_s: Seconds that one read or copy may take, from when a thread begins it.
        num_host_module_layer: Budget of the host tier in module layers, instead of
            `host_cache_size`: one is the bytes of one rank of the model's largest module. 0: not
            given.
        num_device_module_layer: The same for the device tier, instead of `device_cache_size` and
            `device_cache_percent`.
        max_adapter_size: A rank: if an adapter of it, or of the model's maximum rank if that is
            less, on all modules, does not fit either tier, making the cache fails. None: adapters
            are checked only when they are used.
        optimal_adapter_size: A rank, without effect: pages fit adapters of every rank.
        max_pages_per_block_host: Without effect: a tier's memory is one block.
        max_pages_per_block_device: Likewise.
    """

    host_cache_size: _Size = 2**30
    device_cache_size: _Size | None = None
    device_cache_percent: _Fraction | None = None
    max_lora_rank: _Count | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    page_size: Literal["auto"] | _Size = "auto"
    max_part_size: Literal["auto"] | _Size = "auto"
    eviction_policy: Literal["lru", "lrfu"] = "lru"
    num_put_workers: _Workers = 4
    num_ensure_workers: _Workers = 2
    max_inflight_batches: _Count = 1
    load_timeout_s: Annotated[float, Field(gt=0.0, le=1e9)] = 60.0
    num_host_module_layer: _CountOrZero = 0
    num_device_module_layer: _CountOrZero = 0
    max_adapter_size: _Count | None = None
    optimal_adapter_size: _Count | None = None
    max_pages_per_block_host: _Count | None = None
    max_pages_per_block_device: _Count | None = None

    @model_validator(mode="after")
    def _check_module_layers(self) -> PeftCacheConfig:
        for count, other in (
            ("num_host_module_layer", "host_cache_size"),
            ("num_device_module_layer", "device_cache_size"),
            ("num_device_module_layer", "device_cache_percent"),
        ):
            is_explicit = other in self.model_fields_set and getattr(self, other) is not None
            if getattr(self, count) and is_explicit:
                raise InvalidArgumentError(
                    f"{count} {getattr(self, count)} and {other} {getattr(self, other)} are both "
                    "given: keep one of them"
                )
        return self

    @model_validator(mode="after")
    def _check_device_budget(self) -> PeftCacheConfig:
        if self.device_cache_size is not None and self.device_cache_percent is not None:
            raise InvalidArgumentError(
                f"device_cache_size {self.device_cache_size} and device_cache_percent "
                f"{self.device_cache_percent} are both given: keep one of them"
            )
        return self

    @model_validator(mode="after")
    def _check_part_size(self) -> PeftCacheConfig:
        if self.page_size == "auto" and self.max_part_size != "auto":
            raise InvalidArgumentError(
                f"max_part_size {self.max_part_size} is given without page_size: the two are "
                "searched together; give both or neither"
            )
        return self

    @property
    def max_part_bytes(self) -> int:
        """`max_part_size` as the core takes it: 0 for "auto"."""
        return 0 if self.max_part_size == "auto" else self.max_part_size

    def device_budget_bytes(self, free_bytes: int) -> int:
        """Budget of the device tier in bytes, unless `num_device_module_layer` gives it.

        Args:
            free_bytes: Memory of the device that is free at construction.
        """
        if self.device_cache_size is not None:
            return self.device_cache_size
        fraction = self.device_cache_percent
        if fraction is None:
            fraction = DEFAULT_DEVICE_CACHE_PERCENT
        return int(free_bytes * fraction)


class KvCacheConfig(_Config):
    """Memory for keys and values, and for those of suspended requests.

    Give at most one of `num_blocks` and `size`, and at most one of `host_blocks` and `host_size`.

    Attributes:
        num_blocks: Blocks in all.
        size: Budget in bytes, or a string such as "4GiB"; blocks round down to it. When neither
            is given: enough for `max_batch_size` sequences of the model's full length, but no
            more than 1 GiB and no more than a quarter of the free memory.
        block_size: Tokens per block.
        host_blocks: Blocks of a second pool on the host, beside the others, to which
            with the policy "max_utilization" the keys and values of requests that have to make room
            are moved, instead of being computed again.
        host_size: The same as a budget in bytes, or a string; blocks round down to it. When
            neither is given there are no host blocks: without a GPU they would take the memory
            that more blocks for running requests need.
    """

    num_blocks: _Count | None = None
    size: _Size | None = None
    block_size: _Count = 16
    host_blocks: _CountOrZero | None = None
    host_size: _SizeOrZero | None = None

    @model_validator(mode="after")
    def _check_budgets(self) -> KvCacheConfig:
        for count, size in (("num_blocks", "size"), ("host_blocks", "host_size")):
            if getattr(self, count) is not None and getattr(self, size) is not None:
                raise InvalidArgumentError(
                    f"{count} {getattr(self, count)} and {size} {getattr(self, size)} are both "
                    "given: keep one of them"
                )
        return self


class SchedulerConfig(_Config):
    """What one step may hold.

    Attributes:
        policy: "guaranteed_no_evict": a request begins when there are KV blocks for its longest
            answer, and never has to give way. "max_utilization": blocks are taken as they are
            needed; when they run out, requests of lower precedence are suspended to the host
            blocks, or compute their context again, so more run at once.
        max_batch_size: Requests of one step.
        max_num_tokens: Tokens of one step, prompts and generated ones together.
        enable_chunked_prefill: Whether a prompt may be spread over several steps. If not, a
            prompt longer than `max_num_tokens` is refused.
        max_skip_passes: Steps that may admit others ahead of the oldest request whose adapter is
            loaded but finds no room.
    """

    policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict"
    max_batch_size: _Count = 64
    max_num_tokens: _Count = 2048
    enable_chunked_prefill: bool = True
    max_skip_passes: _Count = 8


def resolve_max_lora_rank(lora: LoraConfig, peft_cache: PeftCacheConfig) -> int:
    """The largest rank that both configurations allow to mean.

    Args:
        lora: Its `max_lora_rank` counts as explicit only if it was given.
        peft_cache: Its `max_lora_rank` is explicit unless None.

    Returns:
        The explicit value, or `LoraConfig`'s default if there is none.

    Raises:
        InvalidArgumentError: Both are explicit and differ.
    """
    if peft_cache.max_lora_rank is None:
        return lora.max_lora_rank
    explicit = "max_lora_rank" in lora.model_fields_set
    if explicit and lora.max_lora_rank != peft_cache.max_lora_rank:
        raise InvalidArgumentError(
            f"LoraConfig.max_lora_rank is {lora.max_lora_rank} but PeftCacheConfig.max_lora_rank "
            f"is {peft_cache.max_lora_rank}: give one of them, or the same value twice"
        )
    return peft_cache.max_lora_rank
