"""Prompts into requests, finished requests into outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagedlora.engine.adapter_names import AdapterNames
from pagedlora.engine.loading import LoadedModel
from pagedlora.engine.sampler import with_seed
from pagedlora.engine.text_stream import TextStream
from pagedlora.errors import CapacityError, InvalidArgumentError
from pagedlora.requests import CompletionOutput, LlmRequest, LoRARequest, RequestOutput
from pagedlora.sampling_params import SamplingParams
from pagedlora.shown import counted, shown


@dataclass(slots=True)
class Sent:
    """How much of a request was delivered.

    Attributes:
        num_tokens: Tokens of its output.
        num_chars: Characters of its text.
    """

    num_tokens: int = 0
    num_chars: int = 0


class RequestProcessor:
    """Checks and tokenizes prompts, resolves adapters, writes texts. Not thread-safe."""

    def __init__(self, loaded: LoadedModel, adapters: AdapterNames) -> None:
        """Remembers both.

        Args:
            loaded: The model's tokenizer and limits.
            adapters: Resolves adapter names.
        """
        self._tokenizer = loaded.tokenizer
        self._max_model_tokens = loaded.max_model_tokens
        self._vocab_size = loaded.vocab_size
        self._adapters = adapters

    def token_ids(self, prompt: str | list[int]) -> list[int]:
        """The prompt as the model sees it.

        Raises:
            InvalidArgumentError: It is a text, and there is no tokenizer or one that refuses it.
        """
        if not isinstance(prompt, str):
            return prompt
        if self._tokenizer is None:
            raise InvalidArgumentError(
                "the prompt is a text, but there is no tokenizer: give LLM a tokenizer, or "
                "prompts as lists of token ids"
            )
        try:
            return list(self._tokenizer(prompt)["input_ids"])
        except Exception as error:  # whatever foreign code raises for this text
            raise InvalidArgumentError(
                f"the tokenizer cannot read the prompt {shown(prompt)}: {error}"
            ) from error

    def make_request(
        self,
        request_id: int,
        token_ids: list[int],
        params: SamplingParams,
        lora: LoRARequest | str | None,
        *,
        streams: bool = False,
    ) -> LlmRequest:
        """One request, ready for the engine; with `streams` its text is known token by token.

        Raises:
            InvalidArgumentError: The prompt is empty or not of this vocabulary, or there are stop
                strings and no tokenizer.
            CapacityError: The prompt leaves no room for an answer.
            PagedLoraError: The adapter is unknown or cannot be used.
        """
        self._check_tokens(token_ids)
        if params.stop and self._tokenizer is None:
            raise InvalidArgumentError(
                "SamplingParams.stop needs a tokenizer: give LLM one, or use stop_token_ids"
            )
        max_tokens = params.max_tokens
        if self._max_model_tokens is not None:
            room = self._max_model_tokens - len(token_ids)
            if room < 1:
                raise CapacityError(
                    f"the prompt has {counted(len(token_ids), 'token')}, and the model's full "
                    f"length is {self._max_model_tokens}: no room for an answer; shorten the "
                    "prompt"
                )
            max_tokens = min(max_tokens, room)
        return LlmRequest(
            request_id,
            lora_task_id=self._adapters.resolve(lora),
            prompt_token_ids=token_ids,
            max_tokens=max_tokens,
            sampling_params=with_seed(params),
            keeps_adapter=True,
            text=self._text_stream(params, streams=streams),
        )

    def make_output(self, request: LlmRequest) -> RequestOutput:
        """The result of a finished or failed request."""
        prompt = list(request.prompt_token_ids)
        if request.finish_reason is None:
            return RequestOutput(request.request_id, prompt, [], error=request.error)
        completion = CompletionOutput(
            list(request.output_token_ids),
            self.text_of(request),
            request.finish_reason,
            _logprobs(request, 0),
        )
        return RequestOutput(request.request_id, prompt, [completion])

    def text_of(self, request: LlmRequest) -> str:
        """The text of a finished request."""
        if isinstance(request.text, TextStream) and request.text.is_stopped:
            return request.text.text
        token_ids = request.output_token_ids
        return self._text(token_ids[:-1] if request.finish_reason == "stop" else token_ids)

    def make_delta(self, request: LlmRequest, sent: Sent) -> RequestOutput:
        """What is new of a request since the last time; `sent` is brought up to date."""
        new = request.output_token_ids[sent.num_tokens :]
        text = ""
        if request.has_ended:
            text = self.text_of(request)
        elif isinstance(request.text, TextStream):
            text = request.text.certain_text()
        completion = CompletionOutput(
            list(new),
            text[sent.num_chars :],
            request.finish_reason,
            _logprobs(request, sent.num_tokens),
        )
        sent.num_tokens += len(new)
        sent.num_chars = max(sent.num_chars, len(text))
        outputs = [] if request.error is not None else [completion]
        return RequestOutput(
            request.request_id,
            list(request.prompt_token_ids),
            outputs,
            error=request.error,
            finished=request.has_ended,
        )

    def _text_stream(self, params: SamplingParams, *, streams: bool) -> TextStream | None:
        if self._tokenizer is None or not (params.stop or streams):
            return None
        return TextStream(self._tokenizer, params.stop)

    def _check_tokens(self, token_ids: Sequence[int]) -> None:
        if not token_ids:
            raise InvalidArgumentError("the prompt is empty: it needs at least one token")
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self._vocab_size:
                raise InvalidArgumentError(
                    f"the prompt has token id {shown(token)}: the model knows 0 to "
                    f"{self._vocab_size - 1}"
                )

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            return ""
        text: Any = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return str(text)


def _logprobs(request: LlmRequest, begin: int) -> list[dict[int, float]] | None:
    wanted = request.sampling_params.logprobs is not None
    return list(request.output_logprobs[begin:]) if wanted else None
