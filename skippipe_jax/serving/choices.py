"""A choice of an answer: tokens become text that ends where it shall, with what is told of them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from skippipe_jax.data.tokenizer import Tokenizer
from skippipe_jax.inference.decode_requests import Decoded, DecodeRequest, ScoredToken
from skippipe_jax.inference.text_stream import REPLACEMENT, StopTexts, TextStream


class PlacedToken(NamedTuple):
    """A token, and at which character of the choice's text it begins."""

    scored: ScoredToken
    offset: int


@dataclass(frozen=True)
class Piece:
    """What is new of a choice.

    Attributes:
        index: of the choice.
        text: what comes next.
        tokens: those that were drawn, or echoed, since the piece before.
        reason: why the choice ends, `stop` or `length`; None if it goes on.
    """

    index: int
    text: str
    tokens: tuple[PlacedToken, ...]
    reason: str | None


class Choice:
    """One of the answers to a request, from its first token to its end."""

    def __init__(
        self,
        index: int,
        request: DecodeRequest,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        echoed: str | None,
        hidden: int,
    ):
        """Begin with the text that is `echoed`; `hidden` tokens of the prompt are not in it."""
        self.index, self.request = index, request
        self.stages = request.stages
        """Those that have run for all of its tokens so far."""
        self.drawn = 0
        self._tokenizer, self._echoed, self._hidden = tokenizer, echoed, hidden
        self._text = TextStream(tokenizer.decode, request.prompt)
        self._stops = StopTexts(stops)
        self._offset = 0 if echoed is None else len(echoed)
        self._reason: str | None = None

    def take(self, decoded: Decoded) -> Piece:
        """Take what was decoded, and return what it adds; there may be no text in it yet."""
        text, tokens = "", list[PlacedToken]()
        self.stages = decoded.stages or self.stages
        if self._echoed is not None:
            text, tokens = self._echoed, self._echoed_tokens(decoded.prompt)
            self._echoed = None
        new, is_end = "", False
        if decoded.drawn is not None:
            self.drawn += 1
            tokens.append(PlacedToken(decoded.drawn, self._offset))
            is_end = decoded.drawn.token in self.request.ends
            if not is_end:
                new = self._text.push(decoded.drawn.token)
        if decoded.is_last:
            new += self._text.rest()
        self._offset += len(new)
        text += self._stops.push(new)
        if self._stops.has_ended:
            self._reason = "stop"
        elif decoded.is_last:
            text += self._stops.rest()
            self._reason = "stop" if is_end else "length"
        return Piece(self.index, text, tuple(tokens), self._reason)

    def _echoed_tokens(self, scored: Sequence[ScoredToken]) -> list[PlacedToken]:
        """Place the tokens of the prompt; the first has no score, and those hidden are left out."""
        if self.request.likeliest is None:
            return []
        prompt = self.request.prompt
        known = [ScoredToken(prompt[0]), *scored][self._hidden :]
        stream = TextStream(self._tokenizer.decode, prompt[: self._hidden])
        placed, offset = [], 0
        for own in known:
            placed.append(PlacedToken(own, offset))
            offset += len(stream.push(own.token))
        return placed


@functools.lru_cache(maxsize=1 << 16)
def name_of(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token; of one that is no whole characters, `token_id:` and its number.

    So no two tokens in one place have the same name, unless they have the same text.
    """
    text = tokenizer.decode([token])
    return text if text and REPLACEMENT not in text else f"token_id:{token}"


def completion_logprobs(tokens: Sequence[PlacedToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the probabilities of tokens as completions have them: those likeliest, and the own."""
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
    """Return the probabilities of tokens as answers in a conversation have them."""

    def told(token: int, value: float | None) -> dict[str, Any]:
        name = name_of(token, tokenizer)
        is_text = not name.startswith("token_id:")
        return {"token": name, "logprob": value, "bytes": [*name.encode()] if is_text else None}

    return {
        "content": [
            told(scored.token, scored.log_probability)
            | {"top_logprobs": [told(*own) for own in scored.likeliest]}
            for scored, _ in tokens
        ],
        "refusal": None,
    }
