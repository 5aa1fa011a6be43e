"""Every state that three hosts can come to by the rules of `decisions`, within bounds.

One link is cut, one host may die at any point, and one may abandon its generation. Messages are
delivered in any order, and each host ticks whenever it likes, as long as its own ballots stay
within a number of rounds. Only the beats of a tick are left out: what they bring comes in the calm
that is tried from each state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from skippipe_jax.consensus.decisions import advance, first_state
from skippipe_jax.consensus.generations import (
    Abandoned,
    ConsensusRules,
    ConsensusState,
    Event,
    Generation,
    Heartbeat,
    Held,
    Presence,
    Received,
    Send,
    Stored,
    Tick,
    Writes,
)

CALM_TICKS = 40
HOSTS = (0, 1, 2)
FIRST = Generation(1, HOSTS, HOSTS, 0, 0, placement=((0, 1, 2),))
RULES = ConsensusRules(
    host_of=HOSTS,
    stages=1,
    placed=lambda placement, *_: placement,
    add_up=lambda totals: tuple(map(sum, zip(*totals.values(), strict=True))),
)


Sends = tuple[tuple[int, int], ...]
"""Targets, and the numbers of messages to them."""


class Node(NamedTuple):
    """The hosts, as numbers of their states, what is under way, and who is dead."""

    states: tuple[int, ...]
    messages: frozenset[tuple[int, int, int]]  # source, target, number of the message
    dead: int | None = None


class Exploration:
    """The nodes that are reached from hosts that have each computed the first step."""

    def __init__(self, cut: tuple[int, int], dies: int, rounds: int, abandons: int | None = None):
        self.cut, self.dies, self.rounds = frozenset(cut), dies, rounds
        self.abandons = abandons
        self._numbers: dict[Any, int] = {}
        self._values: list[Any] = []
        self._after: dict[Any, tuple[int, Sends, Sends]] = {}
        self._goes_on: set[Node] = set()

    def number(self, value: Any) -> int:
        """The same number for equal states and messages."""
        key = frozen(value)
        if key not in self._numbers:
            self._numbers[key] = len(self._values)
            self._values.append(value)
        return self._numbers[key]

    def first(self) -> Node:
        node = Node(tuple(self.number(first_state(h, RULES, FIRST, 0)) for h in HOSTS), frozenset())
        for host in HOSTS:
            node = self.told(node, host, Held(1, 1, (1.0,)))
        for host in self.cut:
            [other] = self.cut - {host}
            node = self.told(node, host, Presence(other, is_there=False))
        return node

    def told(self, node: Node, host: int, event: Event, *, beats: bool = True) -> Node:
        """An event comes to a host, and what it sends is under way."""
        return self._told(node, host, event, event, beats=beats)

    def delivered(self, node: Node, sent: tuple[int, int, int]) -> Node:
        source, target, message = sent
        rest = Node(node.states, node.messages - {sent}, node.dead)
        return self._told(rest, target, (source, message))

    def _told(
        self, node: Node, host: int, key: Any, event: Event | None = None, *, beats: bool = True
    ) -> Node:
        given = node.states[host], key
        if given not in self._after:
            told = event or Received(key[0], self._values[key[1]])
            state, effects = advance(self._values[given[0]], told)
            for one in effects:
                if isinstance(one, Writes):  # Nobody else does, of two of which one is dead.
                    state, effects = advance(state, Stored(one.generation))
            sent = tuple((one.target, one.message) for one in effects if isinstance(one, Send))
            numbered = tuple((target, self.number(message)) for target, message in sent)
            calls = tuple(
                n for n, (_, m) in zip(numbered, sent, strict=True) if type(m) is not Heartbeat
            )
            self._after[given] = self.number(state), numbered, calls
        state, with_beats, calls = self._after[given]
        messages = {
            (host, target, message)
            for target, message in (with_beats if beats else calls)
            if {host, target} != self.cut and target != node.dead
        }
        states = (*node.states[:host], state, *node.states[host + 1 :])
        return Node(states, node.messages | messages, node.dead)

    def following(self, node: Node) -> Iterator[Node]:
        for sent in node.messages:
            yield self.delivered(node, sent)
        for host in self.live(node):
            state = self.state(node, host)
            ticked = self.told(node, host, Tick(), beats=False)
            if state.number == 1 and self.state(ticked, host).highest[0] <= self.rounds:
                yield ticked
            if host == self.abandons and state.number == 1 and state.takes_part:
                yield self.told(node, host, Abandoned(1))
            if node.dead is not None and node.dead not in state.suspected:
                yield self.told(node, host, Presence(node.dead, is_there=False))
        if node.dead is None:
            messages = frozenset(sent for sent in node.messages if sent[1] != self.dies)
            yield Node(node.states, messages, self.dies)

    def state(self, node: Node, host: int) -> ConsensusState:
        return self._values[node.states[host]]

    def live(self, node: Node) -> list[int]:
        return [host for host in HOSTS if host != node.dead]

    def require_agreement(self, node: Node) -> None:
        """Nobody has decided otherwise, the dead one included, nor counted a step otherwise."""
        generations: dict[int, Generation] = {1: FIRST}
        outcomes: dict[int, Any] = {}
        for host in HOSTS:
            own = self.state(node, host)
            assert own.generation is not None
            assert generations.setdefault(own.generation.number, own.generation) == own.generation
            step, outcome = own.standing.applied, own.standing.outcome
            assert outcome is None or outcomes.setdefault(step, outcome) == outcome
        last = generations[max(generations)]
        for host in self.live(node):
            own = self.state(node, host)
            if own.takes_part and own.generation == last:
                assert own.standing.applied >= last.step, "what counts has been applied"

    def has_majority(self, node: Node) -> bool:
        """Whether two that live hear each other."""
        live = frozenset(self.live(node))
        return len(live) == 3 or live != self.cut

    def require_progress(self, node: Node) -> None:
        """In a calm a step is made by all members of a generation."""
        node, passed = self.settled(node), list[Node]()
        for _ in range(CALM_TICKS):
            if node in self._goes_on:
                break
            passed.append(node)
            before = max(self.state(node, host).standing.applied for host in HOSTS)
            for host in self.live(node):
                own = self.state(node, host)
                if own.number:
                    held = Held(own.number, own.standing.applied + 1, (1.0,))
                    node = self.told(node, host, held)
                node = self.told(node, host, Tick())
            node = self.settled(node)
            if self.has_stepped(node, before):
                break
        else:
            raise AssertionError(f"no step in {CALM_TICKS} ticks: {self.shown(passed[0])}")
        self._goes_on.update(passed)

    def settled(self, node: Node) -> Node:
        """All know who is dead, and all that is under way is delivered."""
        for host in self.live(node):
            if node.dead is not None:
                node = self.told(node, host, Presence(node.dead, is_there=False))
        while node.messages:
            node = self.delivered(node, min(node.messages))
        return node

    def has_stepped(self, node: Node, before: int) -> bool:
        own = max((self.state(node, host) for host in self.live(node)), key=lambda own: own.number)
        members = [self.state(node, host) for host in own.members]
        return all(
            host != node.dead and member.number == own.number and member.standing.applied > before
            for host, member in zip(own.members, members, strict=True)
        )

    def shown(self, node: Node) -> str:
        shown = (structs.replace(self.state(node, host), rules=None) for host in HOSTS)
        states = "\n".join(map(repr, shown))
        return f"dead {node.dead}\n{states}\n{[self._values[sent[2]] for sent in node.messages]}"


def explore(
    cut: tuple[int, int],
    dies: int,
    rounds: int,
    most: int = 1 << 60,
    *,
    abandons: int | None = None,
) -> int:
    """Visit all nodes, or so many, and require what has to hold in each; how many they were."""
    exploration = Exploration(cut, dies, rounds, abandons)
    first = exploration.first()
    seen, waiting = {first}, [first]
    for node in waiting:
        exploration.require_agreement(node)
        if exploration.has_majority(node):
            exploration.require_progress(node)
        for following in exploration.following(node):
            if following not in seen and len(seen) < most:
                seen.add(following)
                waiting.append(following)
    return len(seen)


def frozen(value: Any) -> Any:
    """Something that is hashed, and equal for equal values."""
    if isinstance(value, ConsensusRules):
        return None
    if isinstance(value, Mapping):
        return frozenset((key, frozen(part)) for key, part in value.items())
    if isinstance(value, tuple):
        return tuple(map(frozen, value))
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, *map(frozen, structs.astuple(value)))
    if is_dataclass(value):
        parts = (frozen(getattr(value, field.name)) for field in fields(value))
        return (type(value).__name__, *parts)
    return value
