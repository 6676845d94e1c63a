"""What becomes of each field of PEFT's `LoraConfig`: used, harmless or refused, and why.

The one place that decides it. `docs/adapters.md` is printed from this table by
`python -m pagedlora.loaders.adapters_doc`; a test compares it with the table and the table with the
fields of the installed PEFT. To support a field that is refused: give it another rule here, and
read it in `peft_config.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Rule = Literal["used", "harmless", "refused", "nested"]


@dataclass(frozen=True, slots=True)
class PeftField:
    """A field and its rule.

    Attributes:
        name: As in `adapter_config.json`; of a field of a nested configuration with that of the
            outer one before it: "runtime_config.ephemeral_gpu_offload".
        rule: "used": decides the answers, and is read. "harmless": does not change what a trained
            adapter answers. "refused": would, and is not supported, unless `accepts` the value.
            "nested": a configuration whose fields have rules of their own.
        why: What the field does to answers.
        way_out: What to change where it is refused.
        accepts: Which values load although the field is refused; None: those that say nothing.
        accepted: Those values in words.
    """

    name: str
    rule: Rule
    why: str
    way_out: str = ""
    accepts: Callable[[Any], bool] | None = None
    accepted: str = ""

    def is_refused(self, value: Any) -> bool:
        """Whether an adapter with this value cannot be served."""
        if self.rule != "refused":
            return False
        return not (self.accepts or says_nothing)(value)


def says_nothing(value: Any) -> bool:
    """Whether a value means that a feature is not used: null, false or empty."""
    return value is None or value is False or (isinstance(value, (dict, list, str)) and not value)


_INITS = ("gaussian", "orthogonal", "eva", "mica")
_NONZERO_INITS = ("orthogonal",)


def leaves_base_alone(init: Any) -> bool:
    """Whether PEFT's initialisation of that name changes no weights of the base model."""
    if isinstance(init, str):
        return init.lower() in _INITS
    return init is None or isinstance(init, bool)


def starts_at_zero(init: Any) -> bool:
    """Whether modules that were initialised so, and never trained, answer like the base model."""
    if isinstance(init, str):
        return init.lower() not in _NONZERO_INITS
    return bool(init)


_MERGE = "merge it into the base model and serve that, or train without it"
_CONVERT = (
    "save it as LoRA on the original base model: PEFT's "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
)


def _used(name: str, why: str) -> PeftField:
    return PeftField(name, "used", why)


def _harmless(name: str, why: str) -> PeftField:
    return PeftField(name, "harmless", why)


def _refused(name: str, why: str, way_out: str = _MERGE) -> PeftField:
    return PeftField(name, "refused", why, way_out)


def _variant(name: str, why: str, way_out: str = _MERGE) -> PeftField:
    """A configuration of its own: an empty one is PEFT's default and turns the variant on."""
    return PeftField(name, "refused", why, way_out, lambda value: value is None, "null")


_FIELDS = (
    PeftField(
        "peft_type",
        "refused",
        "another method than LoRA, with other formulas",
        "convert it to LoRA",
        lambda value: value == "LORA",
        "`LORA`",
    ),
    _used("r", "rank of all modules that `rank_pattern` does not name"),
    _used("lora_alpha", "numerator of the scale where `alpha_pattern` names no other"),
    _used("use_rslora", "the scale is alpha / sqrt(r) instead of alpha / r"),
    _used("rank_pattern", "ranks of single modules, by PEFT's rule"),
    _used("alpha_pattern", "alphas of single modules, by PEFT's rule"),
    _used(
        "target_modules",
        "names, a regular expression or `all-linear`; every tensor's module must be among them",
    ),
    _used("exclude_modules", "names or a regular expression; no tensor's module may be among them"),
    _used("layers_to_transform", "layers that `target_modules` means"),
    _used("layers_pattern", "where the number of a layer stands in a name"),
    _harmless("task_type", "says what the model was trained for"),
    _harmless("auto_mapping", "says how to build the base model"),
    _harmless("peft_version", "says who wrote the file"),
    _harmless("base_model_name_or_path", "says which base model was trained on"),
    _harmless("revision", "says which version of the base model was trained on"),
    _harmless("inference_mode", "says whether PEFT may train it on"),
    _harmless("lora_dropout", "acts in training only"),
    _harmless(
        "fan_in_fan_out",
        "says which way round the base model stores its weights; A and B are the same either way",
    ),
    PeftField(
        "bias",
        "refused",
        "trained biases of the base model replace its own",
        "train with bias='none'",
        lambda value: value == "none",
        "`none`",
    ),
    _refused(
        "modules_to_save",
        "whole modules of the base model are replaced",
        "train LoRA on these modules instead (target_modules)",
    ),
    PeftField(
        "init_lora_weights",
        "refused",
        "PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change the base model's weights when training "
        "begins, so the adapter does not fit the original ones",
        _CONVERT,
        leaves_base_alone,
        "`true`, `false`, null, " + ", ".join(f"`{name}`" for name in _INITS),
    ),
    _harmless("loftq_config", "acts with init_lora_weights='loftq' only, which is refused"),
    _harmless("eva_config", "how training began: EVA leaves the base model alone"),
    _harmless("corda_config", "acts with init_lora_weights='corda' only, which is refused"),
    _harmless("lora_ga_config", "acts with init_lora_weights='lora_ga' only, which is refused"),
    _refused(
        "megatron_config",
        "the modules are Megatron's parallel layers",
        "export the adapter for the Hugging Face model",
    ),
    _harmless("megatron_core", "acts with megatron_config only, which is refused"),
    _refused(
        "trainable_token_indices",
        "rows of the embedding are replaced",
        "train LoRA on the embedding, or without new tokens",
    ),
    _used(
        "use_dora", "DoRA: each output is scaled by its trained magnitude over its weight's norm"
    ),
    _variant("velora_config", "the file has tensors that belong to training", "train without it"),
    _refused(
        "alora_invocation_tokens",
        "the adapter acts from certain tokens on (aLoRA)",
        "train without invocation tokens",
    ),
    _refused("use_qalora", "inputs are pooled in groups before A"),
    _harmless("qalora_group_size", "acts with use_qalora only, which is refused"),
    _variant("monteclora_config", "A and B are drawn from a distribution", "train without it"),
    _refused("layer_replication", "layers of the base model are repeated", _MERGE),
    PeftField("runtime_config", "nested", "how PEFT runs"),
    _harmless("runtime_config.ephemeral_gpu_offload", "where PEFT computes"),
    _used("lora_bias", "B has a bias; not together with `use_dora`, as in PEFT"),
    _refused(
        "target_parameters",
        "parameters that are no modules are changed, such as fused experts of an MoE",
        "train on modules (target_modules)",
    ),
    _variant("use_bdlora", "A or B are block-diagonal and stored packed"),
    _variant("arrow_config", "a router mixes several adapters by token"),
    _variant("kasa_config", "the base model's weights are truncated"),
    _refused(
        "ensure_weight_tying",
        "the adapter of the embedding is that of the output layer, too",
        "train the two apart",
    ),
)

PEFT_FIELDS = {field.name: field for field in _FIELDS}
"""All fields of PEFT 0.21's `LoraConfig` by name, with those of nested configurations."""
