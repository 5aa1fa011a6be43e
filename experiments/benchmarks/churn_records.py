"""What hosts have noted under `churn`, and whether it is what must hold whatever is lost."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

Note = Mapping[str, Any]
TOLERANCE = 2e-5


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON, but for a last one that is cut short."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def differing_replicas(notes: Iterable[Note]) -> list[str]:
    """Steps after which two replicas of a stage were not the same, bit by bit.

    Of those that go apart, that is what they apply.
    """
    digests: dict[tuple[int, int, str], set[str]] = defaultdict(set)
    for note in notes:
        for stage, digest in note.get("digests", {}).items():
            digests[note["generation"], note["step"], stage].add(digest)
    return [
        f"replicas of stage {stage} differ after step {step} in generation {generation}"
        for (generation, step, stage), found in sorted(digests.items())
        if len(found) > 1
    ]


def wrongly_read(notes: Iterable[Note], per_step: int) -> list[str]:
    """Steps that counted and had not read exactly their own microbatches, each once.

    Step s, from 1, has those from (s - 1) times `per_step` on. A step that is run again reads them
    again; of all that was read for it in one generation, each is there once.
    """
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    counted = set()
    for note in notes:
        if note["what"] in ("read", "counted"):
            name = note["generation"], note["step"]
            if note["what"] == "read":
                read[name] += note["microbatches"]
            else:
                counted.add(name)
    return [
        f"step {step} of generation {generation} read {sorted(read[generation, step])}"
        for generation, step in sorted(counted)
        if sorted(read[generation, step]) != list(range((step - 1) * per_step, step * per_step))
    ]


def wrongly_read_apart(notes: Iterable[Note], per_step: int) -> list[str]:
    """Steps that counted, where replicas go apart, and had not read microbatches of their own.

    Each reads as many as there are in a step, one after another, and none of a step before. What
    hosts have read for steps that never counted may be missing. Where all have gone back, what was
    made before is forgotten.
    """
    read: dict[tuple[int, int], list[int]] = defaultdict(list)
    counted: dict[int, int] = {}
    for note in notes:
        if note["what"] == "read":
            read[note["generation"], note["step"]] += note["microbatches"]
        elif note["what"] == "counted":
            counted[note["step"]] = max(counted.get(note["step"], 0), note["generation"])
    found, free = [], 0
    for step, generation in sorted(counted.items()):
        own = sorted(read[generation, step])
        if own != list(range(own[0], own[0] + per_step)) or own[0] < free:
            found.append(f"step {step} of generation {generation} read {own}, after {free - 1}")
        free = own[-1] + 1
    return found


def badly_trained(lines: Sequence[Note]) -> list[str]:
    """Where metrics lack a step, or learn nothing: a quarter of the steps after another."""
    found = jumps(lines)
    quarter = max(1, len(lines) // 4)
    first, last = (
        statistics.mean(line["loss"] for line in part)
        for part in (lines[:quarter], lines[-quarter:])
    )
    # Not `last >= first`, which NaN is not.
    if not last < first:
        found.append(f"the loss of the last quarter is {last:.4f}, that of the first {first:.4f}")
    return found


def jumps(lines: Sequence[Note]) -> list[str]:
    """Where a step is missing in metrics, or there twice."""
    steps = [0, *(line["step"] for line in lines)]
    found = [f"{a} to {b}" for a, b in pairwise(steps) if b != a + 1]
    return [f"metrics.jsonl goes from step {', '.join(found)}"] if found else []


def otherwise_trained(lines: Sequence[Note], undisturbed: Sequence[Note]) -> list[str]:
    """Where the metrics of a run are not those of one that nothing happened to.

    Both have a line for each step, once, with the same loss, tokens and norm of the gradient.
    """
    if found := jumps(lines):
        return found
    if len(undisturbed) < len(lines):
        return [f"the undisturbed run has {len(undisturbed)} steps of {len(lines)}"]
    return [
        f"{key} of step {line['step']} is {line[key]}, undisturbed {other[key]}"
        for line, other in zip(lines, undisturbed, strict=False)
        for key in ("loss", "tokens", "gradient_norm")
        if not math.isclose(line[key], other[key], rel_tol=TOLERANCE)
    ]


def last_counted(notes: Iterable[Note]) -> tuple[float, int]:
    """When a step counted last, and the last step that did."""
    counted = [(note["at"], note["step"]) for note in notes if note["what"] == "counted"]
    return max(counted, default=(0.0, 0))


def recovery(notes: Iterable[Note], struck_s: float, generation: int) -> dict[str, float | None]:
    """How a run has come over a fault at a moment, in a generation [s].

    `detected_s` is from the fault to the first host that missed another, `recovered_s` from that to
    the first step that counted in a later generation. Both are None where nobody was missed.
    """
    after = [note for note in notes if note["at"] >= struck_s]
    missed = next((note["at"] for note in after if note["what"] == "missed"), None)
    if missed is None:
        return {"detected_s": None, "recovered_s": None}
    again = next(
        (
            note["at"]
            for note in after
            if note["what"] == "counted" and note["generation"] > generation
        ),
        None,
    )
    recovered = None if again is None else round(again - missed, 3)
    return {"detected_s": round(missed - struck_s, 3), "recovered_s": recovered}


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that a share of all do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
