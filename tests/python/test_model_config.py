"""Which modules of a model can carry LoRA, under which names, sizes and ids."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from tests.support.tiny_models import build_tiny_model, tiny_config
from torch import nn

from pagedlora import _core
from pagedlora.errors import InvalidArgumentError
from pagedlora.model_config import LoraModelConfig


def names(config):
    return [module.name for module in config.modules]


def as_tuples(config):
    return [
        (m.name, m.layer_id, m.module_id, m.in_features, m.out_features) for m in config.modules
    ]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT's own
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3", "opt", "gpt2"])
def test_all_linear_means_what_it_means_in_peft(family):
    config = LoraModelConfig.from_module(build_tiny_model(family))
    peft_model = get_peft_model(build_tiny_model(family), LoraConfig(target_modules="all-linear"))
    targeted = [
        name.removeprefix("base_model.model.")
        for name, module in peft_model.named_modules()
        if isinstance(module, BaseTunerLayer)
    ]

    assert names(config) == targeted
    assert "lm_head" not in targeted


def test_modules_of_a_llama_have_sizes_layers_and_tensorrt_llm_ids():
    modules = as_tuples(LoraModelConfig.from_module(build_tiny_model("llama")))

    assert modules[7:] == [
        ("model.layers.1.self_attn.q_proj", 1, 1, 32, 32),
        ("model.layers.1.self_attn.k_proj", 1, 2, 32, 16),
        ("model.layers.1.self_attn.v_proj", 1, 3, 32, 16),
        ("model.layers.1.self_attn.o_proj", 1, 4, 32, 32),
        ("model.layers.1.mlp.gate_proj", 1, 5, 32, 48),
        ("model.layers.1.mlp.up_proj", 1, 7, 32, 48),
        ("model.layers.1.mlp.down_proj", 1, 6, 48, 32),
    ]


def test_fused_and_unknown_kinds_have_their_ids():
    ids = {
        name.rsplit(".", 1)[-1]: module_id
        for name, _, module_id, _, _ in as_tuples(
            LoraModelConfig.from_module(build_tiny_model("phi3"))
        )
    }
    assert ids == {"qkv_proj": 0, "o_proj": 4, "gate_up_proj": 18, "down_proj": 6}
    opt = as_tuples(LoraModelConfig.from_module(build_tiny_model("opt"), ["fc1"]))
    assert [module_id for _, _, module_id, _, _ in opt] == [-1, -1]


def test_names_select_by_suffix_in_model_order():
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model, ["v_proj", "layers.0.self_attn.q_proj"])

    assert names(config) == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
        "model.layers.1.self_attn.v_proj",
    ]
    assert config.find("model.layers.1.self_attn.v_proj") == 2
    assert config.find("v_proj") is None


def test_suffix_is_cut_at_dots_only():
    model = nn.ModuleDict({"q_proj": nn.Linear(2, 3), "my_q_proj": nn.Linear(2, 3)})

    assert names(LoraModelConfig.from_module(model, ["q_proj"])) == ["q_proj"]


def test_output_embedding_can_be_named():
    config = LoraModelConfig.from_module(build_tiny_model("llama"), ["lm_head"])

    assert as_tuples(config) == [("lm_head", -1, -1, 32, 64)]


def test_subclasses_of_linear_count():
    class Quantised(nn.Linear):
        pass

    config = LoraModelConfig.from_module(nn.Sequential(nn.Linear(2, 3), Quantised(3, 4)))
    assert as_tuples(config) == [("0", 0, -1, 2, 3), ("1", 1, -1, 3, 4)]


def test_conv1d_has_the_sizes_of_its_input_and_output():
    """Its weight is stored as [in_features, out_features]."""
    config = LoraModelConfig.from_module(build_tiny_model("gpt2"), ["h.0.mlp.c_fc", "c_attn"])
    assert as_tuples(config) == [
        ("transformer.h.0.attn.c_attn", 0, -1, 32, 96),
        ("transformer.h.0.mlp.c_fc", 0, -1, 32, 128),
        ("transformer.h.1.attn.c_attn", 1, -1, 32, 96),
    ]


def test_embeddings_are_taken_when_they_are_named():
    model = build_tiny_model("llama")
    config = LoraModelConfig.from_module(model, ["embed_tokens", "lm_head", "q_proj"])

    assert as_tuples(config)[0] == ("model.embed_tokens", -1, -1, 64, 32)
    assert [module.kind.name for module in config.modules] == ["embedding"] + ["linear"] * 3
    assert names(config)[-1] == "lm_head"


def test_all_linear_may_stand_among_names():
    model = build_tiny_model("llama")
    everything = names(LoraModelConfig.from_module(model, ["all-linear", "embed_tokens"]))

    assert everything == ["model.embed_tokens", *names(LoraModelConfig.from_module(model))]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["q_proj", "querry"], "'querry'"),
        (["norm"], "'norm'"),
        ([], "empty"),
        ("q_proj", r"\['q_proj'\]"),
    ],
)
def test_targets_that_mean_nothing_raise(targets, message):
    with pytest.raises(InvalidArgumentError, match=message):
        LoraModelConfig.from_module(build_tiny_model("llama"), targets)


def test_model_without_linear_modules_raises():
    with pytest.raises(InvalidArgumentError, match="no linear modules"):
        LoraModelConfig.from_module(nn.Embedding(4, 4))


@pytest.mark.parametrize("rank", [0, 1025])
def test_rank_out_of_range_raises(rank):
    with pytest.raises(InvalidArgumentError):
        LoraModelConfig.from_module(build_tiny_model("llama"), max_lora_rank=rank)


@pytest.mark.parametrize(
    ("model_dtype", "dtype", "expected"),
    [
        (torch.bfloat16, None, _core.Dtype.bfloat16),
        (torch.float32, None, _core.Dtype.float32),
        (torch.float32, torch.float16, _core.Dtype.float16),
    ],
)
def test_dtype_is_the_models_unless_given(model_dtype, dtype, expected):
    model = build_tiny_model("llama", dtype=model_dtype)
    config = LoraModelConfig.from_module(model, dtype=dtype, max_lora_rank=16)

    assert config.dtype == expected
    assert config.max_lora_rank == 16


def test_other_dtypes_raise():
    with pytest.raises(InvalidArgumentError, match="float64"):
        LoraModelConfig.from_module(build_tiny_model("llama"), dtype=torch.float64)


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_configuration_alone_gives_the_same_as_the_model(family):
    hf_config = tiny_config(family, dtype="bfloat16")
    before = hf_config.to_json_string(use_diff=False)
    config = LoraModelConfig.from_hf_config(hf_config, max_lora_rank=8)
    live = LoraModelConfig.from_module(build_tiny_model(family, dtype=torch.bfloat16))

    assert as_tuples(config) == as_tuples(live)
    assert config.dtype == live.dtype == _core.Dtype.bfloat16
    assert isinstance(config, LoraModelConfig)
    assert hf_config.to_json_string(use_diff=False) == before


def test_configuration_without_dtype_means_float32():
    hf_config = tiny_config("llama", dtype=None)

    assert LoraModelConfig.from_hf_config(hf_config, ["q_proj"]).dtype == _core.Dtype.float32
