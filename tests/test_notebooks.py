"""The notebooks run from top to bottom, and what they show is that of their code."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from skippipe_sched.problem.plan import load_plan

from experiments.notebooks import execute as executing
from experiments.notebooks.execute import (
    EXECUTED,
    NAMES,
    code_cells,
    code_digest,
    execute,
    load,
    notebook_path,
)
from skippipe_jax import Run

LARGEST_BYTES = 300_000
# Of the machine that made the outputs: a path from the root, or a home.
FROM_THE_ROOT = re.compile(r"(?<![\w.:/<])(?:~|/(?:root|home|tmp|work|usr|opt|var|mnt))/")
SMALL_MODEL = {"width": 16, "layers": 4, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}
SMALL = {"MODEL": SMALL_MODEL, "SEQUENCE_LENGTH": 32, "SEARCH_S": 0.2}

LINKS = """\
location_a,location_b,latency_ms,bandwidth_GiB_per_s
Oslo,Rome,20,0.1
Oslo,Lima,90,0.02
Rome,Lima,100,0.01
"""


def shown(notebook: NotebookNode, name: str) -> list[NotebookNode]:
    """What the cell of this name showed."""
    [cell] = [cell for cell in notebook.cells if cell.id == name]
    return cell.outputs


def printed(notebook: NotebookNode, name: str) -> str:
    return "".join(output.text for output in shown(notebook, name) if "text" in output)


def pictures(notebook: NotebookNode, name: str, kind: str = "image/svg+xml") -> list[str]:
    return [output.data[kind] for output in shown(notebook, name) if kind in output.get("data", {})]


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_with_what_its_code_shows(name):
    notebook = load(name)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert notebook.metadata[EXECUTED] == code_digest(notebook), (
        f"run python -m experiments.notebooks.execute {name}"
    )
    outputs = [output for cell in cells for output in cell.outputs]
    assert len(outputs) > 5
    assert not [output for output in outputs if output.output_type == "error"]
    assert not FROM_THE_ROOT.findall(str(outputs))
    assert notebook_path(name).stat().st_size < LARGEST_BYTES


@pytest.mark.nightly
def test_the_quickstart(tmp_path: Path):
    ran = execute(load("quickstart"), tmp_path, {**SMALL, "STEPS": 4, "TOKENS": 5})
    plan = load_plan(tmp_path / "runs" / "plan.json")
    steps = Run(tmp_path / "runs" / "quickstart").metrics
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["network"] == "emulate" for line in steps)
    assert printed(ran, "list-paths").count("microbatch") == len(plan.microbatches) == 8
    assert len(pictures(ran, "draw-curves")) == 2
    [timelines] = pictures(ran, "draw-timelines")
    assert "predicted" in timelines
    assert "measured, step 4" in timelines
    assert printed(ran, "evaluate-model").count("keep") > 6
    assert re.findall(r"^stages ([\d ]+) of 4$", printed(ran, "generate-text"), re.M) == [
        "0 1 2 3",
        "0 1 3",
        "0 2",
    ]


@pytest.mark.nightly
def test_the_planner_with_a_table_in_a_file(tmp_path: Path):
    (tmp_path / "mine.csv").write_text(LINKS)
    parameters = {
        "NODES": {"Oslo": 3, "Rome": 2, "Lima": 1},
        "LINKS": "mine.csv",
        "SEARCH_S": 0.1,
        "BANDWIDTH_FACTORS": [1, 10],
    }
    ran = execute(load("planner"), tmp_path, parameters)
    case = load_plan(tmp_path / "runs" / "plan.json").case
    assert [node.location for node in case.nodes] == [*["Oslo"] * 3, *["Rome"] * 2, "Lima"]
    hop_s = case.forward_hop_s
    assert hop_s[0, 3] == hop_s[4, 1] == pytest.approx(0.02 + 2**25 / 2**30 * 10 + 0.05)
    assert "lower bound" in printed(ran, "make-plan")
    assert printed(ran, "draw-flows").count(" → ") in (4, 6)
    assert "full-joint" in printed(ran, "compare-methods")
    for name in ("draw-hops", "make-plan", "vary-bandwidth"):
        assert len(pictures(ran, name, "image/png")) == 1


@pytest.mark.nightly
def test_the_pod_on_processes_of_this_machine(tmp_path: Path):
    hosts = {"HOSTS": 2, "CHIPS": 2, "HOSTS_AFTERWARDS": 1, "STAGES": 2, "PATH_LENGTH": 2}
    ran = execute(load("tpu_pod"), tmp_path, {**SMALL, **hosts, "STEPS": 4})
    assert "finished 2 steps" in printed(ran, "train-model")
    assert "finished 4 steps" in printed(ran, "resume-run")
    assert "host 1 to host 0" in printed(ran, "draw-plan")
    run = tmp_path / "runs" / "pod"
    assert [line["step"] for line in Run(run).metrics] == [1, 2, 3, 4]
    recordings = [list((run / "timelines" / f"{step:08d}").iterdir()) for step in (2, 4)]
    assert list(map(len, recordings)) == [2, 1]


def test_a_parameter_that_a_notebook_does_not_have(tmp_path: Path):
    with pytest.raises(ValueError, match="no parameter STEP,"):
        execute(load("quickstart"), tmp_path, {"STEP": 1})


def test_a_name_that_no_notebook_has(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["execute", "quikstart"])
    assert executing.main() == 2
    assert "planner, quickstart, tpu_pod" in capsys.readouterr().err
