"""Files of JSON lines: what a crash leaves of them, and that their length costs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from skippipe_jax.config import parse_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage import records
from skippipe_jax.storage.records import (
    ValidationMetrics,
    append_record,
    lines_from_end,
    read_records,
)
from skippipe_jax.storage.run_dir import METRICS, VALIDATION, RunDir
from skippipe_jax.training.callbacks.metrics_log import MetricsTail
from tests.harness.step_metrics import metrics_of
from tests.sched.examples import plan_of

PLAN = plan_of([[0], [1]], [[0, 1]])
MEMBERS = [{"host": 0, "address": "10.0.0.1:1"}]


def test_what_is_added_after_a_torn_line_is_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    append_record(tmp_path / METRICS, {"step": 1})
    RunDir(tmp_path).append_generation(Generation(1, (0, 1), (7, 8), 0, 0), PLAN, MEMBERS)
    for name in ("metrics.jsonl", "membership.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"generation": 2, "st')
    append_record(tmp_path / METRICS, {"step": 2})
    RunDir(tmp_path).append_generation(Generation(3, (0, 1), (7, 8), 0, 9), PLAN, MEMBERS)
    assert [line.step for line in read_records(tmp_path / METRICS, ValidationMetrics)] == [1, 2]
    assert [line.step for line in RunDir(tmp_path).generations()] == [0, 9]
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(" = ")[0] for line in told] == [
        f"{tmp_path}/metrics.jsonl, line 2",
        f"{tmp_path}/membership.jsonl, line 2",
    ]
    assert all(line.endswith("This line is skipped.") for line in told)


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(records.os, "write", lambda to, content: write(to, content[:3]))
    append_record(tmp_path / METRICS, {"step": 12345})
    assert [line.step for line in read_records(tmp_path / METRICS, ValidationMetrics)] == [12345]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_lines_from_the_end_are_those_of_the_file(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(records, "BLOCK_BYTES", block)
    path = tmp_path / "lines"
    for content in (b"", b"\n", b"a", b"a\n", b"ab\n\ncde\nf", b"\nab\ncde\n" * 5):
        path.write_bytes(content)
        lines = content.split(b"\n")[:-1]
        found = [*lines_from_end(path)]
        assert [line for _, line in found] == lines[::-1]
        assert [end for end, _ in found] == [
            len(b"\n".join(lines[:number])) + 1 for number in range(len(lines), 0, -1)
        ]


def test_a_step_is_found_among_lines_that_cannot_be_read(tmp_path: Path):
    path = tmp_path / METRICS
    assert records.end_of_step(add(path, []), 3) == (0, 0)
    add(path, [f'{{"step": {step}, "x": "{"-" * (step % 7)}"}}' for step in range(2, 40, 2)])
    add(path, ["", "torn", "\0\0\0", '{"step": true}', '{"step": 40}', '{"step": 41'])
    assert RunDir(tmp_path).last_step() == 40
    end, last = records.end_of_step(path, 13)
    assert last == 12
    assert json.loads(path.read_bytes()[:end].splitlines()[-1])["step"] == 12


def add(path: Path, lines: list[str]) -> Path:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def test_a_long_file_is_truncated_by_reading_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All hosts wait while the leader finds what is written, and removes what comes again."""
    steps, path, run = 100_000, tmp_path / METRICS, RunDir(tmp_path)
    add(path, [f'{{"step": {n}}}' for n in range(1, steps + 1)])
    (tmp_path / VALIDATION).touch()
    config = parse_config({"run_dir": str(tmp_path)})
    read, pread = [0], os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        read.append(size)
        return pread(descriptor, size, offset)

    monkeypatch.setattr(records.os, "pread", counted)
    for is_own in (False, True):
        steps -= 5
        before = path.stat().st_ino
        read.clear()
        run.truncate_after(steps, config, is_own=is_own)
        assert sum(read) == records.BLOCK_BYTES
        # A new file for a new leader: a host that was stopped still writes the old one.
        assert (path.stat().st_ino == before) == is_own
        assert run.last_step() == steps
    lines = MetricsTail()
    lines.lines.extend(metrics_of(n) for n in range(steps - 1, steps + 3))
    read.clear()
    lines.flush_to(tmp_path)
    assert sum(read) < 2 * records.BLOCK_BYTES
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()[-3:]] == [
        steps + n for n in range(3)
    ]


GOOD = {"step": 1, "loss": 5.0, "tokens_per_second": 1, "seconds_per_iteration": 60.0}


@pytest.mark.parametrize(
    ("damage", "field"),
    [
        ("{", ""),
        ("[]", ""),
        ("\udcff", ""),
        (f'{{"step": 1, "x": [{"[" * 100_000}', ""),
        (f'{{"step": 1, "x": [NaN, {"[" * 100_000}', ""),
        ('{"step": 1}', "loss"),
        ({"loss": "low"}, "loss"),
        ({"seconds_per_iteration": 0.0}, "seconds_per_iteration"),
        ({"predicted_seconds": -1}, "predicted_seconds"),
        ({"idle_share": ["x"]}, "idle_share"),
    ],
    ids=range(10),
)
def test_a_damaged_line_is_named_and_left_out(
    tmp_path: Path, damage: Any, field: str, capsys: pytest.CaptureFixture[str]
):
    good, path = GOOD | {"compilations": 0}, tmp_path / METRICS
    line = damage if isinstance(damage, str) else json.dumps(good | damage)
    path.write_text(f"{line}\n{json.dumps(good)}\n", errors="surrogateescape")
    assert [(read.step, read.loss) for read in RunDir(tmp_path).metrics()] == [(1, 5.0)]
    error = capsys.readouterr().err
    assert error.startswith(f"warning: {path}, line 1 = ")
    assert field in error


def test_numbers_that_json_does_not_know_are_read_as_none(tmp_path: Path):
    """Earlier versions wrote some of them."""
    add(tmp_path / VALIDATION, ['{"step": 1, "validation_loss": NaN, "more": [Infinity]}'])
    [line] = read_records(tmp_path / VALIDATION, ValidationMetrics)
    assert line == ValidationMetrics(step=1, validation_loss=None)
