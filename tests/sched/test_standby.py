"""Commands come to the planner one after another, and each is answered with its exit code."""

import io
import json
import sys
from pathlib import Path

import pytest
from skippipe_sched import command_server

from tests.sched.examples import TWO_NODES


def test_each_command_is_answered_by_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    case, found = tmp_path / "case.yaml", tmp_path / "plan.json"
    words = ["plan", str(case), "--method", "balanced", "-o", str(found)]
    case.write_text(json.dumps(TWO_NODES))
    lines = [json.dumps(own) + "\n" for own in (words, [*words, "--budget", "0"], words)]
    answers, before = io.StringIO(), sys.stdout
    command_server.serve(io.StringIO("".join(lines)), answers)
    assert answers.getvalue().split() == ["0", "2", "0"]
    assert found.exists()
    assert sys.stdout is before
    said = capfd.readouterr()
    assert said.out == "", "nobody reads it"
    assert "--budget" in said.err
