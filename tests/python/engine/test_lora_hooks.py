"""Which rows of which module the hooks hand to the operator.

The operator and its table are fakes that add a constant per request, so that the rows are visible.
"""

import ctypes
from types import SimpleNamespace

import pytest
import torch
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model
from torch import nn

from pagedlora import _core
from pagedlora.engine import lora_hooks, row_map
from pagedlora.engine.lora_hooks import LoraHooks
from pagedlora.engine.model_runner import ModelRunner
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError
from pagedlora.model_config import LoraModelConfig

SIZE = 4


def rows_view(pointer, rows, features, stride):
    buffer = (ctypes.c_float * ((rows - 1) * stride + features)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=torch.float32).as_strided((rows, features), (stride, 1))


class FakeBatch:
    """The lease is {request id: what the adapter adds}."""

    has_dora_scales = False
    touched_modules = b"\1" * 1000

    def __init__(self, lease, segments):
        self.deltas = [
            0.0 if request_id is None else lease[request_id]
            for request_id, rows in segments
            for _ in range(rows)
        ]


class FakeOperator:
    """y += delta of the row's request * sum of x's row."""

    calls = None
    biases = None
    sizes = None

    def __init__(self, weights_dtype):
        assert weights_dtype == _core.Dtype.float32

    def apply(self, batch, index, x, y, num_rows, x_stride, y_stride, dtype, base_bias):  # noqa: PLR0917
        assert num_rows == len(batch.deltas)
        self.biases.append(base_bias)
        assert dtype == _core.Dtype.float32
        in_features, out_features = self.sizes[index]
        self.calls.append((index, batch.deltas))
        x_rows = rows_view(x, num_rows, in_features, x_stride)
        rows_view(y, num_rows, out_features, y_stride).add_(
            torch.tensor(batch.deltas).unsqueeze(1) * x_rows.sum(dim=1, keepdim=True)
        )


@pytest.fixture
def operator(monkeypatch):
    monkeypatch.setattr(FakeOperator, "calls", [])
    monkeypatch.setattr(FakeOperator, "biases", [])
    fake_core = SimpleNamespace(LoraBatch=FakeBatch, LoraOperator=FakeOperator)
    monkeypatch.setattr(lora_hooks, "_core", fake_core)
    monkeypatch.setattr(row_map, "_core", fake_core)
    return FakeOperator


class Model(nn.Module):
    """A linear module for all rows, and an output embedding for chosen ones."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(SIZE, SIZE)
        self.lm_head = nn.Linear(SIZE, 3, bias=False)

    def get_output_embeddings(self):
        return self.lm_head


def open_hooks(model, operator, names=("proj", "lm_head")):
    config = LoraModelConfig.from_module(model, list(names))
    operator.sizes = [(m.in_features, m.out_features) for m in config.modules]
    return LoraHooks(model, config, _core.Dtype.float32)


def sequence(request_id, num_tokens, *, uses_adapter=True, sample=True):
    return ScheduledSequence(
        request_id, [1] * num_tokens, 0, [request_id], uses_adapter=uses_adapter, sample=sample
    )


MIXED = StepBatch(
    [
        sequence(1, 3),
        sequence(2, 1, uses_adapter=False),
        sequence(3, 2, sample=False),
        sequence(4, 1),
    ]
)
LEASE = {1: 10.0, 3: 30.0, 4: 40.0}


def test_every_row_gets_its_own_adapter(operator):
    model = Model()
    x = torch.randn(1, 7, SIZE)
    with torch.inference_mode():
        plain = model.proj(x)
        hooks = open_hooks(model, operator)
        with hooks.step(MIXED, LEASE):
            y = model.proj(x)

    added = torch.tensor([10.0] * 3 + [0.0] + [30.0] * 2 + [40.0]).reshape(1, 7, 1)
    assert torch.allclose(y, plain + added * x.sum(dim=-1, keepdim=True))
    assert torch.equal(y[0, 3], plain[0, 3])


def test_an_input_given_by_name_is_found(operator):
    model = Model()
    x = torch.randn(1, 7, SIZE)
    hooks = open_hooks(model, operator)
    with torch.inference_mode(), hooks.step(MIXED, LEASE):
        assert torch.equal(model.proj(input=x), model.proj(x))
    assert len(operator.calls) == 2


def test_a_module_without_a_known_input_is_named(operator):
    class Odd(nn.Linear):
        def forward(self, *, hidden):
            return super().forward(hidden)

    model = Model()
    model.proj = Odd(SIZE, SIZE)
    hooks = open_hooks(model, operator)
    with (
        torch.inference_mode(),
        hooks.step(MIXED, LEASE),
        pytest.raises(UnsupportedModelError, match="module 'proj' was called without its input"),
    ):
        model.proj(hidden=torch.randn(1, 7, SIZE))


def test_output_embedding_gets_the_sampled_rows(operator):
    model = Model()
    hooks = open_hooks(model, operator)
    with torch.inference_mode(), hooks.step(MIXED, LEASE):
        model.lm_head(torch.randn(1, 3, SIZE))

    assert operator.calls == [(1, [10.0, 0.0, 40.0])]


@pytest.mark.parametrize(("name", "rows"), [("proj", 3), ("proj", 6), ("lm_head", 7)])
def test_rows_that_do_not_fit_the_call_site_raise(name, rows, operator):
    model = Model()
    hooks = open_hooks(model, operator)

    with (
        torch.inference_mode(),
        hooks.step(MIXED, LEASE),
        pytest.raises(UnsupportedModelError, match=f"module '{name}' was called with {rows} rows"),
    ):
        getattr(model, name)(torch.randn(1, rows, SIZE))
    assert operator.calls == []


def test_step_without_adapters_reads_no_lease_and_calls_nothing(operator):
    model = Model()
    hooks = open_hooks(model, operator)
    step = StepBatch([sequence(1, 2, uses_adapter=False), sequence(2, 1, uses_adapter=False)])

    with torch.inference_mode(), hooks.step(step, None):
        model.proj(torch.randn(1, 3, SIZE))
    assert operator.calls == []


def test_a_module_that_no_adapter_of_the_step_touches_costs_nothing(operator, monkeypatch):
    monkeypatch.setattr(FakeBatch, "touched_modules", bytes([0, 1]))
    model = Model()
    hooks = open_hooks(model, operator)
    with torch.inference_mode(), hooks.step(MIXED, LEASE):
        model.proj(torch.randn(1, 7, SIZE))
        model.lm_head(torch.randn(1, MIXED.num_sampled, SIZE))
    assert [index for index, _ in operator.calls] == [1]


def test_sampled_rows_of_the_base_model_alone_call_nothing(operator, monkeypatch):
    """The row has adapters, the rows that the output embedding gets have none."""
    monkeypatch.setattr(FakeBatch, "touched_modules", b"")
    model = Model()
    hooks = open_hooks(model, operator)
    step = StepBatch([sequence(1, 3, sample=False), sequence(2, 1, uses_adapter=False)])
    with torch.inference_mode(), hooks.step(step, LEASE):
        model.lm_head(torch.randn(1, 1, SIZE))
    assert operator.calls == []


def test_between_steps_and_after_an_error_the_hooks_do_nothing(operator):
    model = Model()
    hooks = open_hooks(model, operator)

    def failing_step():
        with hooks.step(MIXED, LEASE):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing_step()
    with torch.inference_mode():
        model.proj(torch.randn(1, 5, SIZE))
    assert operator.calls == []


def test_step_that_samples_nothing_leaves_the_output_embedding_alone(operator):
    model = Model()
    hooks = open_hooks(model, operator)
    step = StepBatch([sequence(1, 3, sample=False)])

    with torch.inference_mode(), hooks.step(step, LEASE):
        model.lm_head(torch.randn(1, 0, SIZE))
        model.proj(torch.randn(1, 3, SIZE))
    assert [index for index, _ in operator.calls] == [0]


def test_missing_lease_raises(operator):
    hooks = open_hooks(Model(), operator)

    with pytest.raises(InvalidArgumentError, match="lease"), hooks.step(MIXED, None):
        pass


def test_strided_input_and_output_are_handled(operator):
    class Transposed(nn.Linear):
        def forward(self, x):
            return super().forward(x).mT.contiguous().mT

    model = Model()
    model.proj = Transposed(SIZE, SIZE)
    x = torch.randn(1, SIZE, 7).mT
    with torch.inference_mode():
        plain = model.proj(x)
        assert plain.stride(-1) != 1
        hooks = open_hooks(model, operator)
        with hooks.step(MIXED, LEASE):
            y = model.proj(x)

    added = torch.tensor([10.0] * 3 + [0.0] + [30.0] * 2 + [40.0]).reshape(1, 7, 1)
    assert torch.allclose(y, plain + added * x.sum(dim=-1, keepdim=True))


def test_module_that_changes_dtype_raises(operator):
    class Widening(nn.Linear):
        def forward(self, x):
            return super().forward(x).double()

    model = Model()
    model.proj = Widening(SIZE, SIZE)
    hooks = open_hooks(model, operator)

    with (
        torch.inference_mode(),
        hooks.step(MIXED, LEASE),
        pytest.raises(UnsupportedModelError, match="one dtype"),
    ):
        model.proj(torch.randn(1, 7, SIZE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: delattr(model, "lm_head"), "no module 'lm_head'"),
        (lambda model: setattr(model, "lm_head", nn.Linear(SIZE, 5)), "4 -> 5"),
        (lambda model: setattr(model, "lm_head", nn.Embedding(SIZE, 3)), "embedding"),
    ],
)
def test_configuration_of_another_model_raises_and_leaves_no_hooks(change, message, operator):
    config = LoraModelConfig.from_module(Model(), ["proj", "lm_head"])
    model = Model()
    change(model)
    model.get_output_embeddings = lambda: None

    with pytest.raises(InvalidArgumentError, match=message):
        LoraHooks(model, config, _core.Dtype.float32)
    assert not model.proj._forward_hooks


def test_biases_are_handed_over_only_while_an_adapter_has_dora(operator, monkeypatch):
    model = Model()
    hooks = open_hooks(model, operator)
    x = torch.randn(1, 7, SIZE)
    with torch.inference_mode():
        for needed in (False, True):
            monkeypatch.setattr(FakeBatch, "has_dora_scales", needed)
            with hooks.step(MIXED, LEASE):
                model.proj(x)
                model.lm_head(torch.randn(1, 3, SIZE))

    assert operator.biases == [0, 0, model.proj.bias.data_ptr(), 0]


def test_an_embedding_hands_over_its_tokens_and_its_factor(operator, monkeypatch):
    seen = []

    def apply_embedding(self, batch, index, tokens, y, num_rows, y_stride, dtype, factor):  # noqa: PLR0917
        ids = (ctypes.c_int64 * num_rows).from_address(tokens)
        seen.append((batch.deltas, index, list(ids), y_stride, dtype, factor))
        rows_view(y, num_rows, SIZE, y_stride).add_(torch.tensor(batch.deltas).unsqueeze(1))

    monkeypatch.setattr(operator, "apply_embedding", apply_embedding, raising=False)
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(9, SIZE)})
    ids = torch.tensor([[0, 8, 3, 3, 1, 2, 4]], dtype=torch.int32)
    hooks = open_hooks(model, operator, ["embed_tokens"])
    with torch.inference_mode():
        plain = model["embed_tokens"](ids)
        with hooks.step(MIXED, LEASE):
            y = model["embed_tokens"](ids)
            model["embed_tokens"].embed_scale = torch.tensor(2.5)
            model["embed_tokens"](input=ids)

    deltas = [10.0] * 3 + [0.0] + [30.0] * 2 + [40.0]
    float32 = _core.Dtype.float32
    assert seen == [(deltas, 0, ids[0].tolist(), SIZE, float32, factor) for factor in (1.0, 2.5)]
    assert torch.equal(y, plain + torch.tensor(deltas).reshape(1, 7, 1))


def test_an_embedding_that_gets_other_tokens_than_the_step_has_raises(operator):
    model = nn.ModuleDict({"embed_tokens": nn.Embedding(9, SIZE)})
    hooks = open_hooks(model, operator, ["embed_tokens"])
    with (
        hooks.step(MIXED, LEASE),
        pytest.raises(UnsupportedModelError, match="'embed_tokens' was called with 2 rows"),
    ):
        model["embed_tokens"](torch.tensor([[1, 2]]))


def test_remove_takes_all_hooks_off(operator):
    model = Model()
    hooks = open_hooks(model, operator)
    hooks.remove()
    hooks.remove()

    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "opt"])
def test_runner_reaches_every_target_of_a_model_with_fitting_rows(family, operator):
    model = build_tiny_model(family)
    linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    config = LoraModelConfig.from_module(model, linear)
    operator.sizes = [(m.in_features, m.out_features) for m in config.modules]
    runner = ModelRunner(
        model, config, num_blocks=8, block_size=4, weights_dtype=_core.Dtype.float32
    )
    logits = runner.forward(MIXED, dict.fromkeys(LEASE, 0.01))

    assert logits.shape == (3, VOCAB_SIZE)
    head = config.find("lm_head")
    assert sorted(index for index, _ in operator.calls) == list(range(len(linear)))
    assert {len(deltas) for index, deltas in operator.calls if index != head} == {7}
    assert {len(deltas) for index, deltas in operator.calls if index == head} == {3}
    runner.close()
    assert not any(module._forward_hooks for module in model.modules())


def test_runner_refuses_lora_config_without_weights_dtype_and_gives_the_model_back():
    model = build_tiny_model("llama")
    implementation = model.config._attn_implementation
    config = LoraModelConfig.from_module(model)

    with pytest.raises(InvalidArgumentError, match="weights_dtype"):
        ModelRunner(model, config, num_blocks=8, block_size=4, weights_dtype=None)
    assert model.config._attn_implementation == implementation
