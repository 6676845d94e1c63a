"""What `model_config.yaml` of a .nemo file says about an adapter: its scale, and its heads.

NeMo scales the adapter's output by alpha / adapter_dim where its configuration has an alpha, and
not at all where it has none. It computes queries, keys and values in one module whose outputs lie
group by group: for each query group the queries of its heads, then its key, then its value. Which
of them are which follows from the number of heads and of groups, and from nothing else.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from pagedlora.errors import AdapterFormatError, UnsupportedAdapterError
from pagedlora.loaders.stored import tensor_error
from pagedlora.shown import quoted

_LORA_SECTIONS = (("peft", "lora_tuning"), ("lora_tuning",), ("lora",))
_DIMS = ("adapter_dim", "rank")
_MAX_SIZE = 1 << 24
_MAX_NODES = 10_000
"""Values and keys; the reader needs about 0.1 ms for each."""
_MAX_DIGITS = 40
"""Of a number. YAML's sexagesimal ones (1:1:1) take time that grows with the square."""
_REFUSED = {
    "megatron_legacy": "the outputs of q, k and v are laid out in another way",
    "rotary_interleaved": "rotary embeddings turn neighbours instead of halves, unlike the models "
    "here",
}
_REFUSED_IN_LORA = {
    "weight_tying": "layers share one adapter and differ by trained position embeddings",
}


class NemoConfig(NamedTuple):
    """What decides the answers.

    Attributes:
        heads: Of queries.
        groups: Of queries, each with one key and one value.
        head_size: Features of a head.
        rank: As the file says; None: it does not.
        alpha: Numerator of the scale; None: it is 1.
    """

    heads: int
    groups: int
    head_size: int
    rank: int | None
    alpha: float | None

    @property
    def parts(self) -> tuple[int, int, int]:
        """Outputs of q, of k and of v."""
        kv = self.groups * self.head_size
        return self.heads * self.head_size, kv, kv


def parse_nemo_config(content: bytes, path: str) -> NemoConfig:
    """Reads the file.

    Args:
        content: Its bytes.
        path: Names it in errors.

    Raises:
        AdapterFormatError: It is no YAML mapping, or a value is impossible.
        UnsupportedAdapterError: It does not say how many heads there are, or asks for something
            that is not supported.
    """
    fields = _load_yaml(content, path)
    lora = _lora_section(fields)
    for section, refused in ((fields, _REFUSED), (lora, _REFUSED_IN_LORA)):
        for name, why in refused.items():
            if _find(section, name):
                raise UnsupportedAdapterError(
                    f"{quoted(path)} has {name}={_find(section, name)!r:.80}, which is not "
                    f"supported: {why}",
                    field=name,
                )
    heads = _size(fields, "num_attention_heads", path)
    groups = _size(fields, "num_query_groups", path, default=heads)
    if heads % groups:
        raise _error(path, f"has {heads} heads in {groups} groups, which do not divide them")
    return NemoConfig(heads, groups, _head_size(fields, heads, path), *_scaling(lora, path))


def _head_size(fields: Mapping[str, Any], heads: int, path: str) -> int:
    if _find(fields, "kv_channels") is not None:
        return _size(fields, "kv_channels", path)
    hidden = _size(fields, "hidden_size", path)
    if hidden % heads:
        raise _error(path, f"has hidden_size {hidden}, which {heads} heads do not divide")
    return hidden // heads


def _scaling(lora: Mapping[str, Any], path: str) -> tuple[int | None, float | None]:
    dims = [name for name in _DIMS if lora.get(name) is not None]
    rank = _size(lora, dims[0], path) if dims else None
    alpha = lora.get("alpha")
    if alpha is None:
        return rank, None
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not 0 < alpha < float("inf"):
        raise _error(path, f"has alpha {alpha!r:.80}: a number over 0 is needed")
    return rank, float(alpha)


def _lora_section(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    for names in _LORA_SECTIONS:
        section: Any = fields
        for name in names:
            section = section.get(name) if isinstance(section, Mapping) else None
        if isinstance(section, Mapping):
            return section
    return {}


def _find(fields: Mapping[str, Any], name: str) -> Any:
    """A field of the model: at the top, as in saved files, or under `model`, as in recipes."""
    if name in fields:
        return fields[name]
    model = fields.get("model")
    return model.get(name) if isinstance(model, Mapping) else None


def _size(fields: Mapping[str, Any], name: str, path: str, default: int | None = None) -> int:
    value = _find(fields, name)
    if value is None and default is not None:
        return default
    if value is None:
        raise UnsupportedAdapterError(
            f"{quoted(path)} has no {name}: without it nobody knows which outputs of "
            "lora_kqv_adapter are q, k and v. Way out: put the base model's into "
            "model_config.yaml",
            field=name,
        )
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _MAX_SIZE:
        raise _error(path, f"has {name} {value!r:.80}: a number of 1 to {_MAX_SIZE} is needed")
    return value


def _load_yaml(content: bytes, path: str) -> Mapping[str, Any]:
    import yaml

    try:
        fields = yaml.load(content, _bounded_loader())
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise _error(path, f"is no YAML: {reason:.200}") from None
    if not isinstance(fields, dict):
        raise _error(path, f"has a {type(fields).__name__} instead of fields by name")
    return fields


@functools.cache
def _bounded_loader() -> type:
    """A safe one, with bounds on time and memory; a key twice is an error, as in NeMo."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Without aliases: a few lines of them are gigabytes."""

        num_nodes = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.num_nodes += 1
            if self.num_nodes > _MAX_NODES:
                raise yaml.YAMLError(f"there are over {_MAX_NODES} values")
            if self.check_event(yaml.AliasEvent):
                raise yaml.YAMLError("aliases are not allowed")
            return super().compose_node(parent, index)

        def construct_number(self, node: Any) -> Any:
            if len(node.value) > _MAX_DIGITS:
                raise yaml.YAMLError(f"a number of {len(node.value)} characters")
            is_integer = node.tag.endswith(":int")
            return (self.construct_yaml_int if is_integer else self.construct_yaml_float)(node)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            mapping = super().construct_mapping(node, deep)
            if len(mapping) < len(node.value):
                ((name, _),) = Counter(key.value for key, _ in node.value).most_common(1)
                raise yaml.YAMLError(f"a key is there twice, such as {name!r:.80}")
            return mapping

    for kind in ("int", "float"):
        Loader.add_constructor(f"tag:yaml.org,2002:{kind}", Loader.construct_number)
    return Loader


def _error(path: str, problem: str) -> AdapterFormatError:
    return tensor_error(path, "", problem)
