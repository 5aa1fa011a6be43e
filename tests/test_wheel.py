"""The wheel: what it holds, and that a new user gets along with it alone, far from the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"skippipe_jax": ROOT, "skippipe_sched": ROOT / "sched"}


def run(*words: str, folder: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
def test_the_wheel_trains_on_text_in_an_empty_folder(tmp_path: Path):
    built, site, folder = tmp_path / "dist", tmp_path / "site", tmp_path / "folder"
    pip = ("-m", "pip", "--quiet", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", str(built), str(ROOT), folder=tmp_path)
    [wheel] = built.iterdir()
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {
        path.relative_to(root).as_posix()
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }

    run(*pip, "install", "--no-deps", "--target", str(site), str(wheel), folder=tmp_path)
    (folder / "text").mkdir(parents=True)
    (folder / "text" / "license.txt").write_text((ROOT / "LICENSE").read_text())

    def skippipe(*words: str) -> str:
        return run("-m", "skippipe_jax", *words, folder=folder, PYTHONPATH=str(site))

    origin = "import skippipe_jax, skippipe_sched as s; print(skippipe_jax.__file__, s.__file__)"
    places = run("-c", origin, folder=folder, PYTHONPATH=str(site)).split()
    assert all(Path(place).is_relative_to(site) for place in places)
    [version] = re.findall(r"^skippipe (\S+)$", skippipe("--version"), re.M)
    assert wheel.name.startswith(f"skippipe_jax-{version}-")
    assert "skippipe train" in skippipe("init")
    small = ("model.width=16", "model.layers=1", "train.steps=2", "validation.every=1")
    settings = [word for one in small for word in ("--set", one)]
    assert "finished 2 steps" in skippipe("train", *settings)
    assert "</html>" in (folder / "runs/first/report.html").read_text()
