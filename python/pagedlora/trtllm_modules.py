"""TensorRT-LLM's table of modules that can carry LoRA: ids, names, sizes and splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pagedlora import _core
from pagedlora.arguments import check_mapping, to_names
from pagedlora.errors import InvalidArgumentError
from pagedlora.sharding import How, ModuleSplit, SplitPart
from pagedlora.shown import shown


class Dims(NamedTuple):
    """Sizes of the whole model, not of one rank.

    Attributes:
        hidden: Features between layers.
        inner: Features inside the MLP.
        heads: Of queries.
        kv_heads: Of keys and of values.
        head: Features of a head.
    """

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head: int

    @property
    def q(self) -> SplitPart:
        """Queries."""
        return SplitPart(self.heads * self.head, self.head)

    @property
    def kv(self) -> SplitPart:
        """Keys, or values."""
        return SplitPart(self.kv_heads * self.head, self.head, may_repeat=True)


class _Kind(NamedTuple):
    """A row of the table.

    Attributes:
        module_id: TensorRT-LLM's.
        path: Name in a layer, as Hugging Face models have it.
        how: How it is cut.
        sizes: In features and parts of the outputs; for `how` "input" the parts of the inputs and
            the out features. None: the dims do not say; the caller does.
    """

    module_id: int
    path: str
    how: How
    sizes: Callable[[Dims], tuple[int, tuple[SplitPart, ...]]] | None = None


def _attention(first_id: int, prefix: str, path: str) -> dict[str, _Kind]:
    def kind(number: int, last: str, *parts: str) -> _Kind:
        return _Kind(
            first_id + number,
            f"{path}.{last}",
            "output",
            lambda d: (d.hidden, tuple(getattr(d, part) for part in parts)),
        )

    dense = _Kind(first_id + 4, f"{path}.o_proj", "input", lambda d: (d.hidden, (d.q,)))
    return {
        f"{prefix}_qkv": kind(0, "qkv_proj", "q", "kv", "kv"),
        f"{prefix}_q": kind(1, "q_proj", "q"),
        f"{prefix}_k": kind(2, "k_proj", "kv"),
        f"{prefix}_v": kind(3, "v_proj", "kv"),
        f"{prefix}_dense": dense,
    }


def _inner(count: int) -> Callable[[Dims], tuple[int, tuple[SplitPart, ...]]]:
    return lambda d: (d.hidden, (SplitPart(d.inner),) * count)


_KINDS: dict[str, _Kind] = {
    **_attention(0, "attn", "self_attn"),
    "mlp_h_to_4h": _Kind(5, "mlp.gate_proj", "output", _inner(1)),
    "mlp_4h_to_h": _Kind(6, "mlp.down_proj", "input", _inner(1)),
    "mlp_gate": _Kind(7, "mlp.up_proj", "output", _inner(1)),
    **_attention(8, "cross_attn", "cross_attn"),
    "moe_router": _Kind(16, "mlp.gate", "none"),
    "mlp_router": _Kind(17, "mlp.router", "none", lambda d: (d.hidden, (SplitPart(1),))),
    "mlp_gate_up": _Kind(18, "mlp.gate_up_proj", "output", _inner(2)),
    "shared_expert_h_to_4h": _Kind(19, "mlp.shared_expert.gate_proj", "output"),
    "shared_expert_4h_to_h": _Kind(20, "mlp.shared_expert.down_proj", "input"),
    "shared_expert_gate": _Kind(21, "mlp.shared_expert.up_proj", "output"),
    "mamba_in_proj": _Kind(22, "mixer.in_proj", "none"),
    "mamba_out_proj": _Kind(23, "mixer.out_proj", "none"),
    "moe_latent_fc1": _Kind(24, "mixer.fc1_latent_proj", "none"),
    "moe_latent_fc2": _Kind(25, "mixer.fc2_latent_proj", "none"),
}
_EXPERTS = {"moe_h_to_4h": 13, "moe_4h_to_h": 14, "moe_gate": 15}
_WHOLE_ONLY = ("mamba_in_proj", "mamba_out_proj")


def module_names() -> dict[int, str]:
    """TensorRT-LLM's names by id; without experts, whose adapters are not supported."""
    return {kind.module_id: name for name, kind in _KINDS.items()}


def trtllm_modules(
    num_layers: int,
    dims: Dims,
    names: Sequence[str],
    sizes: Mapping[str, tuple[int, int]] | None,
    tp_size: int,
) -> tuple[list[_core.LoraModule], dict[str, ModuleSplit]]:
    """The modules of all layers, whole, in the order of layers and of ids.

    Args:
        num_layers: Of the model.
        dims: Its sizes.
        names: TensorRT-LLM's, each once.
        sizes: In and out features of those names whose sizes do not follow from `dims`.
        tp_size: Number of ranks that cut them.

    Returns:
        The modules, and how each is cut.

    Raises:
        InvalidArgumentError: A name is unknown, that of experts, or there twice; a size is missing
            or not wanted; or it is not known how the module is cut.
    """
    sizes = {} if sizes is None else sizes
    _check(names, sizes, tp_size)
    modules: list[_core.LoraModule] = []
    splits: dict[str, ModuleSplit] = {}
    for layer in range(num_layers):
        for name in sorted(names, key=lambda n: _KINDS[n].module_id):
            kind = _KINDS[name]
            in_features, out_features, parts = _sizes_of(kind, dims, sizes.get(name))
            path = f"model.layers.{layer}.{kind.path}"
            modules.append(_core.LoraModule(path, in_features, out_features, layer, kind.module_id))
            splits[path] = ModuleSplit(kind.how, parts)
    return modules, splits


def _sizes_of(
    kind: _Kind, dims: Dims, given: tuple[int, int] | None
) -> tuple[int, int, tuple[SplitPart, ...]]:
    """In features, out features, and the parts of those that are cut."""
    if given is not None:
        return (*given, ())
    assert kind.sizes is not None
    other, parts = kind.sizes(dims)
    total = sum(part.length for part in parts)
    return (total, other, parts) if kind.how == "input" else (other, total, parts)


def _check(names: Sequence[str], sizes: Mapping[str, tuple[int, int]], tp_size: int) -> None:
    names = to_names(names, "modules")
    check_mapping(sizes, "sizes", "give (in, out) features by name")
    if not all(map(_is_pair, sizes.values())):
        raise InvalidArgumentError(f"sizes is {shown(sizes)}: give (in, out) features by name")
    if len(set(names)) < len(names):
        raise InvalidArgumentError(f"modules is {list(names)}: name at least one, and each once")
    for name in (*names, *sizes):
        if name in _EXPERTS:
            raise InvalidArgumentError(
                f"modules has {shown(name)} (id {_EXPERTS[name]}): adapters for experts are not "
                "supported; leave it out"
            )
        if name not in _KINDS:
            raise InvalidArgumentError(
                f"modules has {shown(name)}, which TensorRT-LLM does not: {', '.join(_KINDS)} are "
                "possible"
            )
        if (_KINDS[name].sizes is None) != (name in sizes):
            raise InvalidArgumentError(
                f"the sizes of {shown(name)} do {'not ' if name not in sizes else ''}follow from "
                f"the model's: {'leave it out of' if name in sizes else 'give (in, out) in'} sizes"
            )
        if name in _WHOLE_ONLY and tp_size > 1:
            raise InvalidArgumentError(
                f"how tensor parallelism splits {shown(name)} is not known: leave it out, or use "
                "from_module with tp_plan"
            )


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2  # noqa: PLR2004
