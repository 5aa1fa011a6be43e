"""Conversations as tokens, of which only the assistant's answers are trained on.

A conversation is a JSON object {"messages": [{"role": ..., "content": ...}, ...]}, or in the form
of ShareGPT, {"conversations": [{"from": "human", "value": ...}, ...]}, or of Alpaca,
{"instruction": ..., "input": ..., "output": ...}. A content may be a list of parts of text,
[{"type": "text", "text": ...}, ...].

A chat template formats the messages, if one is configured or comes with the tokenizer. If it has
``{% generation %}`` blocks, only these are trained on. Otherwise messages are formatted as below,
between the tokenizer's begin and end marks; brackets enclose what is trained on:

    BEGIN <|user|>⏎ content ⏎ <|assistant|>⏎ [content END] <|user|>⏎ content ⏎ ...
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Integer
from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from skippipe_sched import fields
from skippipe_sched.errors import InputError

from skippipe_jax.config import DataConfig, DocumentSource
from skippipe_jax.config.data import BYTES
from skippipe_jax.data.documents import Document, local_path
from skippipe_jax.data.token_shards import read_index
from skippipe_jax.data.tokenizer import Tokenizer, token_dtype

# Delimiters of answers in what a template writes; random, so that no text contains them.
_BEGIN, _END = (f"<{secrets.token_hex(16)}>" for _ in range(2))

MOST_CHARACTERS = 1 << 24
"""Most characters of a conversation; a template with nested loops may not end."""

TEMPLATES = {
    "plain": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|' + message['role'] + '|>\n' + message['content'] }}"
        "{{ eos_token if message['role'] == 'assistant' else '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "llama3": (
        "{{ bos_token }}{% for message in messages %}"
        "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}"
        "{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endfor %}"
        "{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
}
"""Templates by name."""

MARK = re.compile(r"<[^<>\s]+>")
"""Marks that templates write around messages, such as <|eot_id|> and </s>; most are tokens."""

TODAY = "strftime_now"
"""Function of templates that writes the time; here, it always writes the given day."""


def template_text(name: str, field: str) -> str:
    """Return the template of this name, or else the one in the file with this path.

    Raises:
        InputError: naming `field`, if there is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        remedy = f"{fields.suggestion(name, TEMPLATES)}Write {', '.join(TEMPLATES)}, or name a file"
        raise InputError(field, name, "is neither a file nor the name of a template", remedy)
    return fields.read_text(path, field)


class ChatTemplate:
    """Compiled template that formats conversations.

    Attributes:
        marks_answers: True if the template itself marks answers.
    """

    def __init__(self, text: str, today: str | None = None):
        """Compile a template, in which the day is always `today` (such as 2026-11-22).

        Without a day there is no ``strftime_now``: some templates then write one of their own.

        Raises:
            TemplateError: if it is not a valid template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Answers]
        )
        environment.globals["raise_exception"] = _raise_template_error
        if today is not None:
            day = datetime.datetime.fromisoformat(today)
            environment.globals[TODAY] = day.strftime
        # Jinja's own filter escapes HTML.
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        parsed = environment.parse(text)
        self.marks_answers = any(
            call.identifier == _Answers.identifier
            for call in parsed.find_all(nodes.ExtensionAttribute)
        )
        self._generate = environment.from_string(parsed).generate

    def write(self, **variables: Any) -> list[tuple[str, bool]]:
        """Format `messages` and other variables as pieces: text, and whether it is an answer.

        Raises:
            TemplateError: if the template raises it, or does something that is not allowed.
        """
        written, size = list[str](), 0
        for part in self._generate(**variables):
            written.append(part)
            size += len(part)
            if size > MOST_CHARACTERS:
                raise TemplateError(f"it writes more than {MOST_CHARACTERS:,} characters")
        pieces, depth = [], 0
        for piece in re.split(f"({_BEGIN}|{_END})", "".join(written)):
            if piece in (_BEGIN, _END):
                depth += 1 if piece == _BEGIN else -1
            elif piece:
                pieces.append((piece, depth > 0))
        return pieces


class _Answers(Extension):
    """Jinja block ``generation``, whose content is written between two delimiters."""

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _raise_template_error(problem: str) -> None:
    raise TemplateError(problem)


ASSISTANT = "assistant"
PLAIN = "plain"
ROLES = {"human": "user", "gpt": ASSISTANT}
"""Our names of ShareGPT's roles."""
KNOWN_ROLES = ("system", "user", ASSISTANT, "tool")
"""Roles that error messages list; a template may accept others."""
TEMPLATE_FIELD = "data.chat_template"

Turn = Mapping[str, str]


def encode_conversation(
    document: Document, source: DocumentSource, tokenizer: Tokenizer
) -> tuple[Integer[np.ndarray, " token"], Bool[np.ndarray, " token"]]:
    """Return the tokens of a conversation, and which of them are the assistant's.

    Each answer is encoded on its own, as if generated, and so is the text between answers.

    Raises:
        InputError: naming file and line, if it is not a conversation with an answer, or the
            template's text cannot be divided into answers and the rest.
    """

    refuse = functools.partial(_conversation_error, document, source)
    messages = _messages(document, source)
    text, template = _template_text(source, tokenizer), None
    if text is not None:
        template = _template(text, source.today)
    is_answered = any(message["role"] == ASSISTANT for message in messages)
    if not is_answered and (template is None or not template.marks_answers):
        raise refuse(_why_unanswered(messages))
    if template is None:
        segments = _segments_without_template(messages, tokenizer)
    else:
        segments = _segments_by_template(template, messages, tokenizer, source, refuse)
    no_answer = "the text that the tokenizer's chat template writes contains no answer"
    if not segments:
        raise refuse(no_answer)
    tokens = np.concatenate([tokens for tokens, _ in segments])
    learnt = np.repeat([learnt for _, learnt in segments], [len(tokens) for tokens, _ in segments])
    # The first token is not a target.
    if not learnt[1:].any():
        raise refuse(no_answer)
    return tokens.astype(token_dtype(tokenizer.vocabulary_size)), learnt


def _template_text(source: DocumentSource, tokenizer: Tokenizer) -> str | None:
    """Return the configured template, or else the tokenizer's, if it comes with one."""
    name = source.chat_template
    if name is None:
        return tokenizer.chat_template
    if tokenizer.digest == BYTES:
        problem = "needs a tokenizer, but the text is read as bytes"
        raise InputError(TEMPLATE_FIELD, name, problem, "Set data.tokenizer, or remove it")
    if name == PLAIN and not {"bos_token", "eos_token"} <= tokenizer.special_tokens.keys():
        problem = "needs begin and end tokens, but the tokenizer does not name both"
        remedy = "Add bos_token and eos_token to its tokenizer_config.json, or name a file"
        raise InputError(TEMPLATE_FIELD, name, problem, remedy)
    text = template_text(name, TEMPLATE_FIELD)
    # The plain template writes roles as text; templates from files are not checked.
    marks = MARK.findall(text) if name in TEMPLATES and name != PLAIN else ()
    unknown = dict.fromkeys(mark for mark in marks if tokenizer.token_of(mark) is None)
    if unknown:
        problem = f"the tokenizer does not have the tokens {', '.join(unknown)}"
        remedy = f"Write {PLAIN}, or name the file of a template for this tokenizer"
        raise InputError(TEMPLATE_FIELD, name, problem, remedy)
    return text


def template_warning(chats: Sequence[DocumentSource], tokenizer: Tokenizer) -> list[str]:
    """Return a warning if a model's tokenizer has no template for conversations."""
    lacks_template = any(_template_text(source, tokenizer) is None for source in chats)
    if not lacks_template or tokenizer.digest == BYTES:
        return []
    return [
        "the tokenizer has no chat template: each message is written below a line with its role, "
        "<|user|>, <|assistant|> and so on, and an exported model has no template. Set "
        f"{TEMPLATE_FIELD} to {', '.join(TEMPLATES)}, or a file"
    ]


def trains_on_answers(config: DataConfig) -> bool:
    """Return whether the data has conversations, tokenized or not, with answers to train on.

    If tokens are no longer there, this is unknown, and the result is False.
    """
    return any(one.kind == "chat" or _is_tokenized_chat(one) for one in config.sources())


def _is_tokenized_chat(source: DocumentSource) -> bool:
    if source.kind != "tokens":
        return False
    try:
        index = read_index(local_path(source.origin[1]), source.origin[0])
    except InputError:
        return False
    return index.parts["training"].learnt is not None


def encode_prompt(
    messages: Sequence[Turn], tokenizer: Tokenizer, today: str
) -> Integer[np.ndarray, " token"]:
    """Return the tokens of a conversation that the assistant is to continue.

    The tokenizer's own template formats it, if there is one, with `today` as the day.

    Raises:
        InputError: if the template cannot format it.
    """
    text = tokenizer.chat_template
    if text is None:
        answer_header = tokenizer.encode(_header(ASSISTANT))
        segments = [tokens for tokens, _ in _segments_without_template(messages, tokenizer)]
        return np.concatenate([*segments, answer_header])
    try:
        return tokenizer.encode(_formatted(text, messages, tokenizer, today, begins_answer=True))
    except TemplateError as error:
        problem = f"the tokenizer's chat template fails: {error}"
        raise InputError(
            "--chat", True, problem, "Remove it, and write the formatted prompt"
        ) from error


def end_of_turn(tokenizer: Tokenizer, today: str) -> tuple[str, int] | None:
    """Return the text and the token that end an answer in the tokenizer's chat template.

    None if there is no template, it does not end an answer by a token of its own, or it does not
    write a question and an answer.
    """
    text, answer = tokenizer.chat_template, "Answer"
    if text is None:
        return None
    messages = [{"role": "user", "content": "Question"}, {"role": ASSISTANT, "content": answer}]
    try:
        written = _formatted(text, messages, tokenizer, today)
    except TemplateError:
        return None
    mark = MARK.search(written.rpartition(answer)[2]) if answer in written else None
    token = None if mark is None else tokenizer.token_of(mark[0])
    return None if mark is None or token is None else (mark[0], token)


def _formatted(
    template: str,
    messages: Sequence[Turn],
    tokenizer: Tokenizer,
    today: str,
    *,
    begins_answer: bool = False,
) -> str:
    pieces = _template(template, today).write(
        messages=messages, add_generation_prompt=begins_answer, **tokenizer.special_tokens
    )
    return "".join(text for text, _ in pieces)


def message_texts(document: Document, source: DocumentSource) -> str:
    """Return the contents of all messages of a conversation, without their roles.

    Raises:
        InputError: naming file and line, if it is not a conversation.
    """
    return "\n".join(message["content"] for message in _messages(document, source))


def _conversation_error(document: Document, source: DocumentSource, problem: str) -> InputError:
    remedy = 'Write {"messages": [{"role": "user", "content": "..."}, ...]} on that line'
    return source.error(f"{document.where}: {problem}", remedy)


def _why_unanswered(messages: Sequence[Turn]) -> str:
    unknown = [one["role"] for one in messages if one["role"] not in KNOWN_ROLES]
    if not unknown:
        return "there is no answer of the assistant to train on"
    of_share_gpt = ", ".join(f"{theirs} for {ours}" for theirs, ours in ROLES.items())
    return (
        f"the role {unknown[0]!r} is unknown, and no message has the role {ASSISTANT}: roles are "
        f"{', '.join(KNOWN_ROLES)}, and in 'from' also {of_share_gpt}"
    )


ErrorOf = Callable[[str], InputError]


def _messages(document: Document, source: DocumentSource) -> list[Turn]:
    refuse = functools.partial(_conversation_error, document, source)
    row = json.loads(document.text)
    if "messages" not in row and "instruction" in row and "output" in row:
        question = "\n\n".join(str(row[key]) for key in ("instruction", "input") if row.get(key))
        answer = _text_of(row, "output", "the row", refuse)
        return [{"role": "user", "content": question}, {"role": ASSISTANT, "content": answer}]
    of_share_gpt = "messages" not in row and isinstance(row.get("conversations"), list)
    name = "conversations" if of_share_gpt else "messages"
    entries = row.get(name)
    if not isinstance(entries, list):
        raise refuse(f"has no list of messages; its keys are: {', '.join(row) or 'none'}")
    return [
        _message(entry, f"{name}[{number}]", refuse, of_share_gpt=of_share_gpt)
        for number, entry in enumerate(entries)
    ]


def _message(entry: Any, place: str, refuse: ErrorOf, *, of_share_gpt: bool) -> Turn:
    """Return a message with `role` and `content`, also from one with `from` and `value`."""
    if not isinstance(entry, dict):
        raise refuse(f"{place} is not an object")
    if "from" in entry or (of_share_gpt and "role" not in entry):
        role = _text_of(entry, "from", place, refuse)
        normalized = {
            "role": ROLES.get(role, role),
            "content": _text_of(entry, "value", place, refuse),
        }
    else:
        normalized = {key: _text_of(entry, key, place, refuse) for key in ("role", "content")}
    return entry | normalized


def _text_of(entry: Mapping[str, Any], key: str, place: str, refuse: ErrorOf) -> str:
    """Return the text under a key, concatenated if it is a list of parts."""
    content = entry.get(key)
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"{place} has no text under {key!r}")
    texts = []
    for number, part in enumerate(content):
        is_object = isinstance(part, dict)
        kind = part.get("type") if is_object else part
        if not is_object or kind != "text" or not isinstance(part.get("text"), str):
            name = f"{place}.{key}[{number}]"
            raise refuse(f"{name} has type {kind!r}, but only text is supported")
        texts.append(part["text"])
    return "".join(texts)


Segments = list[tuple[np.ndarray, bool]]


def _segments_without_template(messages: Sequence[Turn], tokenizer: Tokenizer) -> Segments:
    segments: Segments = [(np.array([tokenizer.begin]), False)]
    for message in messages:
        segments.append((tokenizer.encode(_header(message["role"])), False))
        if message["role"] == ASSISTANT:
            answer = tokenizer.encode(message["content"])
            segments.append((np.append(answer, tokenizer.end), True))
        else:
            segments.append((tokenizer.encode(message["content"] + "\n"), False))
    return segments


def _header(role: str) -> str:
    return f"<|{role}|>\n"


def _segments_by_template(
    template: ChatTemplate,
    messages: Sequence[Turn],
    tokenizer: Tokenizer,
    source: DocumentSource,
    refuse: ErrorOf,
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
                raise _missing_day_error(source) from error
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
            raise refuse(
                "the tokenizer's chat template changes earlier messages when later ones follow"
            )
        segments.append((tokenizer.encode(before.removeprefix(written)), False))
        segments.append((tokenizer.encode(after.removeprefix(before)), True))
        written = after
    return segments


def _missing_day_error(source: DocumentSource) -> InputError:
    return InputError(
        f"{source.field.partition('.')[0]}.today",
        None,
        f"must be set: the tokenizer's chat template writes the date ({TODAY})",
        "Write a date such as 2026-11-22, which a resumed run uses again",
    )


@functools.lru_cache(maxsize=2)
def _template(text: str, today: str | None) -> ChatTemplate:
    try:
        return ChatTemplate(text, today)
    except TemplateError as error:
        raise InputError(
            "data.tokenizer",
            text,
            f"its chat template is not valid: {error}",
            "Correct the template",
        ) from error
