"""Status of a run as text, for a terminal."""

from __future__ import annotations

from skippipe_sched.errors import printable
from skippipe_sched.figures.amounts import duration_text, seconds_text, size_text
from skippipe_sched.figures.tables import aligned

from skippipe_jax.connections.status import Progress, RunStatus

MOST_SHOWN = 8
"""Maximum number of links shown."""


def status_text(status: RunStatus) -> str:
    """Return the status on one screen: progress, hosts, stages and slowest links."""
    leading = [] if status.generation is None else [f"generation {status.generation}"]
    if status.leader is not None:
        leading.append(f"leader: host {status.leader}")
    lines = [
        f"run {status.run}: {status.phase} (reported by host {status.host})",
        _progress(status.progress),
        ", ".join(leading),
        _missing(status),
    ]
    parts = ["\n".join(filter(None, lines)), _hosts(status)]
    if status.stages:
        parts.append(
            "stage  hosts\n"
            + "\n".join(
                f"{stage:5}  {_numbers(hosts) or 'lost'}"
                for stage, hosts in enumerate(status.stages)
            )
        )
    if status.links:
        parts.append(_links(status))
    return printable("\n\n".join(parts), kept="\n")


def _progress(progress: Progress | None) -> str:
    if progress is None:
        return ""
    parts = [f"step {progress.step}/{progress.steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.seconds_per_iteration is not None:
        parts.append(f"{seconds_text(progress.seconds_per_iteration)} an iteration")
    if progress.left_s is not None:
        parts.append(f"{duration_text(progress.left_s)} left")
    return "  ".join(parts)


def _missing(status: RunStatus) -> str:
    """Return a line with the hosts and stages that are missing."""
    parts = []
    stages = [stage for stage, hosts in enumerate(status.stages) if not hosts]
    if stages:
        parts.append(f"stages lost: {_numbers(stages)}")
    for state in ("waited for", "lost", "left", "joining"):
        hosts = [host.host for host in status.hosts if host.state == state]
        if hosts:
            parts.append(f"hosts {state}: {_numbers(hosts)}")
    return "; ".join(parts) or "all hosts are present"


def _hosts(status: RunStatus) -> str:
    heads = "host", "state", "stages", "location", "address", "name"
    rows = [
        (
            str(host.host),
            host.state,
            _numbers(host.stages),
            host.location or "",
            host.address or "",
            host.name or "",
        )
        for host in status.hosts
    ]
    return aligned([heads, *rows], left=range(len(heads)))


def _links(status: RunStatus) -> str:
    shown = status.links[:MOST_SHOWN]
    which = "measured" if status.links_are_measured else "from the case"
    heads = "link", "latency", "bandwidth"
    rows = [
        (
            f"{link.source} -> {link.target}",
            f"{1e3 * link.latency_s:.3g} ms",
            f"{size_text(link.bytes_per_s)}/s",
        )
        for link in shown
    ]
    title = f"the {len(shown)} slowest of {len(status.links)} links, {which}\n"
    return title + aligned([heads, *rows])


def _numbers(numbers: tuple[int, ...] | list[int]) -> str:
    return ", ".join(map(str, numbers))
