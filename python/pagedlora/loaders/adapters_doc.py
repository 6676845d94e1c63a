"""`docs/adapters.md`, printed from the table of fields by running this module."""

from __future__ import annotations

from pagedlora.loaders.peft_fields import PEFT_FIELDS, PeftField


def document() -> str:
    """The text of `docs/adapters.md`."""
    return (
        _INTRODUCTION
        + "\n".join(
            [
                "| field | rule | what it does | where it is refused: the way out |",
                "|---|---|---|---|",
                *(_document_row(field) for field in PEFT_FIELDS.values()),
            ]
        )
        + _REST
    )


def _document_row(field: PeftField) -> str:
    rule: str = field.rule
    if rule == "refused":
        rule = f"refused unless {field.accepted}" if field.accepted else "**refused**"
    return f"| `{field.name}` | {rule} | {field.why} | {field.way_out} |"


_INTRODUCTION = """# Which adapters load

Printed by `python -m pagedlora.loaders.adapters_doc`; a test compares the two.

An adapter is a directory as PEFT's `save_pretrained` writes it, a NeMo archive, or tensors in \
memory. It answers as PEFT answers \
with it alone on the same model, or it is refused by name before anything is registered.

## Fields of `adapter_config.json`

*Used* fields decide the answers. *Harmless* ones do not change what a trained adapter answers. \
*Refused* ones would, and are not supported: `UnsupportedAdapterError.field` names them. Null, \
false and empty values of refused fields load.

"""

_REST = """

A field that is not in this table loads if its value is null, false or empty. Otherwise it is \
refused; with `LoraManager(..., strict=False)`, or `LoraConfig(strict=False)` for `LLM`, it is \
ignored with a `PagedLoraWarning` and noted in the adapter's report. The same goes for a key of \
`rank_pattern` or `alpha_pattern` that matches no module of the adapter.

## Patterns

As in PEFT: of the keys of `rank_pattern` in the order of the file the first one for which \
`(.*\\.)?(KEY)$` matches the module's name gives the rank; `alpha_pattern` likewise and on its \
own. So a key is a regular expression, means the end of a name after a dot, and may begin with \
`^` to mean a whole name. The rank of the tensors must be the one that the configuration says. \
The scale of a module is alpha / r, or alpha / sqrt(r) with `use_rslora`, of its own alpha and r.

Regular expressions have 2 s in all and 10,000 characters each.

## DoRA, biases of B, embeddings

The scale of DoRA is the trained magnitude over the norm of the changed weight, so it needs the \
base model's weights: an `LLM` has them, a `LoraManager` is given `base_weights`. Such an adapter \
is read when it is registered; the scales are kept in a nameless temporary file (`TMPDIR` chooses \
where) and read again with the adapter after an eviction. DoRA and plain adapters share batches.

Embeddings and the output embedding carry LoRA when `lora_target_modules` names them: \
`["all-linear", "embed_tokens", "lm_head"]`. As in PEFT, LoRA on an embedding that shares its \
weight with the output embedding acts on the embedding alone. PEFT saves a copy of the embedding's \
weight beside such an adapter (`embed_tokens.base_layer.weight`): it is compared with the base \
model's and must be the same, as `AdapterInfo.report` notes under `verified`. An adapter for more \
tokens than the model's embedding or output embedding has is refused with both numbers: serve the \
model that it was trained on, resized with `resize_token_embeddings`.

## Names of tensors

`MODULE.lora_A.weight` and `MODULE.lora_B.weight`, `MODULE.lora_B.bias`, \
`MODULE.lora_magnitude_vector` with or without `.weight`, `MODULE.lora_embedding_A` and \
`MODULE.lora_embedding_B`, with or without the name of an adapter inside \
(`lora_A.default.weight`). `MODULE` is a name of the model, after taking away what savers put \
around it: `base_model.model.`, `module.`, `_orig_mod.`, `_fsdp_wrapped_module.`, \
`_checkpoint_wrapped_module.`. A wrapper `language_model` that only one of the two has is taken \
away or put in, if then exactly one module has the name. What was renamed stands in \
`AdapterInfo.report`. A tensor that fits nothing fails the load, \
as does a name of over 1000 characters.

A model whose `qkv_proj` or `gate_up_proj` is one module takes adapters for `q_proj`, `k_proj`, \
`v_proj` or `gate_proj`, `up_proj`, which may have ranks of their own; a model that has these \
takes adapters for the fused module. Other names: `LoraManager(fused_modules=...)`.

## Files

Weights are read from `adapter_model.safetensors`: float32, bfloat16 or float16, cast to the \
cache's type. NaN, infinity, and values over the range of the cache's type are refused when the \
content is first read: by `load`, `pin`, `reload` and `cache_salt`, or for the first request of an \
adapter that was only registered, which fails then. On a rank of several the latter looks at the \
rank's own part.

`adapter_model.bin` is a pickle and is refused; with `allow_pickle=True` it is read with \
`torch.load(weights_only=True)` and kept as a safetensors file in a private directory until it is \
unloaded. Where both files are there, the safetensors file is read. Pickles over 8 GiB, and those \
that unpack to more than they are (compressed records, views larger than their memory), are \
refused. Nothing in a pickle is called, but one can still be made to keep `torch.load` busy: allow \
only those of people whom you trust.

## NeMo archives

A path that ends in `.nemo`, or `LoraManager.load_from_nemo`, is a tar archive, plain or \
gzipped, with `model_config.yaml` and `model_weights.ckpt`. The latter is a pickle, so \
`allow_pickle=True` is needed here, too; its tensors are kept in a private directory until the \
name is given up. The archive is read once, with limits (8 GiB, 64 members, 100 times the size of \
a gzipped file), and nothing of it is extracted under a name.

Tensors `...layers.N.self_attention.adapter_layer.lora_kqv_adapter.linear_in.weight` are A and \
`...linear_out.weight` are B of q, k and v of layer N; any other tensor fails the load. The \
model's module is the one of TensorRT-LLM's id of attn_qkv in that layer (`qkv_proj`), or \
`q_proj`, `k_proj` and `v_proj` where `fused_modules` knows them. The scale is \
`peft.lora_tuning.alpha` over the rank, as in NeMo, or 1 where the file has no alpha.

NeMo computes q, k and v in one module whose outputs lie group by group: the queries of a \
group's heads, its key, its value. Modules here have all of q, then all of k, then all of v, so \
B's rows are moved, by `num_attention_heads`, `num_query_groups` (as many as heads if it is \
null) and `kv_channels` (`hidden_size` over heads if it is null) of `model_config.yaml`. Without \
these, with other sizes than the model's, with `megatron_legacy`, `rotary_interleaved` or \
`weight_tying`, and with the weights of several ranks it is refused. The size of a fused module \
says only the sum of q, k and v: with `fused_modules`, which an `LLM` has, the three are compared. \
TensorRT-LLM moves no rows \
and applies no alpha. `lora_dir` lists no archives. NeMo 2's checkpoints, which are directories, \
and its "canonical" LoRA are not read.

## Tensors

`LoraManager.load_from_tensors(name, config, tensors)` takes the same from memory: the fields of \
`adapter_config.json`, or PEFT's `LoraConfig`, and tensors under the names that a file has for \
them. `register`, `load` and `reload` take `PeftTensors(config, tensors)` as a source. All rules \
above hold, and the same content has the same generation. The tensors are copied to a safetensors \
file in a private directory before the call returns (`TMPDIR` chooses where), and read from there; \
it is removed when neither the name nor another one of its content, nor a request, needs it any \
more. A name that is loaded stays what it is: to give it other \
tensors, use `reload`.
"""


if __name__ == "__main__":
    print(document(), end="")
