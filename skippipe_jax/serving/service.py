"""Answers of a service: from the parameters of a request to its response, whole or streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from skippipe_sched.errors import InputError

from skippipe_jax.data.chat import encode_prompt
from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.decode_requests import DecodeRequest
from skippipe_jax.serving.choices import Choice, ChoicePiece, chat_logprobs, completion_logprobs
from skippipe_jax.serving.engine import Engines, Sequences
from skippipe_jax.serving.errors import ApiError, wrong
from skippipe_jax.serving.metrics import Metrics
from skippipe_jax.serving.requests import ChatRequest, CompletionRequest

AnyRequest = CompletionRequest | ChatRequest


@dataclass(frozen=True)
class Served:
    """Properties of the served model that requests depend on.

    Attributes:
        name: name by which clients request it.
        tokenizer: its tokenizer.
        context: most tokens of a sequence, its prompt included.
        stages: number of stages.
        vocabulary_size: number of different tokens.
        turn_end: token that ends an answer in a conversation, as the end mark does; may be None.
        converses: whether it supports conversations.
        today: date for chat templates.
    """

    name: str
    tokenizer: Tokenizer
    context: int
    stages: int
    vocabulary_size: int
    turn_end: int | None
    converses: bool
    today: str


class Job:
    """Validated request with its sequences."""

    def __init__(self, parameters: AnyRequest, served: Served, capacity: int):
        """Validate a request of at most `capacity` sequences; tokenize its prompts, which is slow.

        Raises:
            ApiError: if it cannot be answered.
        """
        self.parameters, self.served = parameters, served
        self.is_chat = isinstance(parameters, ChatRequest)
        self.id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        if parameters.model not in (None, served.name):
            message = f"model: {parameters.model!r} does not exist; use {served.name!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        seed = secrets.randbits(31) if parameters.seed is None else parameters.seed
        stages, likeliest = parameters.stages(served.stages, seed), parameters.likeliest
        ends = {served.tokenizer.end}
        if self.is_chat and served.turn_end is not None:
            ends.add(served.turn_end)
        count = parameters.n * (
            len(parameters.prompts) if isinstance(parameters, CompletionRequest) else 1
        )
        if count > capacity:
            message = f"n: {count} sequences are requested, and the capacity is {capacity}"
            raise ApiError(400, message, param="n")
        self.choices: list[Choice] = []
        self.prompt_tokens = 0
        for text, prompt, hidden in self._prompts():
            count = self._new_tokens(len(prompt))
            self.prompt_tokens += len(prompt)
            for number in range(parameters.n):
                request = DecodeRequest(
                    prompt,
                    count,
                    parameters.sampling(seed + number),
                    frozenset() if parameters.ignore_eos else frozenset(ends),
                    stages,
                    likeliest,
                    scores_prompt=parameters.echo and (likeliest is not None or not count),
                )
                options = (parameters.stops, text if parameters.echo else None, hidden)
                self.choices.append(Choice(len(self.choices), request, served.tokenizer, *options))

    @property
    def requests(self) -> list[DecodeRequest]:
        """Sequences of the request, one for each choice."""
        return [choice.request for choice in self.choices]

    def _prompts(self) -> list[tuple[str, list[int], int]]:
        """Return each prompt's text, tokens, and number of leading tokens not in the text."""
        served, tokenizer = self.served, self.served.tokenizer
        if isinstance(self.parameters, ChatRequest):
            if not served.converses:
                message = (
                    "the model was not trained on conversations, and its tokenizer has no chat "
                )
                raise ApiError(400, f"{message}template: request completions", param="messages")
            try:
                tokens = encode_prompt(self.parameters.conversation, tokenizer, served.today)
            except InputError as error:
                raise wrong("messages", error) from error
            return [("", [*map(int, tokens)], 0)]
        prompts = []
        for prompt in self.parameters.prompts:
            if isinstance(prompt, str):
                # The begin mark is added here, so clients get no probabilities for it.
                tokens = [tokenizer.begin, *map(int, tokenizer.encode(prompt))]
                prompts.append((prompt, tokens, 1))
                continue
            if not prompt or min(prompt) < 0 or max(prompt) >= served.vocabulary_size:
                message = (
                    f"prompt: needs at least one token, each 0 to {served.vocabulary_size - 1}"
                )
                raise ApiError(400, message, param="prompt")
            prompts.append((tokenizer.decode(prompt) if self.parameters.echo else "", prompt, 0))
        return prompts

    def _new_tokens(self, prompt: int) -> int:
        """Return the largest number of new tokens after a prompt of `prompt` tokens."""
        context, requested = self.served.context, self.parameters.most_new_tokens
        count = max(context - prompt, 0) if requested is None else requested
        # The last token of a prompt that is only scored is a target and needs no position.
        is_scored = count == 0 and self.parameters.echo
        if prompt + count > context + is_scored or not (count or is_scored):
            message = f"the context is {context} tokens, the prompt has {prompt}, and "
            message += f"{count if requested is not None else 1} more are requested"
            param = "messages" if self.is_chat else "prompt"
            raise ApiError(400, message, param=param, code="context_length_exceeded")
        return count

    def usage(self) -> dict[str, int]:
        """Return the numbers of tokens so far."""
        drawn = sum(choice.drawn for choice in self.choices)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
        }

    async def pieces(
        self, sequences: Sequences, engines: Engines, metrics: Metrics
    ) -> AsyncIterator[ChoicePiece]:
        """Yield the increments of choices until all have ended; cancel those that end early.

        All sequences of the request are cancelled however this ends.
        """
        last_s: dict[int, float] = {}
        try:
            async for place, decoded in sequences.decoded():
                now_s = time.monotonic()
                if decoded.drawn is not None:
                    metrics.new_tokens.inc()
                    if place in last_s:
                        metrics.next_token.observe(now_s - last_s[place])
                    else:
                        metrics.first_token.observe(now_s - sequences.began_s)
                    last_s[place] = now_s
                piece = self.choices[place].take(decoded)
                if piece.reason is not None:
                    engines.cancel(sequences, place)
                    metrics.done(piece.reason)
                yield piece
            metrics.prompt_tokens.inc(self.prompt_tokens)
            metrics.request.observe(time.monotonic() - sequences.began_s)
        finally:
            for _ in sequences.open:
                metrics.done("abort")
            engines.cancel(sequences)

    # The format of answers.

    def answer(self, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """Return the complete answer from all pieces."""
        choices = []
        for choice in self.choices:
            increments = [piece for piece in pieces if piece.index == choice.index]
            text = "".join(piece.text for piece in increments)
            tokens = [token for piece in increments for token in piece.tokens]
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            content = content if self.is_chat else {"text": text}
            choices.append(
                {
                    "index": choice.index,
                    **content,
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": increments[-1].reason,
                    "skippipe": self._used(choice.index),
                }
            )
        kind = "chat.completion" if self.is_chat else "text_completion"
        return self._body(kind, choices) | {"usage": self.usage()}

    async def events(self, pieces: AsyncIterator[ChoicePiece]) -> AsyncIterator[bytes]:
        """Yield server-sent events: one per piece with text, the numbers of tokens, the end.

        An error after the answer has begun is sent as an event.
        """
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        usage = {"usage": None} if self.parameters.includes_usage else {}
        try:
            if isinstance(self.parameters, ChatRequest):
                role = {"role": "assistant", "content": ""}
                for choice in self.choices:
                    content = {"index": choice.index, "delta": role, "finish_reason": None}
                    yield _event(self._body(kind, [content | {"logprobs": None}]) | usage)
            unsent: dict[int, tuple[Any, ...]] = {}
            async for piece in pieces:
                tokens = (*unsent.pop(piece.index, ()), *piece.tokens)
                if not piece.text and piece.reason is None:
                    unsent[piece.index] = tokens  # Sent with the text that they are part of.
                    continue
                delta = {"content": piece.text} if piece.text else {}
                content = {
                    "index": piece.index,
                    **({"delta": delta} if self.is_chat else {"text": piece.text}),
                    "logprobs": self._logprobs(tokens),
                    "finish_reason": piece.reason,
                }
                if piece.reason is not None:
                    content["skippipe"] = self._used(piece.index)
                yield _event(self._body(kind, [content]) | usage)
            if usage:
                yield _event(self._body(kind, []) | {"usage": self.usage()})
        except ApiError as error:
            yield _event(error.body)
            return
        yield b"data: [DONE]\n\n"

    def _body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self.created, "model": self.served.name}
        return head | {"choices": choices}

    def _logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if self.parameters.likeliest is None:
            return None
        formatted = chat_logprobs if self.is_chat else completion_logprobs
        return formatted(tokens, self.served.tokenizer)

    def _used(self, index: int) -> dict[str, Any]:
        """Return the stages that a choice used, for the client."""
        return {"stages": list(self.choices[index].stages or ())}


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
