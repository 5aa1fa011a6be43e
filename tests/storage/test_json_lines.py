"""Files of JSON lines: what a crash leaves of them, and that their length costs nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from skippipe_jax.config import parse_config
from skippipe_jax.consensus.generations import Generation
from skippipe_jax.storage import json_lines, run_folder
from skippipe_jax.storage.json_lines import add_line_to, lines_from_end
from skippipe_jax.training.callbacks import KeptLines
from tests.sched.examples import plan_of

PLAN = plan_of([[0], [1]], [[0, 1]])
MEMBERS = [{"host": 0, "address": "10.0.0.1:1"}]


def test_what_is_added_after_a_torn_line_is_a_line_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_folder.append_metrics(tmp_path, {"step": 1})
    run_folder.append_generation(tmp_path, Generation(1, (0, 1), (7, 8), 0, 0), PLAN, MEMBERS)
    for name in ("metrics.jsonl", "membership.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"generation": 2, "st')
    run_folder.append_metrics(tmp_path, {"step": 2})
    run_folder.append_generation(tmp_path, Generation(3, (0, 1), (7, 8), 0, 9), PLAN, MEMBERS)
    assert [line["step"] for line in run_folder.read_metrics(tmp_path)] == [1, 2]
    assert [line["step"] for line in run_folder.read_generations(tmp_path)] == [0, 9]
    told = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(" = ")[0] for line in told] == [
        f"{tmp_path}/metrics.jsonl, line 2",
        f"{tmp_path}/membership.jsonl, line 2",
    ]
    assert all(line.endswith("This line is left out.") for line in told)


def test_a_write_that_takes_a_part_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write = os.write
    monkeypatch.setattr(json_lines.os, "write", lambda to, content: write(to, content[:3]))
    run_folder.append_metrics(tmp_path, {"step": 12345})
    assert run_folder.read_metrics(tmp_path) == [{"step": 12345}]


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_lines_from_the_end_are_those_of_the_file(
    tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", block)
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
    path = tmp_path / "metrics.jsonl"
    assert json_lines.end_of_step(add(path, []), 3) == (0, 0)
    add(path, [f'{{"step": {step}, "x": "{"-" * (step % 7)}"}}' for step in range(2, 40, 2)])
    add(path, ["", "torn", "\0\0\0", '{"step": true}', '{"step": 40}', '{"step": 41'])
    for step in range(45):
        line = run_folder.metrics_of(tmp_path, step)
        assert (line and line["step"]) == (step if 2 <= step <= 40 and step % 2 == 0 else None)
    assert run_folder.last_step(tmp_path) == 40
    end, last = json_lines.end_of_step(path, 13)
    assert last == 12
    assert json.loads(path.read_bytes()[:end].splitlines()[-1])["step"] == 12


def add(path: Path, lines: list[str]) -> Path:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    return path


def read_by(path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many lines are parsed from now on, each as one."""
    parsed: list[int] = []
    loads = json.loads
    monkeypatch.setattr(json_lines.json, "loads", lambda text: parsed.append(1) or loads(text))
    return parsed


def test_going_on_reads_no_more_of_a_long_run_than_of_a_short_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """All hosts wait while the leader finds out what is written, and cuts off what comes again."""
    steps = 100_000
    add(tmp_path / "metrics.jsonl", [f'{{"step": {n}}}' for n in range(1, steps + 1)])
    config = parse_config({"run_dir": str(tmp_path)})
    parsed = read_by(tmp_path, monkeypatch)
    for is_own in (False, True):
        steps -= 5
        before = (tmp_path / "metrics.jsonl").stat().st_ino
        run_folder.continue_run(tmp_path, config, steps, is_own=is_own)
        assert ((tmp_path / "metrics.jsonl").stat().st_ino == before) == is_own
        assert run_folder.last_step(tmp_path) == steps
    lines = KeptLines()
    lines.lines.extend({"step": n} for n in range(steps - 1, steps + 3))
    lines.write_the_missing(tmp_path)
    assert run_folder.metrics_of(tmp_path, steps + 2) == {"step": steps + 2}
    assert run_folder.metrics_of(tmp_path, 50) == {"step": 50}
    assert len(parsed) < 100
    assert len(run_folder.read_metrics(tmp_path)) == steps + 2


def test_the_best_checkpoint_is_found_without_reading_all_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from skippipe_jax.training import callbacks

    path = add(
        tmp_path / "metrics.jsonl",
        [f'{{"step": {n}, "validation_loss": {abs(n - 7000)}}}' for n in range(1, 10_001)],
    )
    monkeypatch.setattr(callbacks, "saved_steps", lambda folder: [1000, 9980, 9990, 10_000])
    protected: list[int] = []
    parsed = read_by(path, monkeypatch)

    class Writer:
        def protect(self, step: int) -> None:
            protected.append(step)

    callbacks.BestCheckpoint(Writer(), tmp_path)  # pyright: ignore[reportArgumentType]
    assert protected == [1000, 9980]
    assert len(parsed) < 100


def test_a_line_is_added_to_a_file_that_is_not_there(tmp_path: Path):
    add_line_to(tmp_path / "new", {"step": 1})
    assert (tmp_path / "new").read_text() == '{"step": 1}\n'
