"""Conversations become tokens of which only the assistant's answers are learnt.

A conversation is a JSON object {"messages": [{"role": ..., "content": ...}, ...]}, or one as in
ShareGPT, {"conversations": [{"from": "human", "value": ...}, ...]}, or as in Alpaca,
{"instruction": ..., "input": ..., "output": ...}.

Where one is given, or the tokenizer comes with one, a chat template says how messages are written,
and by ``{% generation %}``, if it has that, what is learnt. Otherwise they are written as below,
between the tokenizer's begin and end marks; what is learnt stands in brackets:

    BEGIN <|user|>⏎ content ⏎ <|assistant|>⏎ [content END] <|user|>⏎ content ⏎ ...
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer
from jinja2 import TemplateError
from skippipe_sched.errors import InputError

from skippipe_jax.config import DocumentSource
from skippipe_jax.config.tokenizer import BYTES
from skippipe_jax.data.chat_template import TEMPLATES, TODAY, ChatTemplate, template_text
from skippipe_jax.data.documents import Document
from skippipe_jax.data.tokenizer import Tokenizer, token_dtype

ASSISTANT = "assistant"
PLAIN = "plain"
ROLES = {"human": "user", "gpt": ASSISTANT}
"""Of ShareGPT."""
TEMPLATE_FIELD = "data.chat_template"

Message = Mapping[str, str]


def encode_conversation(
    document: Document, source: DocumentSource, tokenizer: Tokenizer
) -> tuple[Integer[np.ndarray, " token"], Bool[np.ndarray, " token"]]:
    """Return the tokens of a conversation, and which of them are the assistant's.

    Each answer is encoded on its own, as it is when a model gives it, and each stretch between.

    Raises:
        InputError: naming file and line, if it is no conversation with an answer, or the template
            does not write it so that the answers can be told from the rest.
    """

    refuse = functools.partial(_refused, document, source)
    messages = _messages(document, source)
    text, template = _template_text(source, tokenizer), None
    if text is not None:
        template = _template(text, source)
    is_answered = any(message["role"] == ASSISTANT for message in messages)
    if not is_answered and (template is None or not template.marks_answers):
        raise refuse("there is no answer of the assistant to learn")
    if template is None:
        segments = _written_plainly(messages, tokenizer)
    else:
        segments = _written_by(template, messages, tokenizer, source, refuse)
    nothing = "of what the tokenizer's chat template writes, nothing is an answer"
    if not segments:
        raise refuse(nothing)
    tokens = np.concatenate([tokens for tokens, _ in segments])
    learnt = np.repeat([learnt for _, learnt in segments], [len(tokens) for tokens, _ in segments])
    # The first token is no target.
    if not learnt[1:].any():
        raise refuse(nothing)
    return tokens.astype(token_dtype(tokenizer.vocabulary_size)), learnt


def _template_text(source: DocumentSource, tokenizer: Tokenizer) -> str | None:
    """Return the template that is given, or else the tokenizer's, if it comes with one."""
    name = source.chat_template
    if name is None:
        return tokenizer.chat_template
    if tokenizer.digest == BYTES:
        problem = "goes with a tokenizer, beside which it is kept, and the text is read as bytes"
        raise InputError(TEMPLATE_FIELD, name, problem, "Name a data.tokenizer, or remove it")
    if name == PLAIN and not {"bos_token", "eos_token"} <= tokenizer.special_tokens.keys():
        problem = "has to mark begin and end, and the tokenizer gives no texts of such tokens"
        remedy = "Write bos_token and eos_token in its tokenizer_config.json, or name a file"
        raise InputError(TEMPLATE_FIELD, name, problem, remedy)
    return template_text(name, TEMPLATE_FIELD)


def template_warning(chats: Sequence[DocumentSource], tokenizer: Tokenizer) -> list[str]:
    """Warn of conversations that no template writes, though the tokenizer is that of a model."""
    without = any(_template_text(source, tokenizer) is None for source in chats)
    if not without or tokenizer.digest == BYTES:
        return []
    return [
        "the tokenizer has no chat template: conversations are written as <|user|>, <|assistant|> "
        "and so on, each on a line before its message, and a model that is exported comes without "
        f"a template. Choose one by {TEMPLATE_FIELD}: {', '.join(TEMPLATES)}, or a file"
    ]


def spoken(document: Document, source: DocumentSource) -> str:
    """Return all that is said in a conversation, without who says it.

    Raises:
        InputError: naming file and line, if it is no conversation.
    """
    return "\n".join(message["content"] for message in _messages(document, source))


def _refused(document: Document, source: DocumentSource, problem: str) -> InputError:
    remedy = 'Write {"messages": [{"role": "user", "content": "..."}, ...]} on that line'
    return InputError(*source.origin, f"{document.where}: {problem}", remedy)


def _messages(document: Document, source: DocumentSource) -> list[Message]:
    refuse = functools.partial(_refused, document, source)
    row = json.loads(document.text)
    messages = _as_messages(row)
    if not isinstance(messages, list):
        raise refuse(f"has no list of messages, but {', '.join(row) or 'nothing'}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise refuse(f"messages[{number}] is no object")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise refuse(f"messages[{number}] has no text under {key!r}")
    return messages


def _as_messages(row: Mapping[str, Any]) -> Any:
    """Return the messages of a row, also of one as in ShareGPT or Alpaca; None without any."""
    turns, is_alpaca = row.get("conversations"), "instruction" in row and "output" in row
    if "messages" not in row and isinstance(turns, list):
        return [
            {
                "role": ROLES.get(str(turn.get("from")), turn.get("from")),
                "content": turn.get("value"),
            }
            if isinstance(turn, dict)
            else turn
            for turn in turns
        ]
    if "messages" not in row and is_alpaca:
        asked = "\n\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
        return [
            {"role": "user", "content": asked},
            {"role": ASSISTANT, "content": row["output"]},
        ]
    return row.get("messages")


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
    template: ChatTemplate,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    source: DocumentSource,
    refuse: Callable[[str], InputError],
) -> Segments:
    def pieces_of(count: int, begins_answer: bool) -> list[tuple[str, bool]]:
        try:
            return template.write(
                messages=messages[:count],
                add_generation_prompt=begins_answer,
                **tokenizer.special_tokens,
            )
        except TemplateError as error:
            if source.today is None and TODAY in str(error):
                raise _without_day(source) from error
            raise refuse(f"the tokenizer's chat template fails: {error}") from error

    def text_of(count: int, begins_answer: bool) -> str:
        return "".join(text for text, _ in pieces_of(count, begins_answer))

    if template.marks_answers:
        pieces = pieces_of(len(messages), False)
        return [(tokenizer.encode(text), is_answer) for text, is_answer in pieces]
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


def _without_day(source: DocumentSource) -> InputError:
    return InputError(
        f"{source.field.partition('.')[0]}.today",
        None,
        f"the tokenizer's chat template writes the date ({TODAY})",
        "Say which it is, as 2026-11-22: a run that is resumed on another day must read the same",
    )


@functools.lru_cache(maxsize=2)
def _template(text: str, source: DocumentSource) -> ChatTemplate:
    try:
        return ChatTemplate(text, source.today)
    except TemplateError as error:
        raise InputError(
            "data.tokenizer", text, f"its chat template is not valid: {error}", "Mend the template"
        ) from error
