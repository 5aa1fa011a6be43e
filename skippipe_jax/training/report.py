"""What the hosts of a generation tell each other once, as it begins, and what follows from that.

Each host tells one `GenerationReport`, and `plan_session` derives from those of all hosts what each
of them goes on by. It is a pure function, so all hosts come to the same, in one exchange: over slow
links every further one would make a membership change longer by the latency of the slowest link.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.group import Group
from skippipe_jax.consensus.generations import Generation


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """What one host tells all others; every value is one that JSON can hold.

    Attributes:
        member: the host, its process, its address and its nodes, as in membership.jsonl.
        process: its number.
        endpoint: of its transfer servers.
        microbatches_read: before the next step; 0 on a host that takes the state of others.
        restores_checkpoint: whether it goes on from a checkpoint.
        squared_norms: of the gradients of each stage's blocks at the last step, if it knows them.
        optimizer_updates: how many the optimizer has made, if it knows that.
        serves_data: whether a data node is served there.
        data_fingerprint: of the text that it has read, if it has read any.
        run_fingerprint: of the text that the run reads, if it has heard of that before.
        device_kinds: what JAX calls each of its devices.
        held_out_microbatches: that it has read of the held-out text, if it reads any.
        measured: what it has measured, as `Measured` tells it, if it has.
        known_plans: the digests of the plans that it has found, or heard of.
        too_long: what becomes of documents longer than a sequence, if it reads any.
        damaged: the fields of the error about the newest checkpoint (field, value, problem,
            remedy), if this host has found it damaged.
        recovery: its line of recoveries.jsonl that is yet to be written, if there is one.
        metrics_tail: its last lines of metrics.
    """

    member: Mapping[str, Any] = field(default_factory=dict)
    process: int = 0
    endpoint: Mapping[str, Any] = field(default_factory=dict)
    microbatches_read: int = 0
    restores_checkpoint: bool = False
    squared_norms: Sequence[float] | None = None
    optimizer_updates: int | None = None
    serves_data: bool = False
    data_fingerprint: str | None = None
    run_fingerprint: str | None = None
    device_kinds: Sequence[str] = ()
    held_out_microbatches: int = 0
    measured: Mapping[str, Any] | None = None
    known_plans: Sequence[str] = ()
    too_long: Sequence[str] = ()
    damaged: Sequence[str] | None = None
    recovery: dict[str, Any] | None = None
    metrics_tail: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class SessionPlan:
    """What all hosts of a generation go on by.

    Attributes:
        reports: of all hosts, the leader's first.
        microbatches_read: before the next step.
        restores_checkpoint: whether a host goes on from a checkpoint.
        squared_norms, optimizer_updates: as in a report; None where no host knows them.
        data_fingerprint: of the text that the run reads; None where no host knows it.
        without_text: the hosts that serve a data node, and have not that text.
        held_out_microbatches: how many there are.
        too_long: as in the report of the first host that serves a data node.
        plan_source: the host that tells the plan of the generation to those that lack it; None
            where none lacks it, or none knows it.
        is_plan_known: whether a host knows the plan of the generation.
    """

    reports: Sequence[GenerationReport]
    microbatches_read: int
    restores_checkpoint: bool
    squared_norms: tuple[float, ...] | None
    optimizer_updates: int | None
    data_fingerprint: str | None
    without_text: Sequence[int]
    held_out_microbatches: int
    too_long: Sequence[str]
    plan_source: int | None
    is_plan_known: bool

    @property
    def endpoints(self) -> list[Mapping[str, Any]]:
        """Return those of the transfer servers of each host."""
        return [own.endpoint for own in self.reports]


def plan_session(generation: Generation, reports: Sequence[GenerationReport]) -> SessionPlan:
    """Derive what follows from the reports of all hosts of a generation, the leader's first."""
    knowing = [host for host, own in enumerate(reports) if generation.plan in own.known_plans]
    norms = [own.squared_norms for own in reports if own.squared_norms is not None]
    updates = [own.optimizer_updates for own in reports if own.optimizer_updates is not None]
    known = [own.run_fingerprint for own in reports if own.run_fingerprint is not None]
    read = [own.data_fingerprint for own in reports if own.data_fingerprint is not None]
    text = known[0] if known else min(read, default=None)
    reader = next((own for own in reports if own.serves_data), GenerationReport())
    return SessionPlan(
        reports=reports,
        microbatches_read=max(own.microbatches_read for own in reports),
        restores_checkpoint=any(own.restores_checkpoint for own in reports),
        squared_norms=tuple(norms[0]) if norms else None,
        optimizer_updates=max(updates, default=None),
        data_fingerprint=text,
        without_text=[
            host
            for host, own in enumerate(reports)
            if own.serves_data and (own.data_fingerprint is None or own.data_fingerprint != text)
        ],
        held_out_microbatches=reader.held_out_microbatches,
        too_long=reader.too_long,
        plan_source=knowing[0] if 0 < len(knowing) < len(reports) else None,
        is_plan_known=bool(knowing),
    )


def exchange_reports(group: Group, report: GenerationReport, timeout_s: float) -> SessionPlan:
    """Tell all hosts a report, hear theirs, and plan; all hosts call this together."""
    told = gather(group, "report", lambda: asdict(report), timeout_s)
    reports = [GenerationReport(**told[index]) for index in range(group.count)]
    return plan_session(group.generation, reports)
