"""Case of a service: hosts, the links between them, and the costs of the stages."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt64

from skippipe_sched import fields
from skippipe_sched.errors import InputError
from skippipe_sched.problem import links
from skippipe_sched.problem.case import of_each, of_each_stage

HeldStages = tuple[tuple[int, ...], ...]
"""Stages that each host holds, in increasing order."""
Route = tuple[int | None, ...]
"""Host that runs each stage; None for a stage that no host holds."""

FRONT = 0
"""Host that takes requests: it holds stage 0, and samples the tokens."""
# Larger values are mistakes, and would only fill the memory.
MOST_HOSTS, MOST_STAGES, MOST_GROUPS = 1_000, 256, 10_000
ROUNDING = 1e-9
REQUIRED = ("hosts", "links", "stage_bytes", "activation_bytes", "groups", "slots")
OPTIONAL = ("head_s", "same_location")
OF_HOST = ("location", "room_bytes", "step_s")


@dataclass(frozen=True, eq=False)
class ServingCase:
    """Checked case of a service. Host 0 is the front.

    Attributes:
        step_s: seconds of one step of a group on a host in a stage.
        room_bytes: memory of each host.
        stage_bytes: memory of each stage, with its weights and the caches of all groups.
        latency_s: latency in seconds of any message from one host to another.
        bandwidth: bytes per second of the link from one host to another.
        activation_bytes: of the message of one group from a stage to the next.
        groups: groups of sequences that are in flight at once.
        slots: sequences of a group; a step gives each of them one token.
        head_s: seconds that the front takes for the head and for sampling the tokens of a group.

    Raises:
        InputError: naming the field, if one has the wrong shape or is out of bounds, or if the
            front has no room for stage 0.
    """

    step_s: Float[np.ndarray, "hosts stages"]
    room_bytes: Float[np.ndarray, " hosts"]
    stage_bytes: Float[np.ndarray, " stages"]
    latency_s: Float[np.ndarray, "hosts hosts"]
    bandwidth: Float[np.ndarray, "hosts hosts"]
    activation_bytes: float
    groups: int
    slots: int
    head_s: float = 0.0

    def __post_init__(self) -> None:
        """Check all fields."""
        if np.ndim(self.step_s) != 2:
            problem = "must have a row for each host and a column for each stage"
            raise InputError("case.step_s", self.step_s, problem, "Give a matrix")
        hosts, stages = self.step_s.shape
        fields.integer(hosts, "case.hosts", 1, MOST_HOSTS)
        fields.integer(stages, "case.stages", 1, MOST_STAGES)
        self._check("step_s", (hosts, stages), above=True)
        self._check("room_bytes", (hosts,))
        self._check("stage_bytes", (stages,), above=True)
        self._check("latency_s", (hosts, hosts))
        self._check("bandwidth", (hosts, hosts), above=True)
        fields.number(self.activation_bytes, "case.activation_bytes", 0.0)
        fields.number(self.head_s, "case.head_s", 0.0)
        fields.integer(self.groups, "case.groups", 1, MOST_GROUPS)
        fields.integer(self.slots, "case.slots", 1)
        if self.stage_bytes[0] > self.room_bytes[FRONT]:
            raise InputError(
                f"case.room_bytes[{FRONT}]",
                float(self.room_bytes[FRONT]),
                f"the front must hold stage 0, which needs {self.stage_bytes[0]:g} bytes",
                "Give the front more memory, or partition the model differently",
            )

    def _check(self, name: str, shape: tuple[int, ...], *, above: bool = False) -> None:
        array = getattr(self, name)
        if np.shape(array) != shape:
            problem = f"has shape {list(np.shape(array))}, expected {list(shape)}"
            remedy = f"Give it for {self.step_s.shape[0]} hosts and {self.step_s.shape[1]} stages"
            raise InputError(f"case.{name}", array, problem, remedy)
        valid = (array > 0.0 if above else array >= 0.0) & (array <= fields.MAX_NUMBER)
        for index in np.argwhere(~valid).tolist():
            indexes = "".join(f"[{number}]" for number in index)
            fields.number(float(array[tuple(index)]), f"case.{name}{indexes}", 0.0, above=above)

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.room_bytes)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.stage_bytes)

    def with_stages(self, which: Bool[np.ndarray, " stages"]) -> ServingCase:
        """Return the case of a model that has only these stages."""
        step_s, stage_bytes = self.step_s[:, which], self.stage_bytes[which]
        return replace(self, step_s=step_s, stage_bytes=stage_bytes)

    @cached_property
    def kinds(self) -> UInt64[np.ndarray, " stages"]:
        """Index of each stage's size, from 1: stages of the same size have the same number."""
        sizes = np.unique(self.stage_bytes, return_inverse=True)[1]
        return sizes.astype(np.uint64) + np.uint64(1)

    @cached_property
    def sending_s(self) -> Float[np.ndarray, "hosts hosts"]:
        """Seconds for which a message occupies the link from host to host; 0 to itself."""
        sending = self.activation_bytes / self.bandwidth
        np.fill_diagonal(sending, 0.0)
        return sending

    @cached_property
    def hop_s(self) -> Float[np.ndarray, "hosts hosts"]:
        """Seconds of a message from host to host without contention."""
        hop = self.latency_s + self.sending_s
        np.fill_diagonal(hop, 0.0)
        return hop


def load_serving_case(path: Path) -> ServingCase:
    """Read and check a case file (YAML) of a service, including its link table."""
    return parse_serving_case(fields.load_yaml(path, "case"), path.parent)


def parse_serving_case(value: Any, folder: Path = Path()) -> ServingCase:
    """Check the case of a service given as a mapping; `folder` is that of a link table, if any.

    Hosts are a list of `location`, `room_bytes` and `step_s`, the front first; `links` and
    `same_location` are as in cases of training. `step_s` is one number for all stages, or a number
    for each.

    Raises:
        InputError: naming the field, its value, and what to write instead.
    """
    raw = fields.checked_mapping(value, "case", (*REQUIRED, *OPTIONAL), REQUIRED)
    sizes = fields.sequence(raw["stage_bytes"], "case.stage_bytes")
    locations, step_s, room_bytes = [], [], []
    for index, entry in enumerate(fields.sequence(raw["hosts"], "case.hosts")):
        field = f"case.hosts[{index}]"
        host = fields.checked_mapping(entry, field, OF_HOST, OF_HOST)
        locations.append(fields.text(host["location"], f"{field}.location"))
        step_s.append(_durations(host["step_s"], f"{field}.step_s", len(sizes)))
        room_bytes.append(fields.number(host["room_bytes"], f"{field}.room_bytes", 0.0))
    table = links.table(links.rows_of(raw["links"], folder), links.same_location_of(raw))
    latency_s, bandwidth = table.matrices(locations)
    return ServingCase(
        step_s=np.array(step_s),
        room_bytes=np.array(room_bytes),
        stage_bytes=np.array(of_each_stage(sizes, "case.stage_bytes", len(sizes))),
        latency_s=latency_s,
        bandwidth=bandwidth,
        activation_bytes=fields.number(raw["activation_bytes"], "case.activation_bytes", 0.0),
        groups=raw["groups"],
        slots=raw["slots"],
        head_s=fields.duration(raw.get("head_s", 0.0), "case.head_s"),
    )


def _durations(value: Any, field: str, stages: int) -> tuple[float, ...]:
    """Read the seconds of each stage, from one time for all of them or a list."""
    read = partial(fields.duration, above=True)
    return of_each(value, field, read, stages, ("stages", "stage"))


def checked_placement(case: ServingCase, placement: Any, field: str) -> HeldStages:
    """Return the stages that each host holds, after checking them.

    Raises:
        InputError: if there is no list of stages for each host, or a host has no room for its
            stages.
    """
    rows = fields.sequence(placement, field)
    if len(rows) != case.hosts:
        problem = f"has {len(rows)} entries for {case.hosts} hosts"
        raise InputError(field, placement, problem, "Write a list of stages for each host")
    checked = []
    for host, row in enumerate(rows):
        host_field = f"{field}[{host}]"
        stages = fields.sequence(row, host_field, minimum_length=0)
        for number, stage in enumerate(stages):
            fields.integer(stage, f"{host_field}[{number}]", 0, case.stages - 1)
        if sorted({*stages}) != stages:
            raise InputError(host_field, row, "is not ascending", "Name each stage once, in order")
        if (0 in stages) != (host == FRONT):
            problem = "stage 0 must be on the front and on no other host"
            raise InputError(host_field, row, problem, f"List stage 0 only in {field}[{FRONT}]")
        needed = float(case.stage_bytes[stages].sum())
        if needed > case.room_bytes[host] * (1 + ROUNDING):
            problem = f"needs {needed:g} bytes, but the host has room for {case.room_bytes[host]:g}"
            raise InputError(host_field, row, problem, "Remove a stage")
        checked.append(tuple(stages))
    return tuple(checked)


def checked_lost(case: ServingCase, lost: Collection[int]) -> frozenset[int]:
    """Return the lost hosts, which can be any but the front.

    Raises:
        InputError: if one is the front, or not a host of the case.
    """
    for host in lost:
        fields.integer(host, "lost", FRONT + 1, case.hosts - 1)
    return frozenset(lost)
