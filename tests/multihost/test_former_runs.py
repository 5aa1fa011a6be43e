"""What an earlier version has trained, this one resumes and evaluates as that version does."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from skippipe_jax import Run
from skippipe_jax.storage.arrays import ArrayFiles
from skippipe_jax.storage.checkpoint import open_checkpoint
from tests.former_runs import (
    COMMIT,
    LONGER,
    ROOT,
    RUNS,
    copy_of,
    evaluate,
    former_tree,
    make,
    resume,
)
from tests.training_runs import Arrays, assert_same_bits

TOLERANCE = 1e-6
"""Relative; of arrays, to their largest element."""


@pytest.fixture(scope="module")
def former(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source of the earlier version."""
    tree = former_tree(tmp_path_factory.mktemp("former"))
    if tree is None:
        pytest.skip(f"the history of this repository lacks the commit {COMMIT}")
    return tree


def arrays_saved(run_dir: Path, step: int) -> Arrays:
    """All arrays of a checkpoint, those of single replicas among them."""
    arrays = {}
    for folder in sorted(open_checkpoint(run_dir, step).folder.iterdir()):
        if folder.is_dir():
            with ArrayFiles(folder) as files:
                shapes = files.described().items()
                wanted = {k: jax.ShapeDtypeStruct(own.shape, own.dtype) for k, own in shapes}
                found = files.read(wanted)
            arrays |= {f"{folder.name}/{name}": np.asarray(found[name]) for name in found}
    return arrays


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_an_earlier_version_is_resumed_and_evaluated(
    name: str, former: Path, tmp_path: Path
):
    run = RUNS[name]
    config = make(former, tmp_path / name, run)
    made = config.parent / "run"
    assert evaluate(ROOT, made) == evaluate(former, made)
    by_former, by_this = made.with_name("by_former"), made.with_name("by_this")
    for run_dir in (by_former, by_this):
        shutil.copytree(made, run_dir)
        if run.is_copied:
            shutil.copytree(copy_of(made), copy_of(run_dir))
    if run.is_copied:
        shutil.rmtree(by_this)  # What is lost is fetched from the copy.
    resume(former, config, by_former, run)
    resume(ROOT, config, by_this, run)

    found, expected = arrays_saved(by_this, LONGER), arrays_saved(by_former, LONGER)
    lines, others = Run(by_this).metrics, Run(by_former).metrics
    assert [line["step"] for line in lines] == list(range(1, LONGER + 1))
    evaluated, as_before = evaluate(ROOT, by_this), evaluate(former, by_former)
    if run.is_exact:
        assert_same_bits(found, expected)
        assert [figures(line) for line in lines] == [figures(line) for line in others]
        assert evaluated == as_before
        return
    assert found.keys() == expected.keys()
    for key, array in expected.items():
        scale = np.max(np.abs(array), initial=0)
        np.testing.assert_allclose(found[key], array, rtol=0, atol=TOLERANCE * scale, err_msg=key)
    for line, other in zip(lines, others, strict=True):
        assert figures(line) == pytest.approx(figures(other), rel=TOLERANCE)
    assert evaluated["loss"] == pytest.approx(as_before["loss"], rel=TOLERANCE)


def figures(line: Mapping[str, Any]) -> dict[str, Any]:
    """What a line of the metrics says of training, without times."""
    keys = ("loss", "tokens", "gradient_norm", "validation_loss")
    return {key: line[key] for key in keys if line[key] is not None}
