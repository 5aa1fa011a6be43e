"""Which hosts have trained together: a line of membership.jsonl for each generation."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from skippipe_sched.problem.plan import load_plan

from skippipe_jax.consensus.generations import Generation, RebuiltStage
from skippipe_jax.storage.records import RecoveryRecord, append_record
from skippipe_jax.storage.run_dir import MEMBERSHIP, RECOVERIES, RunDir
from tests.sched.examples import plan_of

PLAN = plan_of([[0], [1]], [[0, 1]])
MEMBERS = [
    {"host": host, "pid": 700 + host, "address": f"10.0.0.{host}:1", "nodes": [host]}
    for host in (1, 3)
]


def test_a_line_tells_all_of_a_generation(tmp_path: Path):
    RunDir(tmp_path).append_generation(Generation(1, (0, 1, 3), (7, 8, 9), 0, 0), PLAN, MEMBERS)
    second = Generation(2, (1, 3), (8, 9), 3, 40, cause="host 0 was lost")
    RunDir(tmp_path).append_generation(second, PLAN, MEMBERS)
    line = json.loads((tmp_path / MEMBERSHIP).read_text().splitlines()[1])
    at = line.pop("at")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4}", at)
    assert line == {
        "generation": 2,
        "step": 40,
        "cause": "host 0 was lost",
        "leader": 3,
        "rewound": False,
        "plan": PLAN.method,
        "predicted_seconds": PLAN.predicted.iteration_s,
        "members": MEMBERS,
    }
    assert msgspec.to_builtins(RunDir(tmp_path).generations()[1]) == line | {"at": at}
    assert load_plan(tmp_path / "generations" / "plan-2.json").to_json() == PLAN.to_json()
    assert RunDir(tmp_path).last_addresses() == ["10.0.0.1:1", "10.0.0.3:1"]


def test_a_line_tells_which_stages_were_lost_and_how_they_were_made_anew(tmp_path: Path):
    made = RebuiltStage(1, "average", 40, (1, 3))
    second = Generation(2, (1, 3), (8, 9), 3, 40, lost=(1,), remade=(made,))
    RunDir(tmp_path).append_generation(second, PLAN, MEMBERS)
    [line] = RunDir(tmp_path).generations()
    assert line.lost == [1]
    assert line.remade == [made]


RECOVERY = RecoveryRecord(
    generation=2,
    cause="host 2 was lost",
    stages=[1],
    asked="average",
    by="average",
    step=40,
    steps_old=0,
    loss_before=2.5,
    loss_after=None,
)


def test_a_recovery_is_read_as_it_was_written(tmp_path: Path):
    assert RunDir(tmp_path).recoveries() == []
    RunDir(tmp_path).append(RECOVERY)
    with (tmp_path / RECOVERIES).open("a") as file:
        file.write('{"generation"')
    assert RunDir(tmp_path).recoveries() == [RECOVERY]


@pytest.mark.parametrize(
    "other", [{"steps_old": -1}, {"stages": ["one"]}, {"by": 1}, {"loss_before": "low"}]
)
def test_a_damaged_recovery_is_named_and_left_out(
    tmp_path: Path, other: dict[str, object], capsys: pytest.CaptureFixture[str]
):
    line = msgspec.to_builtins(RECOVERY)
    for record in (line, line | other, line):
        append_record(tmp_path / RECOVERIES, record)
    assert RunDir(tmp_path).recoveries() == [RECOVERY, RECOVERY]
    assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["[]", '{"generation": 1}', "{", '{"generation": "x"}'])
def test_a_damaged_line_is_named_and_left_out(
    tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / MEMBERSHIP).write_text(f"{text}\n")
    RunDir(tmp_path).append_generation(Generation(1, (1, 3), (8, 9), 1, 0), PLAN, MEMBERS)
    assert RunDir(tmp_path).last_addresses() == ["10.0.0.1:1", "10.0.0.3:1"]
    assert [line.generation for line in RunDir(tmp_path).generations()] == [1]
    assert f"{MEMBERSHIP}, line 1" in capsys.readouterr().err
