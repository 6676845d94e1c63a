"""Does the paged path compute what the model's own eager attention computes?

Checked on a small random instance of the same class (see `pagedlora.engine.shrink`), in float32:
two prompts, longer than the window, cut into chunks and staggered in shared rows, against each
prompt alone without a cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from pagedlora.engine.float32_products import full_float32
from pagedlora.engine.paged_model import PagedModel
from pagedlora.engine.probe import probe
from pagedlora.engine.shrink import shrunk_config
from pagedlora.engine.step import ScheduledSequence, StepBatch
from pagedlora.errors import PagedLoraError, UnsupportedModelError

TOLERANCE = 1e-4  # of the standard deviation of the eager logits

_MAX_PARAMETERS = 100_000_000
_BLOCK_SIZE = 4
_PROMPT_LENGTHS = (23, 17)
# Per step and prompt, how many of its tokens are computed: prefills that begin apart, a chunk
# beside a decode, decodes side by side, one prompt after the other has ended.
_SCHEDULE = ((5, 0), (7, 6), (1, 9), (8, 1), (1, 1), (1, 0))


@dataclass(frozen=True, slots=True)
class _Prompt:
    token_ids: list[int]
    block_table: list[int]


def _draw_weights(model: nn.Module, generator: torch.Generator) -> None:
    """Random weights of unit gain, so that attention is far from uniform.

    transformers' own initialisers draw so small that wrong attention would hardly be seen.
    """
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator)
                if parameter.dim() < 2:  # noqa: PLR2004 - biases, norms and sinks
                    parameter.add_(0.2 * noise)
                elif isinstance(module, nn.Embedding):
                    parameter.copy_(noise)
                else:
                    fan_in = (
                        module.in_features
                        if isinstance(module, nn.Linear)
                        else min(parameter.shape[-2:])
                    )
                    parameter.copy_(noise / math.sqrt(fan_in))


def _small_instance(model: PreTrainedModel) -> PreTrainedModel:
    """A random model of the same class.

    Raises:
        UnsupportedModelError: It would not be small.
    """
    model_class = type(model)
    config = shrunk_config(model.config)
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class(config).parameters())
    if num_parameters > _MAX_PARAMETERS:
        raise UnsupportedModelError(
            f"{model_class.__name__} cannot be checked: a small instance of it would still have "
            f"{num_parameters} parameters, and at most {_MAX_PARAMETERS} are allowed"
        )
    with torch.random.fork_rng(devices=[]):
        small: PreTrainedModel = model_class(config).float().eval()
    generator = torch.Generator().manual_seed(0)
    _draw_weights(small, generator)
    return small.to(next(model.parameters()).device)


def _draw_prompts(vocab_size: int) -> list[_Prompt]:
    """Prompts with interleaved blocks, so that a wrong block table is seen."""
    generator = torch.Generator().manual_seed(1)
    prompts = []
    for index, length in enumerate(_PROMPT_LENGTHS):
        tokens = torch.randint(vocab_size, (length,), generator=generator).tolist()
        num_blocks = -(-length // _BLOCK_SIZE)
        prompts.append(_Prompt(tokens, [2 * block + index for block in range(num_blocks)]))
    return prompts


def _eager_logits(model: PreTrainedModel, prompts: list[_Prompt]) -> list[torch.Tensor]:
    """Per prompt `[tokens, vocab]`, computed alone, eagerly and without a cache."""
    model.set_attn_implementation("eager")
    device = next(model.parameters()).device
    with torch.inference_mode():
        return [
            model(input_ids=torch.tensor([prompt.token_ids]).to(device), use_cache=False)
            .logits[0]
            .float()
            .cpu()
            for prompt in prompts
        ]


def _paged_logits(
    model: PreTrainedModel, prompts: list[_Prompt]
) -> list[tuple[int, int, torch.Tensor]]:
    """Runs the schedule.

    Returns:
        Per chunk: which prompt, the position of its last token, and that token's logits `[vocab]`.
    """
    num_blocks = 2 * max(len(prompt.block_table) for prompt in prompts)
    paged = PagedModel(model, probe(model), num_blocks=num_blocks, block_size=_BLOCK_SIZE)
    results = []
    done = [0] * len(prompts)
    try:
        for counts in _SCHEDULE:
            chunks = [(index, count) for index, count in enumerate(counts) if count]
            step = StepBatch(
                [
                    ScheduledSequence(
                        request_id=index,
                        token_ids=prompts[index].token_ids[done[index] : done[index] + count],
                        past_tokens=done[index],
                        block_table=prompts[index].block_table,
                        uses_adapter=False,
                        sample=True,
                    )
                    for index, count in chunks
                ]
            )
            logits = paged.forward(step)
            for row, (index, count) in enumerate(chunks):
                done[index] += count
                results.append((index, done[index] - 1, logits[row]))
    finally:
        paged.close()
    return results


def self_check(model: PreTrainedModel) -> None:
    """Compares the paged path with eager attention on a small instance of the model's class.

    Args:
        model: Only its class, its configuration and its device are used.

    Raises:
        UnsupportedModelError: The logits differ by more than `TOLERANCE`, or the small instance
            could not be built or run.
    """
    name = type(model).__name__
    try:
        small = _small_instance(model)
        prompts = _draw_prompts(small.config.vocab_size)
        with full_float32():
            expected = _eager_logits(small, prompts)
            results = _paged_logits(small, prompts)
    except PagedLoraError:
        raise
    except Exception as error:  # any failure of foreign model code means the same here
        raise UnsupportedModelError(
            f"{name} cannot be checked: a small instance of it fails with "
            f"{type(error).__name__}: {error}"
        ) from error
    scale = torch.cat(expected).std().item()
    worst = max(
        (logits - expected[index][position]).abs().max().item()
        for index, position, logits in results
    )
    # Written so that NaN fails.
    if not worst <= TOLERANCE * scale:
        raise UnsupportedModelError(
            f"{name} gives other answers when several requests share a row: logits of a small "
            f"instance differ from eager attention by {worst:.3g}, their standard deviation is "
            f"{scale:.3g}"
        )
