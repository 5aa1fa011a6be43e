"""Conversion of the messages of `generations` to JSON and back, with validation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
from msgspec import structs

from skippipe_jax.config.cluster import AVERAGE, BUDDY, SKIP
from skippipe_jax.consensus.generations import (
    Ask,
    Decided,
    Generation,
    Message,
    NumbersOfStages,
    Promise,
)

SOURCES = {BUDDY: 1, AVERAGE: 2, SKIP: 1}
"""Number of sources from which a lost stage is rebuilt, by policy."""


def to_json(message: Message) -> list[Any]:
    """Return the name of a message's type, followed by the values of its fields."""
    return msgspec.to_builtins(message)


def parse(raw: Any) -> Message:
    """Parse and validate a message from another host.

    Raises:
        ValueError: if it is not a valid message.
    """
    message: Message = msgspec.convert(raw, Message)
    match message:
        case Ask(generation=Generation() as generation) | Decided(generation=generation):
            return structs.replace(message, generation=_checked(generation))
        case Promise(accepted=(ballot, generation)):
            return structs.replace(message, accepted=(ballot, _checked(generation)))
    return message


def generation_to_json(generation: Generation) -> dict[str, Any]:
    """Convert a generation to JSON for storage."""
    return msgspec.to_builtins(generation)


def parse_generation(raw: Any) -> Generation:
    """Parse and validate a generation from storage.

    Raises:
        ValueError: if it is not a valid generation.
    """
    return _checked(msgspec.convert(raw, Generation))


def _checked(generation: Generation) -> Generation:
    """Return a generation with a parsed placement; raise `ValueError` for invalid references."""
    members = generation.members
    placement = msgspec.convert(generation.placement, NumbersOfStages)
    named = {generation.leader, *generation.fresh, *generation.apart}
    named |= {host for own in generation.holders for host in own}
    named |= {source for one in generation.remade for source in one.sources}
    if sorted(set(members)) != [*members] or len(generation.processes) != len(members):
        raise ValueError("the members are not sorted, or do not match the processes")
    if not named <= set(members):
        raise ValueError("a named host is not a member")
    remade = [one.stage for one in generation.remade]
    if any(stage >= len(placement) for stage in (*generation.lost, *generation.left_out, *remade)):
        raise ValueError("a stage is out of range")
    if any(len(one.sources) != SOURCES.get(one.by) for one in generation.remade):
        raise ValueError("a lost stage has the wrong number of sources")
    return replace(generation, placement=placement)
