"""Tiny random encoders and classifiers, and adapters that PEFT makes for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import torch
from tests.support.peft_oracle import quiet_peft
from tests.support.peft_saving import save_with_peft
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

VOCAB_SIZE = 64
NUM_LABELS = 3
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}
_DISTILBERT_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "dim": 32,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "initializer_range": 0.5,
}


def build_classifier(seed: int = 0) -> Any:
    """A BERT with a pooler and a classifier head, in float32."""
    config = AutoConfig.for_model("bert", num_labels=NUM_LABELS, **_SIZES)
    return _build(AutoModelForSequenceClassification, config, seed)


def build_encoder(seed: int = 0) -> Any:
    """A DistilBERT, as embedding models use it, in float32."""
    return _build(AutoModel, AutoConfig.for_model("distilbert", **_DISTILBERT_SIZES), seed)


def _build(factory: Any, config: Any, seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory.from_config(config).eval()


@dataclass(frozen=True)
class EncoderAdapter:
    """How to make an adapter: its rank and its target modules."""

    rank: int
    targets: tuple[str, ...]
    use_rslora: bool = False


CLASSIFIER_ADAPTERS = {
    "topics": EncoderAdapter(4, ("query", "value")),
    "spam": EncoderAdapter(8, ("query", "key", "value", "dense", "classifier")),
    "tone": EncoderAdapter(3, ("classifier", "pooler.dense"), use_rslora=True),
    "lang": EncoderAdapter(16, ("query", "key", "value", "dense")),
    "urgency": EncoderAdapter(12, ("dense", "classifier")),
    "intent": EncoderAdapter(8, ("query", "key", "value", "classifier"), use_rslora=True),
}
ENCODER_ADAPTERS = {
    "queries": EncoderAdapter(4, ("q_lin", "v_lin")),
    "passages": EncoderAdapter(16, ("q_lin", "k_lin", "v_lin", "out_lin", "lin1", "lin2")),
    "code": EncoderAdapter(8, ("lin1", "lin2"), use_rslora=True),
    "legal": EncoderAdapter(12, ("q_lin", "out_lin", "lin2")),
}


def save_encoder_adapters(
    root: Path, model: nn.Module, adapters: Mapping[str, EncoderAdapter]
) -> dict[str, Path]:
    """Lets PEFT make and save adapters with random A and B; name to directory."""
    generator = torch.Generator().manual_seed(1)
    for name, spec in adapters.items():
        config = peft.LoraConfig(
            r=spec.rank,
            lora_alpha=2 * spec.rank,
            target_modules=list(spec.targets),
            use_rslora=spec.use_rslora,
        )
        with quiet_peft(), torch.no_grad():
            wrapped = peft.get_peft_model(model, config)
            for parameter_name, parameter in wrapped.named_parameters():
                if "lora_" in parameter_name:
                    drawn = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(drawn * (0.5 / spec.rank) ** 0.5)
            save_with_peft(wrapped, root / name)
            wrapped.unload()
    return {name: root / name for name in adapters}


class EncoderOracle:
    """What PEFT answers, one adapter at a time, for the whole batch."""

    def __init__(self, model: nn.Module, directories: Mapping[str, Path]) -> None:
        """Takes the model; it is PEFT's from then on."""
        self._model: Any = None
        with quiet_peft():
            for name, path in directories.items():
                if self._model is None:
                    self._model = peft.PeftModel.from_pretrained(model, path, adapter_name=name)
                else:
                    self._model.load_adapter(path, adapter_name=name)
        self._model.eval()

    def __call__(self, names: Sequence[str | None], **inputs: Any) -> torch.Tensor:
        """Row i as PEFT answers it with adapter i."""
        answers: dict[str | None, torch.Tensor] = {}
        for name in set(names):
            answers[name] = answer_of(self._run(name, inputs))
        return torch.stack([answers[name][row] for row, name in enumerate(names)])

    def _run(self, name: str | None, inputs: Any) -> Any:
        with torch.inference_mode(), quiet_peft():
            if name is None:
                with self._model.disable_adapter():
                    return self._model(**inputs)
            self._model.set_adapter(name, inference_mode=True)
            return self._model(**inputs)


def answer_of(output: Any) -> torch.Tensor:
    """Logits of a classifier; of an encoder the last hidden states; a tensor as it is."""
    if isinstance(output, torch.Tensor):
        return output
    logits: torch.Tensor | None = getattr(output, "logits", None)
    return output.last_hidden_state if logits is None else logits


def make_batch(num_rows: int, num_tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Token ids and a mask; rows have different lengths."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB_SIZE, (num_rows, num_tokens), generator=generator)
    lengths = torch.randint(1, num_tokens + 1, (num_rows,), generator=generator)
    mask = (torch.arange(num_tokens) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask}
