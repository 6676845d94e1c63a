"""Any JSON in any field of a configuration: a typed error, or answers that equal PEFT's."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from tests.support.adapters import CONFIG_FILE
from tests.support.fuzzing import fuzz_examples, fuzz_seed
from tests.support.peft_corpus import Entry, save_entry
from tests.support.row_kinds import silent_peft
from tests.support.tiny_models import build_tiny_model

from pagedlora import (
    LoraManager,
    LoraModelConfig,
    PagedLoraError,
    PeftCacheConfig,
    PeftCacheManager,
)
from pagedlora.loaders.peft_fields import PEFT_FIELDS

pytestmark = pytest.mark.slow

FIELDS = [name for name in PEFT_FIELDS if "." not in name]
PROMPT = torch.tensor([[3, 1, 4, 15, 9, 26, 5, 35]])
ENTRY = Entry({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]})

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 9)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(
        ["q_proj", ".*_proj", "^", "(", "layers", "LORA", "none", "gaussian", "pissa"]
    )
)
ANY_JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=6,
)
KEYS = st.sampled_from(
    ["q_proj", "v_proj", "^model.layers.0.self_attn.q_proj", ".*1.*", "0.self_attn.(q|v)_proj"]
)
TARGETS = st.sampled_from(
    [
        ["v_proj", "q_proj", "o_proj"],
        "all-linear",
        r".*\.self_attn\..*",
        r".*\.(q|v)_proj",
        ["self_attn.q_proj", "v_proj"],
        ["q_proj"],
    ]
)
LIKELY: dict[str, st.SearchStrategy[Any]] = {
    "r": st.just(4),
    "lora_alpha": st.integers(-9, 40) | st.floats(-50, 50),
    "use_rslora": st.booleans(),
    "rank_pattern": st.dictionaries(KEYS, st.just(4), max_size=3),
    "alpha_pattern": st.dictionaries(KEYS, st.integers(1, 40) | st.floats(0, 9), max_size=3),
    "target_modules": TARGETS,
    "exclude_modules": st.sampled_from([["o_proj"], "mlp", [], "q_proj", ["q_proj"]]),
    "layers_to_transform": st.sampled_from([0, 1, [0, 1], [], [0], [0, 1, 7]]),
    "layers_pattern": st.sampled_from(["layers", ["layers"], "h", [], "", "(layers|h)"]),
    "init_lora_weights": st.sampled_from(
        [True, False, "gaussian", "orthogonal", "eva", "mica", "pissa"]
    ),
    "bias": st.just("none"),
    "lora_dropout": st.floats(0, 0.9),
    "fan_in_fan_out": st.booleans(),
}


@st.composite
def changes(draw: st.DrawFn) -> dict[str, Any]:
    """Some fields, with values that PEFT could have written or with any JSON."""
    names = draw(st.lists(st.sampled_from(FIELDS) | st.sampled_from(sorted(LIKELY)), max_size=4))
    changed = {}
    for name in names:
        likely = LIKELY.get(name)
        is_likely = likely is not None and draw(st.integers(0, 3)) > 0
        changed[name] = draw(likely if is_likely and likely is not None else ANY_JSON)
    if draw(st.integers(0, 9)) == 0:
        changed[draw(st.text(max_size=8))] = draw(ANY_JSON)
    return changed


class Exam:
    """Our loader and PEFT with the same adapter, whose configuration is changed again and again."""

    def __init__(self, root: Path) -> None:
        self.path = save_entry(root / "adapter", "llama", ENTRY, seed=1)
        self._fields = json.loads((self.path / CONFIG_FILE).read_text())
        self._base = build_tiny_model("llama")
        config = LoraModelConfig.from_module(self._base)
        self.cache = PeftCacheManager(
            config, PeftCacheConfig(host_cache_size=2**20, device_cache_size=2**20)
        )
        self.manager = LoraManager(config, self.cache)
        self.loaded = self.judged = 0

    def take(self, changed: dict[str, Any]) -> None:
        """Fails if we load the adapter and PEFT, if it loads it, computes other logits."""
        (self.path / CONFIG_FILE).write_text(json.dumps({**self._fields, **changed}))
        try:
            ours = self._our_logits()
        except PagedLoraError as error:
            assert len(str(error)) < 2000  # noqa: PT017
            assert len(self.manager) == 0
            return
        self.loaded += 1
        theirs = self._peft_logits()
        if theirs is not None:
            self.judged += 1
            gap = float((ours - theirs).abs().max() / theirs.std())
            assert gap < 1e-4, f"{changed}: logits differ by {gap:.2g} of their deviation"

    def _our_logits(self) -> torch.Tensor:
        """Of the base model with scale * B A added to its weights."""
        info = self.manager.load("a", self.path)
        try:
            weights = self.cache.task_weights(info.task_id, "host")
        finally:
            self.manager.unload("a")
        model = build_tiny_model("llama")
        with torch.inference_mode():
            for name, (a, b) in weights.items():
                model.get_submodule(name).weight += info.scales[name] * b @ a
            return model(input_ids=PROMPT).logits

    def _peft_logits(self) -> torch.Tensor | None:
        with silent_peft(), torch.random.fork_rng(devices=[]):
            try:
                model = peft.PeftModel.from_pretrained(build_tiny_model("llama"), self.path).eval()
            except Exception:  # what PEFT does not load it does not judge
                return None
            with torch.inference_mode():
                return model(input_ids=PROMPT).logits


@pytest.fixture(scope="module")
def exam(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exam]:
    root = tmp_path_factory.mktemp("fuzz")
    made = Exam(root)
    yield made
    made.cache.check_invariants()
    made.cache.close()
    shutil.rmtree(root)


def test_any_configuration_is_a_typed_error_or_answers_as_peft_does(exam: Exam) -> None:
    number = fuzz_examples(200)

    @seed(fuzz_seed())
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(changes())
    def run(changed: dict[str, Any]) -> None:
        exam.take(changed)

    exam.loaded = exam.judged = 0
    run()
    print(f"of {number} configurations {exam.loaded} loaded, and PEFT judged {exam.judged}")
    # The fuzzer meets both outcomes, and PEFT has judged most of what loaded.
    assert 0.15 * number <= exam.judged <= exam.loaded <= 0.9 * number


INITIALISATIONS = (
    *(True, False, None, "gaussian", "Gaussian", "orthogonal", "eva", "mica", "olora", "OLoRA"),
    *("pissa", "pissa_niter_4", "pissa_x", "corda", "loftq", "lora_ga", "kaiming", ""),
)


@pytest.mark.parametrize("name", INITIALISATIONS, ids=repr)
def test_every_initialisation_is_refused_or_leaves_the_base_model_alone(
    exam: Exam, name: Any
) -> None:
    exam.take({"init_lora_weights": name})


VALUES = (None, True, False, 0, 1, -1, 8.0, 1e400, "", "8", "x" * 3000, [], [[]], {}, {"": 0})


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_takes_values_of_every_type(exam: Exam, name: str) -> None:
    for value in VALUES:
        exam.take({name: value})
