"""Errors of the library in the words of the command line."""

from __future__ import annotations

from pydantic import ValidationError

from pagedlora.errors import PagedLoraError, PagedLoraWarning

_OPTIONS = {
    "max_lora_rank": "--max-lora-rank",
    "allow_pickle": "--allow-pickle",
    "strict=False": "--no-strict",
    "LoRA target modules": "--target",
    "match no linear module": "--target",
    "load_lora()": "--adapter NAME=DIRECTORY of generate",
    "a tier of": "--host-cache-size, --device-cache-size",
    "host_cache_size": "--host-cache-size",
    "device_cache_size": "--device-cache-size",
}
"""What messages name, and the option that it is here. Not all commands have all of them: those
that lack one do not meet its errors."""


def said(error: BaseException) -> str:
    """The message, and the options that it means by the names of parameters."""
    message = str(error)
    options = [option for name, option in _OPTIONS.items() if name in message]
    return f"{message} (here: {', '.join(options)})" if options else message


def lines_of(error: PagedLoraError | PagedLoraWarning | ValidationError) -> list[str]:
    """What is wrong; a line for each option where their values are impossible."""
    if not isinstance(error, ValidationError):
        return [said(error)]
    lines = []
    for problem in error.errors():
        reason = problem.get("ctx", {}).get("error", problem["msg"])  # ours, without a prefix
        where = "".join(f"--{str(part).replace('_', '-')}: " for part in problem["loc"][:1])
        lines.append(f"{where}{reason}")
    return lines
