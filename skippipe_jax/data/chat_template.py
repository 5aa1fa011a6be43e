"""Chat templates: Jinja as transformers runs it, and which of what they write is an answer.

A template may say so itself, by ``{% generation %}`` and ``{% endgeneration %}`` around answers.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import secrets
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from skippipe_sched import fields
from skippipe_sched.errors import InputError

# They stand in what is written around answers; no text can know them before.
_BEGIN, _END = (f"<{secrets.token_hex(16)}>" for _ in range(2))

MOST_CHARACTERS = 1 << 24
"""No conversation is so long; a template with loops in one another may go on for ever."""

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
"""Templates that a name stands for."""

MARK = re.compile(r"<[^<>\s]+>")
"""What templates write around messages, such as <|eot_id|> and </s>; mostly a token of its own."""

TODAY = "strftime_now"
"""The function of templates that writes the time; here, the day that it is told."""


def template_text(name: str, field: str) -> str:
    """Return the template of this name, or else in the file of this path.

    Raises:
        InputError: naming `field`, if there is neither.
    """
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if not path.is_file():
        remedy = f"{fields.guess(name, TEMPLATES)}Write {', '.join(TEMPLATES)}, or name a file"
        raise InputError(field, name, "is neither a file nor the name of a template", remedy)
    return fields.read_text(path, field)


class ChatTemplate:
    """Writes conversations.

    Attributes:
        marks_answers: whether the template says itself what an answer is.
    """

    def __init__(self, text: str, today: str | None = None):
        """Compile a template, for which it is always the day `today` (as 2026-11-22).

        Without a day there is no ``strftime_now``: some templates then write one of their own.

        Raises:
            TemplateError: if it is none.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Answers]
        )
        environment.globals["raise_exception"] = _refuse
        if today is not None:
            day = datetime.datetime.fromisoformat(today)
            environment.globals[TODAY] = day.strftime
        # Jinja's own filter writes for HTML.
        environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        parsed = environment.parse(text)
        self.marks_answers = any(
            call.identifier == _Answers.identifier
            for call in parsed.find_all(nodes.ExtensionAttribute)
        )
        self._generate = environment.from_string(parsed).generate

    def write(self, **variables: Any) -> list[tuple[str, bool]]:
        """What the template makes of `messages` and other variables, in pieces: text, is an answer.

        Raises:
            TemplateError: if the template says so, or it does what it must not.
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
    """The block ``generation``: what lies in it is written between two marks."""

    def __init__(self, environment: Environment):
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _refuse(problem: str) -> None:
    raise TemplateError(problem)
