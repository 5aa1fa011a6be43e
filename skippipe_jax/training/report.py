"""Reports that the hosts of a generation exchange once at its start, and the plan from them.

Each host sends one `GenerationReport`, and `plan_session` derives a `SessionPlan` from the reports
of all hosts. It is a pure function, so all hosts get the same result from one exchange: each
further exchange would add the latency of the slowest link to a membership change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from skippipe_jax.cluster.agreement import gather
from skippipe_jax.cluster.membership import Group
from skippipe_jax.consensus.generations import Generation


@dataclass(frozen=True, kw_only=True)
class GenerationReport:
    """Report of one host to all others; every value is JSON-serializable.

    Attributes:
        member: the host, its process, its address and its nodes, as in membership.jsonl.
        process: the number of its process.
        endpoint: the endpoint of its transfer servers.
        microbatches_read: microbatches read before the next step; 0 on a host that takes the state
            of others.
        restores_checkpoint: whether it restores a checkpoint.
        squared_norms: squared gradient norms of each stage's blocks at the last step, if known.
        optimizer_updates: number of updates that the optimizer has made, if known.
        serves_data: whether it serves a data node.
        data_fingerprint: fingerprint of the text that it has read, if any.
        run_fingerprint: fingerprint of the text that the run reads, if received before.
        device_kinds: JAX's device kind of each of its devices.
        held_out_microbatches: number of held-out microbatches that it has read.
        measured: its measurements, in the form of `JoinMeasurements`, if any.
        known_plans: the digests of the plans that it has found or received.
        too_long: messages on documents longer than a sequence, if it reads any.
        damaged: the fields of the error about the newest checkpoint (field, value, problem,
            remedy), if this host has found it damaged.
        recovery: its pending line of recoveries.jsonl, if any.
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
    """Result of the exchange, the same on all hosts of a generation.

    Attributes:
        reports: the reports of all hosts, the leader's first.
        microbatches_read: microbatches read before the next step.
        restores_checkpoint: whether any host restores a checkpoint.
        squared_norms, optimizer_updates: as in a report; None if no host has them.
        data_fingerprint: fingerprint of the text that the run reads; None if no host has it.
        without_text: the hosts that serve a data node but lack that text.
        held_out_microbatches: number of held-out microbatches.
        too_long: as in the report of the first host that serves a data node.
        plan_source: the host that sends the plan of the generation to hosts that lack it; None if
            no host lacks it or no host has it.
        is_plan_known: whether any host has the plan of the generation.
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
        """Endpoints of the transfer servers of each host."""
        return [own.endpoint for own in self.reports]


def plan_session(generation: Generation, reports: Sequence[GenerationReport]) -> SessionPlan:
    """Derive the session plan from the reports of all hosts of a generation, the leader's first."""
    plan_hosts = [host for host, own in enumerate(reports) if generation.plan in own.known_plans]
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
        plan_source=plan_hosts[0] if 0 < len(plan_hosts) < len(reports) else None,
        is_plan_known=bool(plan_hosts),
    )


def exchange_reports(group: Group, report: GenerationReport, timeout_s: float) -> SessionPlan:
    """Exchange reports with all hosts and derive the session plan; all hosts call this together."""
    raw = gather(group, "report", lambda: asdict(report), timeout_s)
    reports = [GenerationReport(**raw[index]) for index in range(group.count)]
    return plan_session(group.generation, reports)
