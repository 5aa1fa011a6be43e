"""The messages of `generations` as JSON, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from skippipe_jax.config.recovery import AVERAGE, BUDDY, SKIP
from skippipe_jax.consensus.generations import (
    Accepted,
    Ask,
    Ballot,
    Beat,
    Contribution,
    Counts,
    Decided,
    Generation,
    Message,
    Promise,
    Remade,
    Standing,
)

SOURCES = {BUDDY: 1, AVERAGE: 2, SKIP: 1}
"""By how many members a stage is made anew in each way."""

MOST_NUMBERS = 1 << 14
"""The longest list of numbers in a message: totals, the nodes of a stage, hosts."""


def to_json(message: Message) -> list[Any]:
    """The name of the message and its fields."""
    values = [getattr(message, field.name) for field in fields(message)]
    return [type(message).__name__, *(_plain(value) for value in values)]


def parse(given: Any) -> Message:
    """The message that a host has sent.

    Raises:
        ValueError: if it is none.
    """
    match given:
        case [str(name), *values] if name in _PARSERS:
            kind, parsers = _PARSERS[name]
            return kind(*(parser(value) for parser, value in zip(parsers, values, strict=True)))
    raise ValueError("is no message of ours")


def generation_to_json(generation: Generation) -> dict[str, Any]:
    """A generation as storage holds it."""
    return asdict(generation)


def parse_generation(given: Any) -> Generation:
    """The generation that storage holds.

    Raises:
        ValueError: if it is none.
    """
    return _generation(given)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _number(given: Any, least: int = 0) -> int:
    if type(given) is not int or not least <= given < 1 << 62:
        raise ValueError("is no number of ours")
    return given


def _text(given: Any) -> str:
    if type(given) is not str or len(given) > MOST_NUMBERS:
        raise ValueError("is no text of ours")
    return given


def _flag(given: Any) -> bool:
    if type(given) is not bool:
        raise ValueError("is no flag")
    return given


def _list(given: Any, part: Callable[[Any], Any]) -> tuple[Any, ...]:
    if type(given) is not list or len(given) > MOST_NUMBERS:
        raise ValueError("is no list of ours")
    return tuple(map(part, given))


def _member(given: Any, name: str) -> Any:
    if type(given) is not dict or name not in given:
        raise ValueError(f"has no {name}")
    return given[name]


def _numbers(given: Any) -> tuple[int, ...]:
    return _list(given, _number)


def _sum(given: Any) -> float:
    """One of the totals, which may be infinite or no number."""
    if type(given) is not float and (type(given) is not int or abs(given) >= 1 << 62):
        raise ValueError("is no sum of ours")
    return float(given)


def _sums(given: Any) -> tuple[float, ...]:
    return _list(given, _sum)


def _placement(given: Any) -> tuple[tuple[int, ...], ...]:
    return _list(given, _numbers)


def _ballot(given: Any) -> Ballot:
    rounds, host = _pair(given)
    return _number(rounds), _number(host, least=-1)


def _optional(parse_value: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda given: None if given is None else parse_value(given)


def _pair(given: Any) -> tuple[Any, Any]:
    if type(given) is not list or len(given) != 2:
        raise ValueError("is no pair")
    return given[0], given[1]


def _standing(given: Any) -> Standing:
    return Standing(
        _number(_member(given, "applied")),
        _optional(_sums)(_member(given, "outcome")),
        _flag(_member(given, "holds_next")),
        _number(_member(given, "saved")),
        _numbers(_member(given, "holds")),
        copies=_list(_member(given, "copies"), _copy),
    )


def _copy(given: Any) -> tuple[int, int]:
    stage, step = _pair(given)
    return _number(stage), _number(step)


def _remade(given: Any) -> Remade:
    by = _text(_member(given, "by"))
    if by not in SOURCES:
        raise ValueError("is no way to make a stage")
    made = Remade(
        _number(_member(given, "stage")),
        by,
        _number(_member(given, "step")),
        _numbers(_member(given, "sources")),
    )
    if len(made.sources) != SOURCES[by]:
        raise ValueError("are not so many as it takes")
    return made


def _generation(given: Any) -> Generation:
    members, processes = _numbers(_member(given, "members")), _numbers(_member(given, "processes"))
    leader, fresh = _number(_member(given, "leader")), _numbers(_member(given, "fresh"))
    apart = _numbers(_member(given, "apart"))
    remade = _list(_member(given, "remade"), _remade)
    placement = _placement(_member(given, "placement"))
    holders, lost = _placement(_member(given, "holders")), _numbers(_member(given, "lost"))
    named = {*fresh, *apart, *(host for own in holders for host in own)}
    named |= {source for one in remade for source in one.sources}
    are_members = leader in members and named <= set(members)
    left_out = _numbers(_member(given, "left_out"))
    named_stages = (*lost, *left_out, *(one.stage for one in remade))
    if any(stage >= len(placement) for stage in named_stages):
        raise ValueError("is no stage")
    if not are_members or sorted(set(members)) != [*members] or len(processes) != len(members):
        raise ValueError("are no members")
    return Generation(
        _number(_member(given, "number")),
        members,
        processes,
        leader,
        _number(_member(given, "step")),
        _optional(_sums)(_member(given, "outcome")),
        fresh,
        _flag(_member(given, "is_rewound")),
        _flag(_member(given, "is_last")),
        placement,
        _text(_member(given, "cause")),
        _number(_member(given, "start")),
        holders,
        _text(_member(given, "plan")),
        lost=lost,
        remade=remade,
        apart=apart,
        left_out=left_out,
        saved=_number(_member(given, "saved")),
    )


def _accepted(given: Any) -> tuple[Ballot, Generation]:
    ballot, generation = _pair(given)
    return _ballot(ballot), _generation(generation)


_PARSERS: dict[str, tuple[Callable[..., Message], tuple[Callable[[Any], Any], ...]]] = {
    "Ask": (Ask, (_number, _ballot, _optional(_generation))),
    "Promise": (Promise, (_number, _ballot, _standing, _optional(_accepted))),
    "Accepted": (Accepted, (_number, _ballot)),
    "Decided": (Decided, (_generation,)),
    "Beat": (Beat, (_number, _number, _ballot, _numbers, _flag, _flag, _flag)),
    "Contribution": (Contribution, (_number, _number, _sums)),
    "Counts": (Counts, (_number, _number, _sums)),
}
