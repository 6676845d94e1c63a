"""What PEFT saves, without what nothing here reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import peft


def save_with_peft(model: peft.PeftModel, directory: Path, **options: Any) -> None:
    """`model.save_pretrained(directory)` but for its README, which takes most of the time."""
    with mock.patch.object(type(model), "create_or_update_model_card"):
        model.save_pretrained(directory, **options)
