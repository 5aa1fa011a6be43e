"""Prometheus metrics of a run, which every host serves over HTTP during training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

from skippipe_sched.errors import InputError, error_class

from skippipe_jax import log
from skippipe_jax.cluster.membership import Membership
from skippipe_jax.config import Config
from skippipe_jax.config.extras import require_extra
from skippipe_jax.connections.addresses import chosen_address, join_address
from skippipe_jax.models.footprint import bytes_per_link
from skippipe_jax.runtime.runtime import Runtime
from skippipe_jax.storage.records import StepMetrics
from skippipe_jax.training.callbacks.base import Callback, RunView

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

FIELD = "train.metrics_port"
LAST_PORT = 65535


class Family(NamedTuple):
    """Metric family: its kind, the HELP text of Prometheus, and the names of its labels."""

    kind: Literal["gauge", "counter"]
    help: str
    labels: tuple[str, ...] = ()


METRIC_FAMILIES: Mapping[str, Family] = {
    "skippipe_step": Family("gauge", "Completed iterations, including those before a resume."),
    "skippipe_loss": Family("gauge", "Training loss of the last iteration, in nats per token."),
    "skippipe_validation_loss": Family(
        "gauge", "Last validation loss, in nats per token; only on the leader."
    ),
    "skippipe_tokens_total": Family("counter", "Target tokens of the run, over all hosts."),
    "skippipe_iterations_total": Family("counter", "Iterations that this process took part in."),
    "skippipe_iteration_seconds_total": Family("counter", "Duration of these iterations."),
    "skippipe_compile_seconds_total": Family(
        "counter", "Time of these iterations spent compiling or loading programs."
    ),
    "skippipe_node_seconds_total": Family(
        "counter",
        "Time of these iterations in which a node of this host computed, or was idle (waiting or "
        "averaging).",
        ("node", "phase"),
    ),
    "skippipe_sent_bytes_total": Family(
        "counter",
        "Bytes of arrays that nodes of this host sent to other nodes.",
        ("source_host", "source_node", "destination_host", "destination_node"),
    ),
    "skippipe_hosts": Family(
        "gauge",
        "Hosts by state: training; unheard: this host receives no heartbeat from them; absent: not "
        "in the generation.",
        ("state",),
    ),
    "skippipe_generation": Family("gauge", "Generation of hosts, counted from 1."),
    "skippipe_session_restarts_total": Family(
        "counter", "Membership changes after which this process continued."
    ),
}
"""Metrics that a host serves, by name."""


class NodeLink(NamedTuple):
    """Link between two nodes, each with the number of its host in the run."""

    source_host: int
    source_node: int
    destination_host: int
    destination_node: int


class MetricValues:
    """Current values of `METRIC_FAMILIES`, which `prometheus_client` collects from any thread.

    An unknown metric has no value. Counters start with the process.
    """

    def __init__(self):
        """Set the counters without labels to 0; nothing else has a value yet."""
        self._values: dict[str, dict[tuple[str, ...], float]] = {
            name: {(): 0.0} if family.kind == "counter" and not family.labels else {}
            for name, family in METRIC_FAMILIES.items()
        }

    def set(self, name: str, value: float | None, *labels: object) -> None:
        """Set a gauge; None removes its value."""
        if value is None:
            self._values[name].pop(tuple(map(str, labels)), None)
        else:
            self._values[name][tuple(map(str, labels))] = value

    def add(self, name: str, value: float, *labels: object) -> None:
        """Add to a counter."""
        values, key = self._values[name], tuple(map(str, labels))
        values[key] = values.get(key, 0.0) + value

    def take_step(
        self, metrics: StepMetrics, nodes: Iterable[int], sent: Mapping[NodeLink, int]
    ) -> None:
        """Record an iteration, in which `nodes` of this host sent the bytes in `sent` by link."""
        self.set("skippipe_step", metrics.step)
        self.set("skippipe_loss", metrics.loss)
        self.set("skippipe_generation", metrics.generation)
        seconds = metrics.seconds_per_iteration
        self.add("skippipe_tokens_total", metrics.tokens)
        self.add("skippipe_iterations_total", 1)
        self.add("skippipe_iteration_seconds_total", seconds)
        self.add("skippipe_compile_seconds_total", metrics.compile_seconds or 0.0)
        if metrics.idle_share is not None:
            for node in nodes:
                idle_s = seconds * metrics.idle_share[node]
                self.add("skippipe_node_seconds_total", seconds - idle_s, node, "computing")
                self.add("skippipe_node_seconds_total", idle_s, node, "idle")
        for link, count in sent.items():
            self.add("skippipe_sent_bytes_total", count, *link)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kinds = {"gauge": GaugeMetricFamily, "counter": CounterMetricFamily}
        for name, family in METRIC_FAMILIES.items():
            metric = kinds[family.kind](name, family.help, labels=family.labels)
            for labels, value in self._values[name].copy().items():
                metric.add_metric(labels, value)
            yield metric


class PrometheusExporter(Callback):
    """HTTP server of a run's metrics, from its construction to `close`, through all sessions."""

    def __init__(self, config: Config, membership: Membership):
        """Listen on `train.metrics_port` plus the number of this host in the run.

        The address is the one on which this host listens for others.

        Raises:
            InputError: if `prometheus_client` is not installed, or the port is not available.
            TemporaryError: if another program uses the port.
        """
        base = config.train.metrics_port
        assert base is not None, "is asked for"
        require_extra("prometheus_client", "metrics", FIELD, base)
        from prometheus_client import CollectorRegistry, start_http_server

        self._config, self._membership = config, membership
        self._values = MetricValues()
        self._hosts: frozenset[int] = frozenset()
        self._seen = frozenset(range(membership.count))
        self._sessions = 0
        registry = CollectorRegistry()
        registry.register(cast("Collector", self))
        address = chosen_address(config.cluster.bind_address) or membership.address
        port = base + membership.index
        where = join_address(address, port)
        remedy = (
            f"Set another port: host {membership.index} listens on {FIELD} + {membership.index}, "
            "which must be free"
        )
        if port > LAST_PORT:
            raise InputError(FIELD, base, f"port {port} is above {LAST_PORT}", remedy)
        try:
            self._server, self._thread = start_http_server(port, address, registry)
        except OSError as error:
            problem = f"this host cannot listen on {where} ({error})"
            raise error_class(error)(FIELD, base, problem, remedy) from error
        log.info(f"host {membership.index} serves its metrics at http://{where}/metrics")

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, with the current states of the hosts."""
        training = self._hosts
        unheard = {host for host in training if self._misses(host)}
        for state, hosts in (
            ("training", training - unheard),
            ("unheard", unheard),
            ("absent", self._seen - training),
        ):
            self._values.set("skippipe_hosts", len(hosts), state)
        return self._values.collect()

    def _misses(self, host: int) -> bool:
        return self._membership.count > 1 and self._membership.misses([host])

    def on_train_begin(self, run: RunView) -> None:
        """Record the hosts of a new session."""
        self._hosts = frozenset(run.group.hosts)
        self._seen |= self._hosts
        if self._sessions:
            self._values.add("skippipe_session_restarts_total", 1)
        self._sessions += 1
        self._values.set("skippipe_step", run.step)
        self._values.set("skippipe_generation", run.group.generation.number or None)
        self._nodes = run.runtime.topology.nodes
        # Keyed by the name of a plan, and whether replicas average gradients.
        self._sent: dict[tuple[str | None, bool], Mapping[NodeLink, int]] = {}

    def on_step_end(self, run: RunView, metrics: StepMetrics) -> None:
        """Record an iteration."""
        kind = metrics.plan, self._config.averaging.is_exact(metrics.step)
        if kind not in self._sent:
            self._sent[kind] = sent_by_host(self._config, run.runtime, metrics)
        self._values.take_step(metrics, self._nodes, self._sent[kind])

    def on_validation_end(self, run: RunView, step: int, loss: float | None) -> None:
        """Record a validation loss, on the host that leads."""
        self._values.set("skippipe_validation_loss", loss)

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def sent_by_host(config: Config, runtime: Runtime, metrics: StepMetrics) -> Mapping[NodeLink, int]:
    """Return the bytes that the nodes of this host sent over each link in an iteration."""
    topology, hosts = runtime.topology, runtime.group.hosts
    assert metrics.plan is not None, "runs write it"
    plan = runtime.schedule.plans[metrics.plan]

    def host_of(node: int) -> int:
        return hosts[topology.host_of[node]]

    return {
        NodeLink(host_of(source), source, host_of(to), to): count
        for (source, to), count in bytes_per_link(config, plan, metrics.step).items()
        if source in topology.nodes
    }
