"""Models on disk, as users have them."""

from __future__ import annotations

from pathlib import Path

from tests.support.tiny_models import build_tiny_model
from transformers import PreTrainedModel


def save_model_with_tokenizer(directory: Path) -> PreTrainedModel:
    """Saves a tiny random Llama with a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    model = build_tiny_model("llama", vocab_size=len(alphabet))
    model.save_pretrained(directory)
    return model
