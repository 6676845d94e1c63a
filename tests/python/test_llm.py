"""`LLM` from the outside, judged by PEFT: the right adapter's answer, whatever the room."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import VOCAB_SIZE, build_tiny_model, greedy_tokens
from torch import nn

pytest.importorskip("pagedlora._core", reason="the native part is not built")

from pagedlora.config import (
    KvCacheConfig,
    LoraConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from pagedlora.engine.llm import LLM
from pagedlora.errors import (
    AdapterFormatError,
    AdapterNotFoundError,
    CapacityError,
    InvalidArgumentError,
    PagedLoraError,
    UnsupportedModelError,
)
from pagedlora.requests import LlmRequest, LoRARequest
from pagedlora.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8)
pytestmark = pytest.mark.filterwarnings(
    # transformers warns when PEFT 0.21 asks a model whether it checkpoints gradients.
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS = {
    "r1": (1, ["q_proj", "v_proj"], False),
    "r3": (3, ATTENTION, False),
    "r12": (12, "all-linear", True),
    "r33": (33, ["down_proj", "v_proj"], False),
    "r64": (64, "all-linear", False),
    "r8": (8, ["gate_proj", "o_proj"], True),
}
"""Name to rank, target modules and whether rank-stabilised."""

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")


def save_adapter(
    directory: Path, family: str, rank: int, targets: Any, *, rslora: bool = False, seed: int = 0
) -> Path:
    """A PEFT adapter of the family's tiny model with a B that is not zero."""
    config = peft.LoraConfig(
        r=rank,
        lora_alpha=2 * rank if not rslora else 4,
        target_modules=targets,
        use_rslora=rslora,
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = peft.get_peft_model(build_tiny_model(family), config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) * (1.2 / rank) ** 0.5 * 0.4)
        model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """One of the families that must work."""
    return str(request.param)


@pytest.fixture(scope="module")
def adapters(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of `ADAPTERS` for the family."""
    root = tmp_path_factory.mktemp(family)
    return {
        name: save_adapter(root / name, family, rank, targets, rslora=rslora, seed=seed)
        for seed, (name, (rank, targets, rslora)) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def llama_adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of `ADAPTERS` for llama."""
    root = tmp_path_factory.mktemp("only-llama")
    return {
        name: save_adapter(root / name, "llama", rank, targets, rslora=rslora, seed=seed)
        for seed, (name, (rank, targets, rslora)) in enumerate(ADAPTERS.items())
    }


@pytest.fixture
def engines() -> Iterator[list[LLM]]:
    """Engines to be checked and closed after the test, whether or not the test asks."""
    made: list[LLM] = []
    yield made
    for llm in made:
        llm._core.check_invariants()
        llm.peft_cache_manager.check_invariants()
        assert not llm.peft_cache_manager.active_tasks
        llm.close()


def adapter_bytes(directory: Path) -> int:
    """Bytes of the adapter's tensors."""
    return (directory / "adapter_model.safetensors").stat().st_size


def peft_answers(
    family: str, directory: Path | None, prompts: list[list[int]], num_tokens: int
) -> list[list[int]]:
    """What PEFT answers alone with the adapter, greedily."""
    model: Any = build_tiny_model(family)
    if directory is not None:
        model = peft.PeftModel.from_pretrained(model, directory).eval()
    return [greedy_tokens(model, prompt, num_tokens) for prompt in prompts]


def make_prompts(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [
        [generator.randrange(VOCAB_SIZE) for _ in range(generator.randrange(1, 30))]
        for _ in range(count)
    ]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    """The answers' tokens; none of the requests failed."""
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [output.outputs[0].token_ids for output in outputs]


def test_a_mixed_batch_in_room_for_two_answers_as_peft_does(
    family: str, adapters: dict[str, Path], engines: list[LLM]
) -> None:
    largest_two = sum(sorted(map(adapter_bytes, adapters.values()))[-2:])
    llm = LLM(
        build_tiny_model(family),
        peft_cache_config=PeftCacheConfig(
            device_cache_size=largest_two, host_cache_size=largest_two * 11 // 10
        ),
        kv_cache_config=KvCacheConfig(num_blocks=64, block_size=4),
        scheduler_config=SchedulerConfig(max_batch_size=6, max_num_tokens=16),
    )
    engines.append(llm)
    for name, path in adapters.items():
        llm.load_lora(name, path)
    names = [None, *adapters]
    prompts = make_prompts(28, seed=len(family))
    loras = [names[index % len(names)] for index in range(len(prompts))]
    answers = tokens_of(llm.generate(prompts, GREEDY, loras))
    expected: list[list[int]] = [[]] * len(prompts)
    for name in names:
        mine = [index for index, lora in enumerate(loras) if lora == name]
        directory = None if name is None else adapters[name]
        for index, answer in zip(
            mine, peft_answers(family, directory, [prompts[i] for i in mine], 8), strict=True
        ):
            expected[index] = answer
    assert answers == expected
    assert len(set(map(tuple, expected))) >= len(expected) - 2
    stats = llm.peft_cache_manager.stats
    assert stats.device.tasks_evicted >= 3
    assert stats.host.tasks_evicted >= 3
    assert stats.source_rereads >= 3


def test_the_answers_differ_by_adapter(
    family: str, adapters: dict[str, Path], engines: list[LLM]
) -> None:
    llm = LLM(build_tiny_model(family), peft_cache_config=PeftCacheConfig(device_cache_size="8MB"))
    engines.append(llm)
    prompts = make_prompts(6, seed=2)
    answers = []
    for name, path in [(None, None), *adapters.items()]:
        lora = None if name is None else LoRARequest(name, None, path)
        answers.append(tokens_of(llm.generate(prompts, GREEDY, lora)))
    assert len(set(map(str, answers))) == len(answers)
    assert all(len(set(itertools.chain(*answer))) >= 4 for answer in answers)


@pytest.fixture
def llm(llama_adapters: dict[str, Path], engines: list[LLM]) -> LLM:
    """A small llama with all adapters registered and room for them."""
    engine = LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size="4MB", host_cache_size="16MB"),
        kv_cache_config=KvCacheConfig(num_blocks=40, block_size=4),
        scheduler_config=SchedulerConfig(max_batch_size=4, max_num_tokens=16),
    )
    engines.append(engine)
    for name, path in llama_adapters.items():
        engine.load_lora(name, path)
    return engine


def test_one_prompt_gives_a_list_of_one(llm: LLM) -> None:
    (output,) = llm.generate([1, 2, 3], GREEDY, "r8")
    assert output.prompt_token_ids == [1, 2, 3]
    assert output.finished
    (completion,) = output.outputs
    assert len(completion.token_ids) == 8
    assert completion.text == ""
    assert completion.finish_reason == "length"
    assert llm.generate([]) == []


def test_sampled_answers_depend_on_the_seed_only(llm: LLM) -> None:
    prompts = make_prompts(8, seed=3)
    params = [
        SamplingParams(temperature=2.0, seed=i % 4, max_tokens=10, top_p=0.9) for i in range(8)
    ]
    loras = ["r3", None, "r8", "r64"] * 2
    together = tokens_of(llm.generate(prompts, params, loras))
    alone = [
        tokens_of(llm.generate(*triple))[0] for triple in zip(prompts, params, loras, strict=True)
    ]
    assert together == alone
    assert tokens_of(llm.generate(prompts, params, loras)) == together
    same = SamplingParams(temperature=2.0, max_tokens=10)
    assert len(set(map(tuple, tokens_of(llm.generate([[1, 2]] * 4, same))))) > 1


def test_stop_tokens_end_an_answer(llm: LLM) -> None:
    (whole,) = tokens_of(llm.generate([1, 2, 3], GREEDY, "r8"))
    stop = whole[4]
    params = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[stop])
    (output,) = llm.generate([1, 2, 3], params, "r8")
    assert output.outputs[0].token_ids == whole[: whole.index(stop) + 1]
    assert output.outputs[0].finish_reason == "stop"


def test_the_models_end_of_sequence_ends_an_answer_unless_ignored(
    llm: LLM, engines: list[LLM]
) -> None:
    (whole,) = tokens_of(llm.generate([1, 2, 3], GREEDY))
    model = build_tiny_model("llama")
    model.generation_config.eos_token_id = [whole[3]]
    with LLM(model) as ends:
        (output,) = ends.generate([1, 2, 3], GREEDY)
        ignoring = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (ignored,) = ends.generate([1, 2, 3], ignoring)
    assert output.outputs[0].token_ids == whole[: whole.index(whole[3]) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert ignored.outputs[0].token_ids == whole


def test_answers_end_at_the_models_full_length(engines: list[LLM]) -> None:
    with LLM(build_tiny_model("llama", max_position_embeddings=16)) as short:
        fits, too_long = short.generate([[1] * 12, [1] * 16], GREEDY)
    assert len(fits.outputs[0].token_ids) == 4
    assert fits.outputs[0].finish_reason == "length"
    assert isinstance(too_long.error, CapacityError)


@pytest.mark.parametrize(
    ("bad", "error", "words"),
    [
        (([1], GREEDY, "nobody"), AdapterNotFoundError, "nobody"),
        (([1], GREEDY, LoRARequest("new", 7, "/no/such")), AdapterNotFoundError, "/no/such"),
        (([], GREEDY, None), InvalidArgumentError, "empty"),
        (([VOCAB_SIZE], GREEDY, "r8"), InvalidArgumentError, f"token id {VOCAB_SIZE}"),
        (([-1], GREEDY, None), InvalidArgumentError, "token id -1"),
        (("text", GREEDY, None), InvalidArgumentError, "no tokenizer"),
        (([1] * 100, SamplingParams(max_tokens=100), "r8"), CapacityError, "200 tokens need 50"),
    ],
)
def test_a_bad_request_has_its_error_and_the_others_answer(
    llm: LLM, bad: tuple[Any, SamplingParams, Any], error: type[Exception], words: str
) -> None:
    prompt, params, lora = bad
    good = tokens_of(llm.generate([[1, 2, 3], [4, 5]], GREEDY, ["r3", None]))
    outputs = llm.generate(
        [[1, 2, 3], prompt, [4, 5]], [GREEDY, params, GREEDY], ["r3", lora, None]
    )
    assert tokens_of([outputs[0], outputs[2]]) == good
    assert outputs[1].outputs == []
    assert outputs[1].finished
    with pytest.raises(error, match=words):
        raise outputs[1].error


def _copy_adapter(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_file_truncated_after_registration_fails_its_requests_alone(
    llm: LLM, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    broken = _copy_adapter(llama_adapters["r12"], tmp_path / "broken")
    llm.load_lora("broken", broken)
    weights = broken / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-64])
    outputs = llm.generate([[1, 2], [1, 2], [3]], GREEDY, ["broken", "r12", "broken"])
    assert isinstance(outputs[0].error, PagedLoraError)
    assert isinstance(outputs[2].error, PagedLoraError)
    assert len(outputs[1].outputs[0].token_ids) == 8


def test_adapters_that_do_not_fit_are_refused_with_the_numbers(
    llm: LLM, llama_adapters: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(PagedLoraError, match=r"128.*max_lora_rank 64"):
        llm.load_lora("high", save_adapter(tmp_path / "high", "llama", 128, ["q_proj"]))
    truncated = _copy_adapter(llama_adapters["r12"], tmp_path / "cut")
    weights = truncated / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:200])
    with pytest.raises(AdapterFormatError):
        llm.load_lora("cut", truncated)
    with pytest.raises(AdapterNotFoundError):
        llm.load_lora("missing", tmp_path / "missing")
    (tmp_path / "no-file").mkdir()
    with pytest.raises(PagedLoraError):
        llm.load_lora("no-file", tmp_path / "no-file")
    assert {info.name for info in llm.list_loras()} == set(ADAPTERS)


def test_an_adapter_larger_than_the_device_tier_fails_alone(
    llama_adapters: dict[str, Path], engines: list[LLM]
) -> None:
    room = adapter_bytes(llama_adapters["r64"]) // 2
    llm = LLM(
        build_tiny_model("llama"),
        peft_cache_config=PeftCacheConfig(device_cache_size=room, host_cache_size="16MB"),
    )
    engines.append(llm)
    loras = [LoRARequest(name, None, llama_adapters[name]) for name in ("r64", "r3")]
    too_large, good = llm.generate([[1], [1]], GREEDY, loras)
    assert too_large.error is not None
    assert too_large.error.code == "adapter_too_large"
    assert len(good.outputs[0].token_ids) == 8


def test_numbers_and_names_must_agree(llm: LLM, llama_adapters: dict[str, Path]) -> None:
    first, second = llm.generate(
        [[1], [1]],
        GREEDY,
        [
            LoRARequest("r8", 1, llama_adapters["r8"]),
            LoRARequest("r3", 1, llama_adapters["r3"]),
        ],
    )
    assert first.error is None
    assert isinstance(second.error, InvalidArgumentError)
    (other_path,) = llm.generate([1], GREEDY, LoRARequest("r8", 2, llama_adapters["r3"]))
    assert isinstance(other_path.error, InvalidArgumentError)


@pytest.mark.parametrize(
    ("prompts", "params", "loras"),
    [
        ([[1], [2]], [GREEDY], None),
        ([[1], [2]], GREEDY, ["r8"]),
        ([[1]], GREEDY, [5]),
        (None, GREEDY, None),
    ],
)
def test_arguments_that_do_not_fit_raise_before_anything_runs(
    llm: LLM, prompts: Any, params: Any, loras: Any
) -> None:
    with pytest.raises(InvalidArgumentError):
        llm.generate(prompts, params, loras)


@pytest.mark.parametrize("exception", [RuntimeError("boom"), KeyboardInterrupt()])
def test_a_forward_that_raises_leaves_nothing_behind(llm: LLM, exception: BaseException) -> None:
    good = tokens_of(llm.generate([[1, 2, 3], [4]], GREEDY, ["r8", "r3"]))
    calls = 0

    def explode(module: nn.Module, args: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise exception

    handle = llm._loaded.model.register_forward_pre_hook(explode)
    with pytest.raises(type(exception)):
        llm.generate(make_prompts(6, seed=1), GREEDY, ["r8", "r3", None] * 2)
    handle.remove()
    assert not llm.peft_cache_manager.active_tasks
    assert tokens_of(llm.generate([[1, 2, 3], [4]], GREEDY, ["r8", "r3"])) == good


def test_a_nan_adapter_harms_only_itself(llm: LLM, tmp_path: Path) -> None:
    bad = save_adapter(tmp_path / "nan", "llama", 4, ["down_proj"])
    file = bad / "adapter_model.safetensors"
    save_file({name: tensor * float("nan") for name, tensor in load_file(file).items()}, file)
    good = tokens_of(llm.generate([[1, 2], [3]], GREEDY, ["r8", None]))
    outputs = llm.generate(
        [[1, 2], [1, 2], [3]], GREEDY, ["r8", LoRARequest("nan", None, bad), None]
    )
    assert tokens_of([outputs[0], outputs[2]]) == good
    assert "not finite" in str(outputs[1].error)


def test_a_live_module_is_given_back_unchanged() -> None:
    model = build_tiny_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    implementation = model.config._attn_implementation
    with LLM(model) as engine:
        tokens_of(engine.generate([1, 2, 3], GREEDY))
    engine.close()
    assert model.training
    assert model.config._attn_implementation == implementation
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(InvalidArgumentError, match="closed"):
        engine.generate([1], GREEDY)


def test_a_model_from_a_directory_with_its_dtype(tmp_path: Path) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path)
    with LLM(tmp_path) as from_path, LLM(build_tiny_model("llama")) as live:
        assert tokens_of(from_path.generate([1, 2], GREEDY)) == tokens_of(
            live.generate([1, 2], GREEDY)
        )
    with LLM(str(tmp_path), dtype="bfloat16") as engine:
        assert engine._loaded.dtype == torch.bfloat16
        tokens_of(engine.generate([1, 2], GREEDY))


def test_texts_go_in_and_out_with_a_tokenizer() -> None:
    class Tokenizer:
        eos_token_id = None

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [ord(c) - ord("a") for c in text]}

        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return "".join(chr(ord("a") + token) for token in token_ids)

    with LLM(build_tiny_model("llama"), Tokenizer()) as engine:
        (output,) = engine.generate("cab", GREEDY)
        tokens = output.outputs[0].token_ids
        assert output.prompt_token_ids == [2, 0, 1]
        assert output.outputs[0].text == "".join(chr(ord("a") + token) for token in tokens)
        stop = SamplingParams(temperature=0, max_tokens=8, stop_token_ids=[tokens[3]])
        (stopped,) = engine.generate("cab", stop)
        cut = tokens.index(tokens[3])
        assert stopped.outputs[0].text == output.outputs[0].text[:cut]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"device": "cuda"}, "cuda"),
        ({"dtype": "int8"}, "int8"),
        ({"dtype": "bfloat16"}, "convert it yourself"),
        (
            {
                "lora_config": LoraConfig(max_lora_rank=8),
                "peft_cache_config": PeftCacheConfig(max_lora_rank=16),
            },
            r"8.*16",
        ),
    ],
)
def test_bad_construction_is_refused_and_the_module_left_alone(
    arguments: dict[str, Any], words: str
) -> None:
    model = build_tiny_model("llama")
    implementation = model.config._attn_implementation
    with pytest.raises(InvalidArgumentError, match=words):
        LLM(model, **arguments)
    assert model.config._attn_implementation == implementation


def test_a_path_that_does_not_exist_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="/no/such/model"):
        LLM("/no/such/model")


@pytest.mark.parametrize("refused", ["bloom", "mamba", "qwen3_next", "phi3_longrope"])
def test_models_that_would_answer_wrongly_are_refused(refused: str) -> None:
    with pytest.raises(UnsupportedModelError):
        LLM(build_tiny_model(refused))


def test_max_loras_is_room_for_so_many_of_the_largest(
    llama_adapters: dict[str, Path], engines: list[LLM]
) -> None:
    llm = LLM(build_tiny_model("llama"), lora_config=LoraConfig(max_loras=2, max_cpu_loras=3))
    engines.append(llm)
    info = llm.load_lora("r64", llama_adapters["r64"])
    cache = llm.peft_cache_manager
    pages = cache.determine_num_pages(LlmRequest(10**6, lora_task_id=info.task_id))
    assert cache.max_device_pages == 2 * pages
    assert cache.max_host_pages == 3 * pages


def test_nothing_keeps_a_closed_engine_alive() -> None:
    engine = LLM(build_tiny_model("llama"))
    engine.close()
    model = engine._loaded.model
    del engine
    gc.collect()
    assert not any(module._forward_hooks for module in model.modules())
