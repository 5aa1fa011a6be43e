"""What each device of a mesh holds: formulas against compiled stage functions, and as told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harness.processes import started_processes
from tests.harness.training_runs import virtual_devices

PROGRAM = Path(__file__).with_name("compiled_for_meshes.py")
EXAMPLES = [
    ("block", 2, 2, False),
    ("none", 2, 2, False),
    ("block", 4, 1, True),
]


@pytest.mark.nightly
def test_formulas_are_those_of_compiled_stages(tmp_path: Path):
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} | virtual_devices(4)
    with started_processes(tmp_path) as processes:
        processes.start(PROGRAM, json.dumps(EXAMPLES), **optimized)
        assert processes.exit_codes(240.0) == [0], processes.outputs()
        lines = [line for line in processes.output(0).splitlines() if line.startswith("{")]
    assert len(lines) == len(EXAMPLES)
    for example, line in zip(EXAMPLES, lines, strict=True):
        found = json.loads(line)
        for exact in ("state", "kept"):
            by_xla, formula = found[exact]
            assert by_xla == formula, (example, exact)
        by_xla, formula = found["outputs"]
        # XLA counts a pointer for each array as well.
        assert 0 <= by_xla - formula < 1000, example
        by_xla, formula = found["arguments"]
        recompute, _, _, is_data_stage = example
        if recompute == "block" and not is_data_stage:
            assert by_xla == formula, example
        # Of others the backward needs less: no embedding and head, and not all scales.
        assert by_xla <= formula, example
        by_xla, formula = found["temporaries"]
        assert abs(formula / by_xla - 1) < 0.15, (example, found)
