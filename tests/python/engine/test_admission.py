"""Which models are admitted, which are refused and why, and that the check can fail."""

import pytest
import torch
from tests.support.tiny_models import build_tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from pagedlora.engine import attention, attention_backends, paged_model
from pagedlora.engine.admission import admit
from pagedlora.engine.self_check import self_check
from pagedlora.engine.shrink import WINDOW, kept_layers, shrunk_config
from pagedlora.errors import UnsupportedModelError

ADMITTED = [
    "llama",
    "llama_rope_scaled",
    "qwen2",
    "qwen3",
    "mistral",
    "mixtral",
    "qwen2_moe",
    "gemma2",
    "gemma3",
    "phi",
    "phi3",
    "gpt2",
    "gpt_neox",
    "opt",
    "starcoder2",
    "cohere2",
    "gpt_oss",
    "deepseek_v3",
    "olmo2",
    "granite",
]
REFUSED = {
    "bloom": "keeps its own attention",
    "falcon": "keeps its own attention",
    "mpt": "keeps its own attention",
    "gpt_neo": "keeps its own attention",
    "mamba": "recurrent state",
    "jamba": "recurrent state",
    "qwen3_next": "recurrent state",
    "llama4_chunked": "chunked_attention",
    "phi3_longrope": "'longrope' depends on the longest request",
    "llama_dynamic_rope": "'dynamic' depends on the longest request",
}


@pytest.mark.parametrize("family", ADMITTED)
def test_admits_family_and_reports_its_layers(family):
    spec = admit(build_tiny_model(family))

    assert [layer.layer_idx for layer in spec.layers] == [0, 1]
    assert {layer.num_heads for layer in spec.layers} == {4}
    assert spec.dtype == torch.float32


@pytest.mark.parametrize("family", REFUSED)
def test_refuses_family_by_name_and_reason(family):
    model = build_tiny_model(family)

    with pytest.raises(UnsupportedModelError) as caught:
        admit(model)

    assert type(model).__name__ in str(caught.value)
    assert REFUSED[family] in str(caught.value)


def test_spec_has_grouped_heads_and_value_width_of_its_own():
    grouped = admit(build_tiny_model("llama")).layers[0]
    latent = admit(build_tiny_model("deepseek_v3")).layers[0]

    assert (grouped.num_kv_heads, grouped.key_dim, grouped.value_dim) == (2, 8, 8)
    assert (latent.num_kv_heads, latent.key_dim, latent.value_dim) == (4, 16, 12)


def test_spec_dtype_is_the_models():
    assert admit(build_tiny_model("llama", dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_refuses_rope_that_depends_on_the_batch_in_one_layer_type_only():
    model = build_tiny_model("gemma3")
    model.config.rope_parameters["full_attention"]["rope_type"] = "dynamic"

    with pytest.raises(UnsupportedModelError, match="dynamic"):
        admit(model)


def test_refuses_rope_seen_only_in_the_live_module():
    model = build_tiny_model("llama")
    model.model.rotary_emb.rope_type = "longrope"

    with pytest.raises(UnsupportedModelError, match="longrope"):
        admit(model)


def test_refuses_what_is_no_transformers_model():
    with pytest.raises(UnsupportedModelError, match="not a transformers model"):
        admit(nn.Linear(2, 2))


def test_refuses_model_without_weights():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(num_hidden_layers=1))

    with pytest.raises(UnsupportedModelError, match="meta"):
        admit(model)


def test_refuses_layer_that_bypasses_attention():
    model = build_tiny_model("llama")

    class NoAttention(nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states, None

    model.model.layers[1].self_attn = NoAttention()

    with pytest.raises(UnsupportedModelError, match=r"ran for layers \[0\]"):
        admit(model)


def test_refuses_attention_argument_that_is_not_honoured():
    model = build_tiny_model("llama")
    attention_layer = model.model.layers[0].self_attn
    forward = attention_layer.forward
    attention_layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, logit_bias=2.0)

    with pytest.raises(UnsupportedModelError, match=r"argument 'logit_bias' \(2.0\)"):
        admit(model)


def test_leaves_model_and_random_state_as_they_were():
    model = build_tiny_model("mistral").train()
    implementation = model.config._attn_implementation
    config = model.config.to_json_string(use_diff=False)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random_state = torch.get_rng_state()

    admit(model)

    assert model.config._attn_implementation == implementation != attention.ATTENTION_NAME
    assert model.config.to_json_string(use_diff=False) == config
    assert all(module.training for module in model.modules())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())
    assert torch.equal(torch.get_rng_state(), random_state)


def _ignore_window(monkeypatch):
    monkeypatch.setattr(attention, "_checked_window", lambda *_: 0)


def _ignore_sinks(monkeypatch):
    monkeypatch.setattr(attention, "_checked_sinks", lambda *_: None)


def _leak_neighbour(monkeypatch):
    real = attention_backends._core.AttentionBatch

    def one_table_for_all(block_tables, past_tokens, new_tokens, block_size):
        longest = max(block_tables, key=len)
        return real([longest] * len(block_tables), past_tokens, new_tokens, block_size)

    monkeypatch.setattr(attention_backends._core, "AttentionBatch", one_table_for_all)


def _skip_attention(monkeypatch):
    monkeypatch.setattr(paged_model._PagedStep, "attend", _counted_zeros)


def _counted_zeros(step, call):
    step.num_calls += 1
    _, heads, tokens, _ = call.query.shape
    return call.query.new_zeros((1, tokens, heads, call.value.shape[-1]))


@pytest.mark.parametrize(
    ("family", "mutate"),
    [
        ("mistral", _ignore_window),
        ("gemma2", _ignore_window),
        ("gpt_oss", _ignore_sinks),
        ("llama", _leak_neighbour),
        ("qwen3", _skip_attention),
    ],
)
def test_self_check_fails_when_attention_is_wrong(family, mutate, monkeypatch):
    model = build_tiny_model(family)
    self_check(model)
    mutate(monkeypatch)

    with pytest.raises(UnsupportedModelError, match="gives other answers"):
        self_check(model)


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(
            vocab_size=128256,
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        ),
        Qwen3Config(
            vocab_size=151936,
            hidden_size=4096,
            num_hidden_layers=36,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
        ),
    ],
    ids=["llama-70b", "qwen3-8b"],
)
def test_large_configuration_shrinks_but_keeps_heads(config):
    small = shrunk_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)

    assert sum(parameter.numel() for parameter in model.parameters()) < 30_000_000
    assert small.head_dim == 128
    assert small.num_attention_heads // small.num_key_value_heads == (
        config.num_attention_heads // config.num_key_value_heads
    )
    assert config.num_hidden_layers > small.num_hidden_layers == 2


def test_shrinking_keeps_two_layers_of_each_kind():
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = build_tiny_model(
        "gemma3", num_hidden_layers=12, layer_types=kinds * 2, sliding_window=4096
    ).config

    assert kept_layers(config) == [0, 1, 5, 11]
    small = shrunk_config(config)
    assert small.layer_types == ["sliding_attention"] * 2 + ["full_attention"] * 2
    assert small.sliding_window == WINDOW
    assert config.num_hidden_layers == 12
