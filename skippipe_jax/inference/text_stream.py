"""Tokens become text one after the other, and no piece of it ends within a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
MAX_PENDING = 3
"""A character has at most four bytes, so at most three can be of one that is not whole."""
LONGEST_WINDOW = 64
"""Tokens that are decoded anew with each next one, unless the prompt has more."""


class TextStream:
    """The text that tokens add to a prompt, as soon as the characters in it are whole.

    Some tokenizers write a token otherwise at the beginning of a text, and a byte that is no
    character yet otherwise than once it is one. So a window of the last tokens is decoded each
    time, and what is new in it is told.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int]):
        """Begin behind a prompt; `decode` makes text of tokens."""
        self._decode = decode
        self._window = list(prompt)
        # Where in the window the tokens begin that came since it was last cut.
        self._recent = len(self._window)
        # The beginning of the window's text that is told.
        self._emitted = _complete(decode(self._window))

    def push(self, token: int) -> str:
        """Take the next token, and return what is whole with it: "" if nothing new is."""
        self._window.append(token)
        text = self._decode(self._window)
        complete = _complete(text)
        # Of a run of bytes that is no text yet, some tokenizers write none as they did before.
        if len(complete) < len(text) and not text.startswith(self._emitted):
            complete = self._emitted
        piece = complete[len(self._emitted) :]
        self._emitted = complete if len(complete) > len(self._emitted) else self._emitted
        pending = max(len(text) - len(self._emitted), 0)
        if (piece and not pending) or len(self._window) - self._recent > LONGEST_WINDOW:
            self._window = self._window[self._recent :]
            self._recent = len(self._window)
            text = self._decode(self._window)
            self._emitted = text[: len(text) - pending]
        return piece

    def rest(self) -> str:
        """Return what is left when no token comes any more."""
        return self._decode(self._window)[len(self._emitted) :]


def _complete(text: str) -> str:
    """Return the text without the end of it that may be part of a character."""
    end = len(text)
    while end > len(text) - MAX_PENDING and text[:end].endswith(REPLACEMENT):
        end -= 1
    return text[:end]


class AnswerText:
    """The text that tokens add to a prompt, up to the first stop sequence.

    What may be the beginning of a stop sequence is held back.

    Attributes:
        length: number of characters of the tokens so far, with those of a stop sequence.
        has_stopped: whether a stop sequence has ended the text.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stops: Sequence[str]
    ):
        """Start after a prompt; `decode` converts tokens to text. Empty stops are none."""
        self._stream = TextStream(decode, prompt)
        self._stops = [stop for stop in stops if stop]
        self._pending = ""
        self.length = 0
        self.has_stopped = False

    def push(self, token: int | None, *, is_last: bool) -> str:
        """Take the next token, or None if there is none, and return the text that it completes."""
        piece = "" if token is None else self._stream.push(token)
        if is_last:
            piece += self._stream.rest()
        self.length += len(piece)
        if self.has_stopped:
            return ""
        text = self._pending + piece
        starts = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if starts:
            self.has_stopped, self._pending = True, ""
            return text[: min(starts)]
        pending = 0 if is_last else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._pending = text[len(text) - pending :]
        return text[: len(text) - pending]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of a text are the first ones of another."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
