"""Conversations become tokens of which only the assistant's answers are learnt.

A conversation is a JSON object {"messages": [{"role": ..., "content": ...}, ...]}. Where the
tokenizer comes with a chat template, that says how messages are written. Otherwise they are written
as below, between the tokenizer's begin and end marks; what is learnt stands in brackets:

    BEGIN <|user|>⏎ content ⏎ <|assistant|>⏎ [content END] <|user|>⏎ content ⏎ ...
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer
from skippipe_sched.errors import InputError

from skippipe_jax.config import DocumentSource
from skippipe_jax.config.extras import require
from skippipe_jax.data.documents import Document
from skippipe_jax.data.tokenizer import Tokenizer, token_dtype

ASSISTANT = "assistant"

Message = Mapping[str, str]


def encode_conversation(
    document: Document, source: DocumentSource, tokenizer: Tokenizer
) -> tuple[Integer[np.ndarray, " token"], Bool[np.ndarray, " token"]]:
    """The tokens of a conversation, and which of them are the assistant's.

    Each answer is encoded on its own, as it is when a model gives it.

    Raises:
        InputError: naming file and line, if it is no conversation with an answer, or the template
            does not write it so that the answers can be told from the rest.
    """

    def refuse(problem: str) -> InputError:
        remedy = 'Write {"messages": [{"role": "user", "content": "..."}, ...]} on that line'
        return InputError(*source.origin, f"{document.where}: {problem}", remedy)

    messages = _messages(json.loads(document.text), refuse)
    if tokenizer.chat_template is None:
        segments = _written_plainly(messages, tokenizer)
    else:
        write = _template(tokenizer.chat_template, source)
        segments = _written_by(write, messages, tokenizer, refuse)
    tokens = np.concatenate([tokens for tokens, _ in segments])
    learnt = np.repeat([learnt for _, learnt in segments], [len(tokens) for tokens, _ in segments])
    # The first token is no target.
    if not learnt[1:].any():
        raise refuse("of what the tokenizer's chat template writes, nothing is an answer")
    return tokens.astype(token_dtype(tokenizer.vocabulary_size)), learnt


def _messages(row: Any, refuse: Callable[[str], InputError]) -> list[Message]:
    messages = row.get("messages")
    if not isinstance(messages, list):
        raise refuse(f"has no list of messages, but {', '.join(row) or 'nothing'}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise refuse(f"messages[{number}] is no object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise refuse(f"messages[{number}] has no text under {key!r}")
    if all(message["role"] != ASSISTANT for message in messages):
        raise refuse("there is no answer of the assistant to learn")
    return messages


Segments = list[tuple[np.ndarray, bool]]


def _written_plainly(messages: Sequence[Message], tokenizer: Tokenizer) -> Segments:
    segments: Segments = [(np.array([tokenizer.begin]), False)]
    for message in messages:
        segments.append((tokenizer.encode(f"<|{message['role']}|>\n"), False))
        if message["role"] == ASSISTANT:
            answer = tokenizer.encode(message["content"])
            segments.append((np.append(answer, tokenizer.end), True))
        else:
            segments.append((tokenizer.encode(message["content"] + "\n"), False))
    return segments


def _written_by(
    write: Callable[..., str],
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    refuse: Callable[[str], InputError],
) -> Segments:
    def text_of(count: int, begins_answer: bool) -> str:
        try:
            return write(
                messages=messages[:count],
                add_generation_prompt=begins_answer,
                **tokenizer.special_tokens,
            )
        except require("jinja2", "hf", "data.tokenizer", None).TemplateError as error:
            raise refuse(f"the tokenizer's chat template fails: {error}") from error

    segments, written = [], ""
    for number, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        before, after = text_of(number, True), text_of(number + 1, False)
        if not (before.startswith(written) and after.startswith(before)):
            raise refuse("the tokenizer's chat template writes earlier messages anew")
        segments.append((tokenizer.encode(before.removeprefix(written)), False))
        segments.append((tokenizer.encode(after.removeprefix(before)), True))
        written = after
    return segments


@functools.lru_cache(maxsize=2)
def _template(text: str, source: DocumentSource) -> Callable[..., str]:
    """The function that a Jinja template is, with what templates of tokenizers rely on."""
    jinja2 = require("jinja2", "hf", *source.origin)
    sandbox = require("jinja2.sandbox", "hf", *source.origin)
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )

    def refuse(problem: str) -> None:
        raise jinja2.TemplateError(problem)

    environment.globals["raise_exception"] = refuse
    # Jinja's own filter writes for HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    try:
        return environment.from_string(text).render
    except jinja2.TemplateError as error:
        raise InputError(
            "data.tokenizer", text, f"its chat template is not valid: {error}", "Mend the template"
        ) from error
