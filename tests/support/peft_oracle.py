"""PEFT as the judge: it makes the adapters, and says what the right answers are.

An engine is right if PEFT, alone on the same model with that one adapter, gives the same tokens
greedily, would have chosen each of our tokens itself (teacher-forced), and computes our logits.
A judge that cannot say no proves nothing: see `assert_answers_differ`.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from tests.support.peft_saving import save_with_peft
from tests.support.tiny_models import build_tiny_model

TOLERANCE = 1e-4
"""Of a logit below the largest one, and of logits in standard deviations of their row."""
MIN_DISTINCT_TOKENS = 4
MAX_BFLOAT16_RATIO = 1.1
"""Of our error in bfloat16 to PEFT's."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_STRENGTH = 0.7
"""Size of an adapter's output beside its module's input."""


@dataclass(frozen=True)
class AdapterSpec:
    """How to make an adapter.

    Attributes:
        rank: Of all its modules.
        targets: Module names, or "all-linear".
        use_rslora: Whether it is scaled by alpha / sqrt(rank).
    """

    rank: int
    targets: tuple[str, ...] | str
    use_rslora: bool = False


ADAPTERS = {
    "r1": AdapterSpec(1, "all-linear"),
    "r3": AdapterSpec(3, ("gate_proj", "up_proj", "down_proj"), use_rslora=True),
    "r12": AdapterSpec(12, "all-linear", use_rslora=True),
    "r33": AdapterSpec(33, _ATTENTION),
    "r64": AdapterSpec(64, ("q_proj", "v_proj")),
    "r48": AdapterSpec(48, ("down_proj",), use_rslora=True),
}
"""Such that the two largest are a little more than half of all bytes."""


@dataclass(frozen=True)
class Case:
    """One request: an adapter's name (None: the base model) and a prompt."""

    adapter: str | None
    prompt: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What an engine answered.

    Attributes:
        tokens: The answer.
        logits: `[len(tokens), vocabulary]` float32, from which each token was chosen.
    """

    tokens: list[int]
    logits: torch.Tensor


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Ignores the one warning that PEFT 0.21 cannot avoid with transformers 5, also under -W."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=".*`is_gradient_checkpointing`", category=FutureWarning
        )
        yield


def save_adapter(directory: Path, family: str, spec: AdapterSpec, *, seed: int) -> Path:
    """Makes an adapter of the family's tiny model with random A and B, and saves it with PEFT.

    Returns:
        The directory.
    """
    config = peft.LoraConfig(
        r=spec.rank,
        lora_alpha=2 * spec.rank if not spec.use_rslora else 6,
        target_modules=spec.targets if isinstance(spec.targets, str) else list(spec.targets),
        use_rslora=spec.use_rslora,
        task_type="CAUSAL_LM",
    )
    generator = torch.Generator().manual_seed(seed)
    with quiet_peft(), torch.random.fork_rng(devices=[]), torch.no_grad():
        model = peft.get_peft_model(build_tiny_model(family), config)
        for module in model.modules():
            if isinstance(module, peft.tuners.lora.LoraLayer):
                _randomise(module, spec.rank, generator)
        save_with_peft(model, directory)
    return directory


def _randomise(layer: Any, rank: int, generator: torch.Generator) -> None:
    """Draws A and B so that scale * B A x is `_STRENGTH` as large as x, whatever the rank."""
    scale = layer.scaling["default"]
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    a.copy_(torch.randn(a.shape, generator=generator) / a.shape[1] ** 0.5)
    b.copy_(torch.randn(b.shape, generator=generator) * _STRENGTH / (scale * rank**0.5))


def save_adapters(
    root: Path, family: str, specs: Mapping[str, AdapterSpec] = ADAPTERS
) -> dict[str, Path]:
    """Saves a family's adapters, by default `ADAPTERS`; name to directory."""
    return {
        name: save_adapter(root / name, family, spec, seed=seed)
        for seed, (name, spec) in enumerate(specs.items())
    }


class PeftOracle:
    """A family's tiny model and its adapters in PEFT, one active at a time, eager attention.

    Remembers greedy answers, so that many tests can ask for the same ones.
    """

    def __init__(
        self,
        family: str,
        adapters: Mapping[str, Path],
        *,
        dtype: torch.dtype = torch.float32,
        rounded_to: torch.dtype = torch.float32,
    ) -> None:
        """Loads what was saved.

        Args:
            family: Of the tiny model.
            adapters: Name to directory.
            dtype: In which it computes.
            rounded_to: The base model's weights are rounded to this type first.
        """
        self.family = family
        self._base = build_tiny_model(family, dtype=rounded_to).to(dtype)
        self._base.set_attn_implementation("eager")
        wrapped = build_tiny_model(family, dtype=rounded_to).to(dtype)
        wrapped.set_attn_implementation("eager")
        self._model = _load_all(wrapped, adapters)
        self._greedy: dict[tuple[Case, int], list[int]] = {}

    def greedy(self, case: Case, num_tokens: int) -> list[int]:
        """What PEFT's `generate` answers, alone with the adapter."""
        known = self._greedy.get((case, num_tokens))
        if known is None:
            row = torch.tensor([case.prompt])
            with torch.inference_mode():
                output = self._activate(case).generate(
                    input_ids=row,
                    attention_mask=torch.ones_like(row),
                    max_new_tokens=num_tokens,
                    do_sample=False,
                )
            known = self._greedy[case, num_tokens] = output[0, len(case.prompt) :].tolist()
        return list(known)

    def logits(self, case: Case, tokens: Sequence[int]) -> torch.Tensor:
        """float32 logits `[len(tokens), vocabulary]` before each of the tokens, all given."""
        row = torch.tensor([[*case.prompt, *tokens]])
        with torch.inference_mode():
            logits = self._activate(case)(input_ids=row, use_cache=False).logits
        return logits[0, len(case.prompt) - 1 : -1].float()

    def _activate(self, case: Case) -> Any:
        if case.adapter is None:
            return self._base
        if self._model.active_adapters != [case.adapter]:
            with quiet_peft():
                self._model.set_adapter(case.adapter, inference_mode=True)
        return self._model


def _load_all(base: Any, adapters: Mapping[str, Path]) -> Any:
    """The base in PEFT's model with all adapters; raises if PEFT ignores a tensor."""
    model: Any = None
    with quiet_peft():
        for name, path in adapters.items():
            if model is None:
                model = peft.PeftModel.from_pretrained(base, path, adapter_name=name)
            else:
                model.load_adapter(path, adapter_name=name)
    return model.eval()


def assert_equal_to_peft(
    oracle: PeftOracle, cases: Sequence[Case], answers: Sequence[Answer]
) -> None:
    """Fails unless every answer is the one that PEFT gives.

    Args:
        oracle: Computes in float32.
        cases: What was asked.
        answers: What was answered greedily, in the same order.
    """
    for case, answer in _by_adapter(cases, answers):
        assert len(answer.tokens) == len(answer.logits) > 0, f"{case}: no or too few logits"
        expected = oracle.greedy(case, len(answer.tokens))
        assert answer.tokens == expected, f"{case}: PEFT's tokens differ"
        _assert_follows(oracle, case, answer)


def assert_follow_peft(
    oracle: PeftOracle, cases: Sequence[Case], answers: Sequence[Answer]
) -> None:
    """Fails unless PEFT, fed our own tokens, agrees with each of them and with our logits."""
    for case, answer in _by_adapter(cases, answers):
        _assert_follows(oracle, case, answer)


def _by_adapter(cases: Sequence[Case], answers: Sequence[Answer]) -> list[tuple[Case, Answer]]:
    """Cases of one adapter in a row: PEFT takes as long to change it as to answer."""
    return sorted(zip(cases, answers, strict=True), key=lambda pair: pair[0].adapter or "")


def _assert_follows(oracle: PeftOracle, case: Case, answer: Answer) -> None:
    theirs = oracle.logits(case, answer.tokens)
    chosen = theirs.gather(1, torch.tensor(answer.tokens).unsqueeze(1)).squeeze(1)
    gap = float((theirs.amax(dim=1) - chosen).max())
    assert gap <= TOLERANCE, f"{case}: PEFT's logit of our token is {gap:.2g} below its largest"
    deviation = float(((answer.logits - theirs).abs().amax(dim=1) / theirs.std(dim=1)).max())
    assert deviation <= TOLERANCE, f"{case}: logits differ by {deviation:.2g} of their deviation"


def assert_answers_differ(cases: Sequence[Case], answers: Sequence[Answer]) -> None:
    """Fails if a mix-up of adapters, or a model that repeats itself, could go unseen."""
    by_prompt: dict[tuple[int, ...], list[tuple[str | None, list[int]]]] = {}
    for case, answer in zip(cases, answers, strict=True):
        by_prompt.setdefault(case.prompt, []).append((case.adapter, answer.tokens))
        distinct = len(set(answer.tokens))
        assert distinct >= MIN_DISTINCT_TOKENS, f"{case}: only {distinct} different tokens"
    for prompt, given in by_prompt.items():
        for (one, left), (other, right) in itertools.combinations(given, 2):
            assert left != right or one == other, f"{one} and {other} answer {prompt} alike"


def assert_rounding_like_peft(
    family: str, adapters: Mapping[str, Path], cases: Sequence[Case], answers: Sequence[Answer]
) -> None:
    """Fails if bfloat16 takes our logits further from the right ones than PEFT's, in the median.

    Args:
        family: Of the model, which computed the answers in bfloat16.
        adapters: Name to directory.
        cases: What was asked.
        answers: What was answered, in the same order.
    """
    exact = PeftOracle(family, adapters, rounded_to=torch.bfloat16)
    peft = PeftOracle(family, adapters, dtype=torch.bfloat16, rounded_to=torch.bfloat16)
    ours: list[torch.Tensor] = []
    theirs: list[torch.Tensor] = []
    for case, answer in zip(cases, answers, strict=True):
        right = exact.logits(case, answer.tokens)
        ours.append(_relative_error(answer.logits, right))
        theirs.append(_relative_error(peft.logits(case, answer.tokens), right))
    our_error, their_error = (float(torch.cat(errors).median()) for errors in (ours, theirs))
    assert 0 < their_error < 0.2
    assert our_error <= MAX_BFLOAT16_RATIO * their_error


def _relative_error(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Root mean square of the error of each row, in standard deviations of the right row."""
    return (logits - right).square().mean(dim=1).sqrt() / right.std(dim=1)
