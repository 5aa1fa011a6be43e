"""The benchmark `churn`, small: each of seven faults strikes a run, which goes on as it should."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.benchmarks.churn import __main__ as churn
from experiments.benchmarks.harness import launching
from tests.harness.fork_server import Forked, fork, fork_server


def forked(
    words: Sequence[str], output: Path, before: Sequence[str] = (), lower: int = 0
) -> Forked:
    """As `launching.started`, but from the fork server; all with the same priority."""
    with output.open("wb") as file, open(os.devnull, "rb") as nothing:
        return fork(
            fork_server().address,
            words,
            environment=os.environ | launching.ENVIRONMENT,
            folder=os.getcwd(),
            streams=[nothing.fileno(), file.fileno(), file.fileno()],
            namespace=before[-1] if before else None,
        )


@pytest.mark.nightly
def test_a_run_outlives_faults_joins_and_faults_while_hosts_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(launching, "started", forked)
    monkeypatch.setattr(churn, "described_machine", dict)
    small = ["width=32", "heads=2", "kv_heads=1", "ffn_width=48"]
    kinds = ["stop", "leave", "newcomer", "giver", "reset", "sever", "storage"]
    words = ["--hosts", "4", "--faults", str(len(kinds)), "--seed", "4", "--patience-s", "240"]
    words += ["--kinds", *kinds]
    words += ["--json", str(tmp_path / "churn.json"), "--keep", str(tmp_path / "kept")]
    words += [word for setting in small for word in ("--set", f"model.{setting}")]
    monkeypatch.setattr("sys.argv", ["churn", *words, "--set", "data.sequence_length=32"])
    code = churn.main()
    report = json.loads((tmp_path / "churn.json").read_text())
    assert report["failures"] == []
    assert code == 0
    faults = report["faults"]
    assert sorted(fault["kind"] for fault in faults) == sorted(kinds)
    assert {"join", "resume"} == {by for fault in faults for by in fault["came_by"]}
    assert any(fault["hit_leader"] for fault in faults)
    assert all(fault["second"] is not None for fault in faults if fault["kind"] == "giver")
