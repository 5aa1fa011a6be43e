"""A run with checkpoints of steps 10 and 20, and copies of it to change."""

from __future__ import annotations

import shutil

import pytest

from tests.storage.checkpoints import write


@pytest.fixture(scope="session")
def two_checkpoints(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir, [10, 20])
    return run_dir


@pytest.fixture
def run_dir(two_checkpoints, tmp_path):
    return shutil.copytree(two_checkpoints, tmp_path / "run")
