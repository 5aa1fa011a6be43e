"""One choice of an answer: decoded tokens, their text up to a stop, and their probabilities."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest, ScoredToken
from skippipe_jax.inference.text_stream import REPLACEMENT, AnswerText, TextStream


class PlacedToken(NamedTuple):
    """Token with the index of its first character in the choice's text."""

    scored: ScoredToken
    offset: int


@dataclass(frozen=True)
class ChoicePiece:
    """Increment of a choice.

    Attributes:
        index: index of the choice.
        text: new text.
        tokens: tokens drawn or echoed since the previous piece.
        reason: why the choice ends, `stop` or `length`; None if it goes on.
    """

    index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    reason: str | None


class Choice:
    """One of the answers to a request."""

    def __init__(
        self,
        index: int,
        request: DecodeRequest,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        echoed: str | None,
        hidden: int,
    ):
        """Begin with the text `echoed`, which lacks the first `hidden` tokens of the prompt."""
        self.index, self.request = index, request
        self.stages = request.stages
        """Stages that have run for all of its tokens so far."""
        self.drawn = 0
        self._tokenizer, self._echoed, self._hidden = tokenizer, echoed, hidden
        self._text = AnswerText(tokenizer.decode, request.prompt, stops)
        self._offset = 0 if echoed is None else len(echoed)
        self._reason: str | None = None

    def take(self, decoded: Decoded) -> ChoicePiece:
        """Take a decoded token and return the increment, whose text may be empty."""
        text, tokens = "", list[PlacedToken]()
        self.stages = decoded.stages or self.stages
        if self._echoed is not None:
            text, tokens = self._echoed, self._echoed_tokens(decoded.prompt)
            self._echoed = None
        token = None
        if decoded.drawn is not None:
            self.drawn += 1
            tokens.append(PlacedToken(decoded.drawn, self._offset + self._text.length))
            token = decoded.drawn.token
        is_end = token in self.request.ends
        text += self._text.push(None if is_end else token, is_last=decoded.is_last)
        if self._text.has_stopped:
            self._reason = "stop"
        elif decoded.is_last:
            self._reason = "stop" if is_end else "length"
        return ChoicePiece(self.index, text, tuple(tokens), self._reason)

    def _echoed_tokens(self, scored: Sequence[ScoredToken]) -> list[PlacedToken]:
        """Return the prompt's tokens without the hidden ones; the first token has no score."""
        if self.request.likeliest is None:
            return []
        prompt = self.request.prompt
        scored_tokens = [ScoredToken(prompt[0]), *scored][self._hidden :]
        stream = TextStream(self._tokenizer.decode, prompt[: self._hidden])
        placed, offset = [], 0
        for scored_token in scored_tokens:
            placed.append(PlacedToken(scored_token, offset))
            offset += len(stream.push(scored_token.token))
        return placed


@functools.lru_cache(maxsize=1 << 16)
def name_of(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token, or `token_id:NUMBER` if it is not whole characters.

    Different tokens have the same name only if they have the same text.
    """
    text = tokenizer.decode([token])
    return text if text and REPLACEMENT not in text else f"token_id:{token}"


def completion_logprobs(tokens: Sequence[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return log probabilities in the format of completions: the likeliest tokens and the drawn."""
    likeliest: list[dict[str, float] | None] = []
    for scored, _ in tokens:
        if scored.log_probability is None:
            likeliest.append(None)
            continue
        named: dict[str, float] = {}
        for token, value in (*scored.likeliest, (scored.token, scored.log_probability)):
            name = name_of(token, tokenizer)
            named[name] = max(value, named.get(name, value))
        likeliest.append(named)
    return {
        "tokens": [name_of(scored.token, tokenizer) for scored, _ in tokens],
        "token_logprobs": [scored.log_probability for scored, _ in tokens],
        "top_logprobs": likeliest,
        "text_offset": [offset for _, offset in tokens],
    }


def chat_logprobs(tokens: Sequence[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return log probabilities in the format of chat completions."""

    def entry(token: int, value: float | None) -> dict[str, Any]:
        name = name_of(token, tokenizer)
        is_text = not name.startswith("token_id:")
        return {"token": name, "logprob": value, "bytes": [*name.encode()] if is_text else None}

    return {
        "content": [
            entry(scored.token, scored.log_probability)
            | {"top_logprobs": [entry(*likely) for likely in scored.likeliest]}
            for scored, _ in tokens
        ],
        "refusal": None,
    }
