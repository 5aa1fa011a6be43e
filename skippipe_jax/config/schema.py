"""A JSON schema of the configuration, by which editors complete and check its YAML."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any

from skippipe_sched.problem.case import OPTIONAL, REQUIRED

from skippipe_jax.config.choices import Choice
from skippipe_jax.config.files import EXTENDS
from skippipe_jax.config.keys import Key, parts, sections
from skippipe_jax.config.run import Config

# The last two are of a case that leaves stages or path lengths open.
CASE_KEYS = (*REQUIRED, *OPTIONAL, "stage_count", "skip_ratio")
DRAFT = "https://json-schema.org/draft/2020-12/schema"
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", types.NoneType: "null"}


def schema() -> dict[str, Any]:
    """Return the schema of the whole configuration, in draft 2020-12."""
    told = {section.name: section for section in sections()}

    def of_section(kind: Any, place: str) -> dict[str, Any]:
        found = {
            "type": "object",
            "description": told[place].about,
            "properties": {key.name: of_key(key) for key in told[place].keys},
            "additionalProperties": False,
        }
        shorthands = list(getattr(kind, "SHORTHAND", ()))
        return {"anyOf": [{"enum": shorthands}, found]} if shorthands else found

    def of_key(key: Key) -> dict[str, Any]:
        default = {} if key.is_section else {"default": key.default}
        return {"description": key.about} | default | of_type(key.hint, key.path, key.choices)

    def of_type(hint: Any, path: str, choices: Choice | None) -> dict[str, Any]:
        if dataclasses.is_dataclass(hint):
            return of_section(hint, path)
        if hint is str and choices is not None:
            return {"enum": list(choices)}
        if hint is dict:
            return {"type": "object", "propertyNames": {"enum": list(CASE_KEYS)}}
        inner = [of_type(part, path, choices) for part in parts(hint)]
        if typing.get_origin(hint) is tuple:
            return {"type": "array", "items": inner[0]}
        if hint is float and path.endswith("_s"):
            return {"type": ["number", "string"]}
        return {"anyOf": inner} if inner else {"type": TYPES[hint]}

    whole = of_section(Config, "")
    about = "another file, beside this one: it says what this one does not"
    whole["properties"][EXTENDS] = {"description": about, "type": "string"}
    return {"$schema": DRAFT, "title": "Configuration of a run"} | whole


def to_text() -> str:
    """Return the schema as the text of its file."""
    return json.dumps(schema(), indent=1, ensure_ascii=False) + "\n"
