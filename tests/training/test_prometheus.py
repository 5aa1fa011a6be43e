"""What a run serves for Prometheus while it trains, and the dashboard that shows it."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.request
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from skippipe_sched.errors import InputError, TemporaryError

from skippipe_jax import Run
from skippipe_jax.config import load_config, parse_config
from skippipe_jax.training.callbacks.base import RunView
from skippipe_jax.training.callbacks.prometheus import (
    METRIC_FAMILIES,
    MetricValues,
    NodeLink,
    PrometheusExporter,
)
from skippipe_jax.training.trainer import Trainer
from tests.harness.ports import free_block, free_port
from tests.harness.step_metrics import metrics_of
from tests.harness.thread_cluster import Host, Network, ThreadMembership, train
from tests.training.test_rounds import PATIENCE_S, configured, lost_after

ROOT = Path(__file__).parents[2]
Samples = dict[tuple[str, tuple[str, ...]], float]


def read(text: str) -> Samples:
    """The samples of an exposition, by name and the label values in the order of the families."""
    return {
        (sample.name, tuple(sample.labels[name] for name in METRIC_FAMILIES[sample.name].labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(port: int) -> Samples:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return read(answer.read().decode())


def exposition(values: MetricValues) -> str:
    registry = CollectorRegistry()
    registry.register(cast(Any, values))
    return generate_latest(registry).decode()


def test_iterations_become_the_text_that_prometheus_reads():
    values, link = MetricValues(), NodeLink(2, 4, 0, 1)
    more: dict[str, Any] = {"tokens": 64, "generation": 3, "seconds_per_iteration": 2.0}
    first = metrics_of(8, 2.5, **more, idle_share=[0.0, 0.25], compile_seconds=0.5)
    values.take_step(first, [1], {link: 100})
    values.take_step(metrics_of(9, None, **more), [1], {link: 20})
    text = exposition(values)
    assert "# TYPE skippipe_tokens_total counter" in text
    assert f"# HELP skippipe_step {METRIC_FAMILIES['skippipe_step'].help}" in text
    # No loss, as the last one was not finite; no validation loss yet.
    assert read(text) == {
        ("skippipe_step", ()): 9,
        ("skippipe_generation", ()): 3,
        ("skippipe_tokens_total", ()): 128,
        ("skippipe_iterations_total", ()): 2,
        ("skippipe_iteration_seconds_total", ()): 4,
        ("skippipe_compile_seconds_total", ()): 0.5,
        ("skippipe_node_seconds_total", ("1", "computing")): 1.5,
        ("skippipe_node_seconds_total", ("1", "idle")): 0.5,
        ("skippipe_sent_bytes_total", ("2", "4", "0", "1")): 120,
        ("skippipe_session_restarts_total", ()): 0,
    }


@pytest.mark.nightly
def test_hosts_serve_metrics_while_they_train_and_after_one_is_lost(tmp_path: Path):
    first, network, steps = free_block(), Network(3), 4
    over = [f"train.metrics_port={first}", f"train.steps={steps}", "trace=never"]
    over.append("validation.every=2")
    hosts = [Host(configured(tmp_path), index, network, over) for index in range(3)]
    found: dict[tuple[int, int], Samples] = {}

    def note(trainer: Trainer, step: int) -> None:
        index = trainer.membership.index
        found[index, step] = scrape(first + index)

    lost_after(hosts[2], 2, network)
    for host in hosts[:2]:
        host.after_step = note
    train(hosts, PATIENCE_S)
    network.close()
    lines = {line["step"]: line for line in Run(tmp_path / "run").metrics}
    for (index, step), samples in found.items():
        line = lines[step]
        restarts = line["generation"] - 1
        assert samples["skippipe_step", ()] == step
        assert samples["skippipe_loss", ()] == pytest.approx(line["loss"])
        assert samples["skippipe_generation", ()] == line["generation"]
        assert samples["skippipe_session_restarts_total", ()] == restarts
        tokens = sum(lines[done]["tokens"] for done in range(1, step + 1))
        assert samples["skippipe_tokens_total", ()] == tokens
        nodes = {labels[0] for name, labels in samples if name == "skippipe_node_seconds_total"}
        assert str(index) in nodes
    for index in (0, 1):
        last = found[index, steps]
        assert last["skippipe_hosts", ("training",)] == 2
        assert last["skippipe_hosts", ("absent",)] == 1
    losses = [index for index in (0, 1) if ("skippipe_validation_loss", ()) in found[index, steps]]
    assert losses == [0]
    # Each host knows what its own nodes send.
    assert {labels[0] for name, labels in found[1, steps] if "sent" in name} == {"1"}
    now, then = (
        sum(
            value
            for index in (0, 1)
            for (name, _), value in found[index, step].items()
            if name == "skippipe_sent_bytes_total"
        )
        for step in (steps, steps - 1)
    )
    assert now - then == lines[steps]["bytes_sent"]
    for index in range(3):
        with pytest.raises(OSError, match="refused"):
            scrape(first + index)


def test_a_host_that_is_not_heard_counts_as_such_before_others_go_on():
    port, network = free_port(), Network(3)
    config = parse_config({"train": {"metrics_port": port}})
    member = ThreadMembership(config.cluster, 0, network)
    topology = SimpleNamespace(nodes=(0,))
    run = SimpleNamespace(group=member, step=0, runtime=SimpleNamespace(topology=topology))
    with closing(PrometheusExporter(config, member)) as exporter:
        states = "training", "unheard", "absent"
        found = [scrape(port)]
        exporter.on_train_begin(cast(RunView, run))
        found.append(scrape(port))
        network.lost.add(2)
        found.append(scrape(port))
        counts = [tuple(own["skippipe_hosts", (state,)] for state in states) for own in found]
        assert counts == [(0, 0, 3), (3, 0, 0), (2, 1, 0)]
    network.close()


def test_a_port_that_is_taken_ends_the_run_before_it_begins(tmp_path: Path):
    port = free_port()
    config = load_config(configured(tmp_path), [f"train.metrics_port={port}"])
    told = "train.metrics_port = .*this host cannot listen on"
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(TemporaryError, match=told),
    ):
        Trainer(config).setup()
    assert not (tmp_path / "run").exists()


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(InputError, match=r'pip install -e "\.\[metrics\]"'):
        Trainer(parse_config({"train": {"metrics_port": 9464}})).setup()


def test_the_dashboard_and_the_page_have_all_metrics_and_no_others():
    dashboard = json.loads((ROOT / "experiments/launch/grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert {name for query in queries for name in re.findall(r"skippipe_\w+", query)} == {
        *METRIC_FAMILIES
    }
    [job] = [own for own in dashboard["templating"]["list"] if own["name"] == "job"]
    assert set(re.findall(r"skippipe_\w+", job["query"])) <= {*METRIC_FAMILIES}
    known = {"job", "instance", *(name for own in METRIC_FAMILIES.values() for name in own.labels)}
    used = re.findall(r"by \(([^)]*)\)|(\w+)[!=]~?\"", " ".join(queries))
    assert {name for pair in used for word in pair for name in word.split(", ") if name} <= known
    page = (ROOT / "docs/watch.md").read_text()
    rows = re.findall(r"^\| `(skippipe_\w+)(?:\{(.*?)\})?` \| (.*) \|$", page, re.M)
    assert {name: (re.findall(r"\w+", labels), text) for name, labels, text in rows} == {
        name: ([*own.labels], own.help) for name, own in METRIC_FAMILIES.items()
    }
