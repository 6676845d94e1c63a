"""`LLM` judged by PEFT: the right adapter's answer, whatever the room."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tests.support import llm_fixtures
from tests.support.llm_fixtures import (
    FAMILIES,
    GREEDY,
    SMALL_CACHE,
    adapter_bytes,
    make_prompts,
    peft_answers,
    save_all_adapters,
    tokens_of,
)
from tests.support.tiny_models import build_tiny_model

from pagedlora.config import KvCacheConfig, PeftCacheConfig, SchedulerConfig
from pagedlora.engine.llm import LLM
from pagedlora.errors import (
    CapacityError,
)
from pagedlora.requests import LoRARequest
from pagedlora.sampling_params import SamplingParams

pytestmark = pytest.mark.filterwarnings(
    # transformers warns when PEFT 0.21 asks a model whether it checkpoints gradients.
    "ignore:.*is_gradient_checkpointing:FutureWarning"
)
llama_adapters = llm_fixtures.llama_adapters
engines = llm_fixtures.engines
llm = llm_fixtures.llm


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    """One of the families that must work."""
    return str(request.param)


@pytest.fixture(scope="module")
def adapters(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Directories of `ADAPTERS` for the family."""
    return save_all_adapters(tmp_path_factory.mktemp(family), family)


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
    again = llm.generate(prompts[::-1], GREEDY, loras[::-1])
    assert tokens_of(again) == expected[::-1]
    stats = llm.peft_cache_manager.stats
    assert stats.device.tasks_evicted >= 3
    assert stats.host.tasks_evicted >= 3
    assert stats.source_rereads >= 3


def test_the_answers_differ_by_adapter(
    family: str, adapters: dict[str, Path], engines: list[LLM]
) -> None:
    llm = LLM(
        build_tiny_model(family),
        peft_cache_config=PeftCacheConfig(host_cache_size="16MB", device_cache_size="8MB"),
    )
    engines.append(llm)
    prompts = make_prompts(6, seed=2)
    answers = []
    for name, path in [(None, None), *adapters.items()]:
        lora = None if name is None else LoRARequest(name, None, path)
        answers.append(tokens_of(llm.generate(prompts, GREEDY, lora)))
    assert len(set(map(str, answers))) == len(answers)
    assert all(len(set(itertools.chain(*answer))) >= 4 for answer in answers)


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
    with LLM(model, peft_cache_config=SMALL_CACHE) as ends:
        (output,) = ends.generate([1, 2, 3], GREEDY)
        ignoring = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        (ignored,) = ends.generate([1, 2, 3], ignoring)
    assert output.outputs[0].token_ids == whole[: whole.index(whole[3]) + 1]
    assert output.outputs[0].finish_reason == "stop"
    assert ignored.outputs[0].token_ids == whole


def test_answers_end_at_the_models_full_length(engines: list[LLM]) -> None:
    with LLM(
        build_tiny_model("llama", max_position_embeddings=16), peft_cache_config=SMALL_CACHE
    ) as short:
        fits, too_long = short.generate([[1] * 12, [1] * 16], GREEDY)
    assert len(fits.outputs[0].token_ids) == 4
    assert fits.outputs[0].finish_reason == "length"
    assert isinstance(too_long.error, CapacityError)
