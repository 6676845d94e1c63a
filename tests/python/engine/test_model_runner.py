"""Ragged, chunked steps against the model's own eager forward, and what is left on close."""

import copy
from itertools import count

import pytest
import torch
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model, greedy_tokens

from pagedlora.engine import model_runner
from pagedlora.engine.attention import ATTENTION_NAME
from pagedlora.engine.kv_tensors import KvTensors, bytes_per_block
from pagedlora.engine.model_runner import ModelRunner
from pagedlora.engine.model_spec import LayerSpec, ModelSpec
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.errors import InvalidArgumentError, UnsupportedModelError

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2"]
BLOCK_SIZE = 4
PROMPTS = {
    7: [3, 17, 9, 4, 44, 21, 8, 60, 5, 5, 31],
    8: [50, 2, 33],
    9: [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27],
}


class Requests:
    """Token lists and block tables of some requests; blocks are handed out interleaved."""

    def __init__(self, prompts):
        self.tokens = {request_id: list(prompt) for request_id, prompt in prompts.items()}
        self.past = dict.fromkeys(prompts, 0)
        self._blocks = {request_id: [] for request_id in prompts}
        self._free = count()

    def take(self, request_id, num_tokens, *, sample):
        begin = self.past[request_id]
        self.past[request_id] = end = begin + num_tokens
        blocks = self._blocks[request_id]
        while len(blocks) * BLOCK_SIZE < end:
            blocks.append(next(self._free))
        return ScheduledSequence(
            request_id=request_id,
            token_ids=self.tokens[request_id][begin:end],
            past_tokens=begin,
            block_table=list(blocks),
            uses_adapter=False,
            sample=sample,
        )


def open_runner(model, **changes):
    options = {"num_blocks": 64, "block_size": BLOCK_SIZE, "weights_dtype": None, **changes}
    return ModelRunner(model, None, **options)


def run_greedy(runner, prompts, num_tokens, chunk=5):
    """Staggered: request i starts at step i; prompts are cut into chunks; all share the row."""
    requests = Requests(prompts)
    answers = {request_id: [] for request_id in prompts}
    step_number = -1
    while any(len(answer) < num_tokens for answer in answers.values()):
        step_number += 1
        sequences = []
        for start, request_id in enumerate(prompts):
            left = len(requests.tokens[request_id]) - requests.past[request_id]
            if step_number < start or not left or len(answers[request_id]) == num_tokens:
                continue
            size = min(left, chunk)
            sequences.append(requests.take(request_id, size, sample=size == left))
        logits = runner.forward(StepBatch(sequences))
        sampled = [s.request_id for s in sequences if s.sample]
        for request_id, row in zip(sampled, logits, strict=True):
            token = int(row.argmax())
            answers[request_id].append(token)
            requests.tokens[request_id].append(token)
    return answers


@pytest.mark.parametrize("chunk", [1, 5, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_answers_equal_each_prompt_alone(family, chunk):
    model = build_tiny_model(family)
    expected = {i: greedy_tokens(model, prompt, 12) for i, prompt in PROMPTS.items()}
    assert all(len(set(tokens)) >= 4 for tokens in expected.values())
    assert len(set(map(tuple, expected.values()))) == len(PROMPTS)

    runner = open_runner(model)
    assert run_greedy(runner, PROMPTS, 12, chunk) == expected
    runner.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_ragged_step_equal_eager(family):
    model = build_tiny_model(family)
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        expected = {
            i: eager(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
            for i, prompt in PROMPTS.items()
        }
    tolerance = 1e-4 * torch.cat(list(expected.values())).std().item()

    runner = open_runner(model)
    requests = Requests(PROMPTS)
    for sizes in ({7: 4, 9: 9}, {7: 6, 8: 2, 9: 7}, {9: 1, 8: 1, 7: 1}):
        sequences = [requests.take(i, size, sample=True) for i, size in sizes.items()]
        logits = runner.forward(StepBatch(sequences))
        assert logits.dtype == torch.float32
        assert logits.shape == (len(sizes), VOCAB_SIZE)
        for request_id, row in zip(sizes, logits, strict=True):
            difference = row - expected[request_id][requests.past[request_id] - 1]
            assert difference.abs().max().item() <= tolerance
    runner.close()


def test_window_smaller_than_context_matters():
    model = build_tiny_model("mistral")
    wide = build_tiny_model("mistral", sliding_window=None)

    assert greedy_tokens(model, PROMPTS[9], 8) != greedy_tokens(wide, PROMPTS[9], 8)


def test_bfloat16_model_runs_and_returns_float32():
    runner = open_runner(build_tiny_model("llama", dtype=torch.bfloat16))
    logits = runner.forward(StepBatch([Requests(PROMPTS).take(7, 11, sample=True)]))

    assert runner.kv.keys[0].dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    assert torch.isfinite(logits).all()
    runner.close()


@pytest.mark.parametrize("family", [*FAMILIES, "gpt2", "opt", "cohere2"])
def test_step_that_samples_nothing_returns_no_rows_but_fills_the_cache(family):
    model = build_tiny_model(family)
    expected = greedy_tokens(model, PROMPTS[7], 1)
    runner = open_runner(model)
    requests = Requests(PROMPTS)

    silent = StepBatch([requests.take(7, 10, sample=False)])
    assert runner.forward(silent).shape == (0, VOCAB_SIZE)
    logits = runner.forward(StepBatch([requests.take(7, 1, sample=True)]))

    assert logits.argmax(dim=-1).tolist() == expected
    runner.close()


def test_close_gives_the_model_back_unchanged():
    model = build_tiny_model("mistral").train()
    model.model.layers[1].eval()
    training = {name: module.training for name, module in model.named_modules()}
    config = model.config.to_json_string(use_diff=False)
    implementation = model.config._attn_implementation
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}

    runner = open_runner(model)
    assert model.config._attn_implementation == ATTENTION_NAME
    runner.close()
    runner.close()

    assert model.config._attn_implementation == implementation
    assert model.config.to_json_string(use_diff=False) == config
    assert {name: module.training for name, module in model.named_modules()} == training
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(module._forward_hooks for module in model.modules())


def test_two_runners_alive_do_not_disturb_each_other():
    first, second = build_tiny_model("llama"), build_tiny_model("gemma2")
    expected = [greedy_tokens(model, PROMPTS[7], 6) for model in (first, second)]
    runners = [open_runner(first), open_runner(second)]

    for _ in range(2):
        answers = [run_greedy(runner, {7: PROMPTS[7]}, 6)[7] for runner in runners]
        assert answers == expected
    runners[0].close()
    assert run_greedy(runners[1], {7: PROMPTS[7]}, 6)[7] == expected[1]
    runners[1].close()


def test_models_that_share_a_config_object_return_it_with_the_last():
    first = build_tiny_model("llama")
    second = copy.deepcopy(first)
    for module in second.modules():
        if hasattr(module, "config"):
            module.config = first.config
    implementation = first.config._attn_implementation
    expected = greedy_tokens(second, PROMPTS[7], 6)
    runners = [open_runner(first), open_runner(second)]

    runners[0].close()
    assert first.config._attn_implementation == ATTENTION_NAME
    assert run_greedy(runners[1], {7: PROMPTS[7]}, 6)[7] == expected
    runners[1].close()
    assert first.config._attn_implementation == implementation


def test_calling_a_held_model_directly_raises():
    model = build_tiny_model("llama")
    runner = open_runner(model)

    with pytest.raises(RuntimeError, match="in use by a pagedlora engine"):
        model(input_ids=torch.tensor([[1, 2]]))
    runner.close()
    assert model(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCAB_SIZE)


def test_attention_implementation_changed_under_a_runner_is_noticed():
    model = build_tiny_model("llama")
    runner = open_runner(model)
    model.set_attn_implementation("eager")

    with pytest.raises(RuntimeError, match="0 times for 2 layers"):
        runner.forward(StepBatch([Requests(PROMPTS).take(7, 3, sample=True)]))
    runner.close()


def test_attention_argument_that_appears_later_raises():
    model = build_tiny_model("llama")
    runner = open_runner(model)
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: forward(*args, **kwargs, position_bias=torch.ones(2))

    with pytest.raises(UnsupportedModelError, match="'position_bias'"):
        runner.forward(StepBatch([Requests(PROMPTS).take(7, 3, sample=True)]))
    runner.close()


def test_refused_step_leaves_the_runner_usable():
    model = build_tiny_model("llama")
    expected = greedy_tokens(model, PROMPTS[7], 4)
    runner = open_runner(model)
    bad = ScheduledSequence(1, [1, 2, 3, 4, 5], 0, [99, 100], uses_adapter=False, sample=True)

    with pytest.raises(InvalidArgumentError):
        runner.forward(StepBatch([bad]))
    assert run_greedy(runner, {7: PROMPTS[7]}, 4)[7] == expected
    runner.close()


def test_adapter_without_lora_config_raises():
    runner = open_runner(build_tiny_model("llama"))
    sequence = ScheduledSequence(1, [1], 0, [0], uses_adapter=True, sample=True)

    with pytest.raises(InvalidArgumentError, match="lora_config"):
        runner.forward(StepBatch([sequence]))
    runner.close()


def test_failed_construction_gives_the_model_back():
    model = build_tiny_model("llama")
    implementation = model.config._attn_implementation

    with pytest.raises(InvalidArgumentError, match="0 blocks"):
        open_runner(model, num_blocks=0)
    assert model.config._attn_implementation == implementation


def test_step_batch_derives_positions_and_logits_rows():
    requests = Requests({1: [5, 6, 7, 8], 2: [9, 9], 3: [4]})
    requests.take(1, 2, sample=False)
    step = StepBatch(
        [
            requests.take(1, 2, sample=True),
            requests.take(2, 2, sample=False),
            requests.take(3, 1, sample=True),
        ]
    )

    assert (step.num_tokens, step.num_sampled) == (5, 2)
    assert step.token_ids == [7, 8, 9, 9, 4]
    assert step.position_ids == [2, 3, 0, 1, 0]
    assert step.logits_rows == [1, 4]


@pytest.mark.parametrize(
    "sequences",
    [
        [],
        [ScheduledSequence(1, [], 0, [0], uses_adapter=False, sample=True)],
        [ScheduledSequence(1, [1], -1, [0], uses_adapter=False, sample=True)],
    ],
)
def test_step_batch_refuses_what_cannot_be_computed(sequences):
    with pytest.raises(InvalidArgumentError):
        StepBatch(sequences)


def test_bytes_per_block_counts_what_is_allocated():
    spec = ModelSpec((LayerSpec(0, 4, 2, 16, 12), LayerSpec(1, 4, 4, 8, 8)), torch.bfloat16)
    tensors = KvTensors(spec, 3, 16, torch.bfloat16)

    allocated = sum(t.nbytes for t in [*tensors.keys, *tensors.values])
    assert bytes_per_block(spec, 16, torch.bfloat16) * 3 == allocated
    assert tensors.keys[0].shape == (3, 16, 2, 16)
    assert tensors.values[0].shape == (3, 16, 2, 12)


def test_a_step_runs_on_torchs_stream_of_the_models_device(monkeypatch):
    runner = open_runner(build_tiny_model("llama"))
    assert runner.stream is None
    monkeypatch.setattr(model_runner, "current_stream", {torch.device("cpu"): 1234}.get)
    assert runner.stream == 1234
    runner.close()
