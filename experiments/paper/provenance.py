"""Which command, commit and machine a result comes from."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from experiments.benchmarks import machine


def of(command: str) -> dict[str, Any]:
    """What is written beside the figures that `command` has made, now and here."""
    return {"command": command, "commit": commit(), "machine": machine.describe()}


def commit() -> str:
    """The commit of this checkout, marked where files that git knows have been changed since."""
    asked = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else "unknown"
