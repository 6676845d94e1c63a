"""Engines for the equality suites: their requests, their room, and the logits they compute."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

import torch
from tests.support.peft_oracle import ADAPTERS, Answer, Case
from tests.support.tiny_models import VOCAB_SIZE, build_tiny_model

from pagedlora import LLM, KvCacheConfig, PeftCacheConfig, SamplingParams, SchedulerConfig
from pagedlora.engine.step import StepBatch

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma2")
NUM_TOKENS = 10
PROMPT_LENGTHS = (2, 11, 27)
MAX_NUM_TOKENS = 16
"""Less than the longest prompt, so that it is computed in chunks."""
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
ROOMY = "8MB"
