"""Fewest stages into which a model must be split for given devices, and settings for fewer.

Each block is added to the stage whose device it leaves least full; stages may be uneven. No JAX.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from skippipe_sched.errors import InputError
from skippipe_sched.figures.amounts import size_text
from skippipe_sched.figures.tables import aligned
from skippipe_sched.problem.case import MEMORY_BYTES, MOST_NODES
from skippipe_sched.problem.open_case import load_cases

from skippipe_jax.config import Config
from skippipe_jax.models.footprint import stage_parameters
from skippipe_jax.models.node_memory import USABLE_SHARE, memory_of_node

IN_FLIGHT = 3
"""Microbatches in flight on a node."""
UNITS = {"GB": 1e9, "GiB": 2**30}
FORM = re.compile(r"(?:(\d{1,6}) ?x ?)?(\d{1,9}(?:\.\d{1,9})?) ?(GB|GiB)")
REMEDIES = (
    "model.compute_dtype=bfloat16",
    "model.recompute=block",
    "model.recompute=stage",
    "optimizer.moment_dtype=bfloat16",
    "optimizer.state_memory=host",
    "model.parameter_dtype=bfloat16",
)
"""Overrides of a configuration that save memory, whatever its data."""


@dataclass(frozen=True)
class ModelCut:
    """Partition of a model into stages, each on a device of its own.

    Attributes:
        blocks: blocks of each stage, the data stage first.
        bytes: bytes that the device of each stage holds.
        usable_bytes: bytes that may be filled on the device of each stage.
    """

    blocks: tuple[int, ...]
    bytes: tuple[int, ...]
    usable_bytes: tuple[float, ...]

    @property
    def fullest(self) -> int:
        """Stage whose device is filled most, as a fraction of its usable bytes."""
        shares = [own / usable for own, usable in zip(self.bytes, self.usable_bytes, strict=True)]
        return max(range(len(shares)), key=shares.__getitem__)

    @property
    def fits(self) -> bool:
        """True if every stage fits on its device."""
        return self.bytes[self.fullest] <= self.usable_bytes[self.fullest]


def parse_devices(text: str) -> list[float]:
    """Return the bytes of each device: of 3x24GB, of 2x80GB,24GB, or of the nodes of a case file.

    Raises:
        InputError: if `text` has none of these forms, names too many devices, or names a case with
            a node without `memory_bytes`.
    """
    if text.endswith((".yaml", ".yml")):
        sizes = [node.memory_bytes for node in load_cases(Path(text))[0].nodes]
        if None in sizes:
            problem = f"node {sizes.index(None)} has no {MEMORY_BYTES}"
            raise InputError("--devices", text, problem, f"Set {MEMORY_BYTES} in the case")
        return [size for size in sizes if size is not None]
    found = [FORM.fullmatch(part.strip()) for part in text.split(",")]
    remedy = "Write 3x24GB, 2x80GB,24GB or the path of a case"
    devices: list[float] = []
    for part in found:
        if part is None or float(part[2]) == 0 or int(part[1] or 1) == 0:
            problem = "is not a list of devices with their memory"
            raise InputError("--devices", text, problem, remedy)
        count = int(part[1] or 1)
        if len(devices) + count > MOST_NODES:
            raise InputError("--devices", text, f"has more than {MOST_NODES} devices", remedy)
        devices += count * [float(part[2]) * UNITS[part[3]]]
    return devices


def cut_into(config: Config, devices: Sequence[float], stages: int) -> ModelCut:
    """Partition a model into `stages` stages on the devices with most bytes.

    Each of these devices may serve the data stage. The result is the partition whose fullest device
    is least full. `stages` must not exceed the number of blocks or of devices.
    """
    largest = sorted(devices, reverse=True)[:stages]
    held = cache(partial(_held, config, len(devices) // stages))

    def cut(of_data: float) -> ModelCut:
        rest = [*largest]
        rest.remove(of_data)
        usable = tuple(USABLE_SHARE * size for size in (of_data, *rest))
        blocks = [1] * stages

        def with_one_more(stage: int) -> float:
            return held(stage == 0, blocks[stage] + 1) / usable[stage]

        for _ in range(config.model.layers - stages):
            blocks[min(range(stages), key=with_one_more)] += 1
        sizes = tuple(held(stage == 0, own) for stage, own in enumerate(blocks))
        return ModelCut(tuple(blocks), sizes, usable)

    def fullness(own: ModelCut) -> float:
        return own.bytes[own.fullest] / own.usable_bytes[own.fullest]

    return min(map(cut, dict.fromkeys(largest)), key=fullness)


def _held(config: Config, replicas: int, is_data_stage: bool, blocks: int) -> int:
    """Return the bytes on a device that serves a stage of `blocks` blocks."""
    return memory_of_node(
        config,
        blocks,
        is_data_stage=is_data_stage,
        replicas=replicas,
        in_flight=IN_FLIGHT,
        under_way=replicas * IN_FLIGHT,
    ).total


def coarsest_cut(config: Config, devices: Sequence[float]) -> ModelCut | None:
    """Return the partition into fewest stages that fits on the devices; None if none fits."""
    most = min(config.model.layers, len(devices))
    cuts = (cut_into(config, devices, stages) for stages in range(1, most + 1))
    return next((cut for cut in cuts if cut.fits), None)


def fewest_devices(config: Config, size: float) -> int | None:
    """Return how many devices of `size` bytes a model needs; None if one block each is too much."""
    counts = range(1, config.model.layers + 1)
    return next((n for n in counts if cut_into(config, [size] * n, n).fits), None)


def describe_fit(configured: Callable[[str | None], Config], devices: Sequence[float]) -> str:
    """Describe whether a model fits on devices, in which partition, and what each remedy saves.

    `configured` returns the configuration, with an override or (None) without.
    """
    config = configured(None)
    model, most = config.model, min(config.model.layers, len(devices))
    found = coarsest_cut(config, devices)
    cut = found or cut_into(config, devices, most)
    parameters = stage_parameters(model, model.layers, is_data_stage=True)
    settings = (
        f"data.microbatch_size={config.data.microbatch_size}",
        f"data.sequence_length={config.data.sequence_length}",
        f"model.compute_dtype={model.compute_dtype}",
        f"model.recompute={model.recompute}",
        f"{IN_FLIGHT} microbatches in flight",
    )
    lines = [
        f"{parameters:,} parameters in {model.layers} blocks; {', '.join(settings)}",
        f"{'fits' if found else 'does not fit'} on {_names(devices)}: {_cut_text(cut)}",
    ]
    if found is None:
        lines.append(_machines(config, max(devices)))
    elif len(devices) > len(cut.blocks):
        spare = len(devices) - len(cut.blocks)
        become = "device becomes a replica" if spare == 1 else "devices become replicas"
        lines.append(f"{spare} more {become}")
    return "\n".join([*lines, *_remedies(configured, devices, cut)])


def _remedies(
    configured: Callable[[str | None], Config], devices: Sequence[float], cut: ModelCut
) -> Iterator[str]:
    """Yield a table of remedies: bytes saved on the fullest device, and fewest stages that fit."""
    config = configured(None)
    length, size = config.data.sequence_length, config.data.microbatch_size
    smaller = f"data.microbatch_size={size // 2}" if size > 1 else None
    shorter = f"data.sequence_length={length // 2}" if length > 1 else None
    stage, rows = cut.fullest, list[tuple[int, tuple[str, ...]]]()
    of_stage = len(devices) // len(cut.blocks), stage == 0, cut.blocks[stage]
    for remedy in filter(None, (smaller, shorter, *REMEDIES)):
        changed = configured(remedy)
        saved = cut.bytes[stage] - _held(changed, *of_stage)
        if changed != config and saved > 0:
            fewest = coarsest_cut(changed, devices)
            described = "none" if fewest is None else f"{len(fewest.blocks)}"
            rows.append((saved, (remedy, size_text(saved), described)))
    if rows:
        heading = "with --set", f"stage {stage} saves", "fewest stages"
        yield aligned([heading, *(row for _, row in sorted(rows, reverse=True))])


def _machines(config: Config, size: float) -> str:
    """Describe how many devices of `size` bytes a model needs."""
    fewest = fewest_devices(config, size)
    if fewest is None:
        least = cut_into(config, [size] * config.model.layers, config.model.layers)
        taken = size_text(least.bytes[least.fullest])
        problem = f"does not fit on any number of {size_text(size)}"
        return f"{problem}: a stage of one block takes {taken}"
    described = _cut_text(cut_into(config, [size] * fewest, fewest))
    return f"needs {fewest} x {size_text(size)}: {described}"


def _cut_text(cut: ModelCut) -> str:
    stages, fullest = len(cut.blocks), cut.fullest
    blocks = ", ".join(map(str, cut.blocks))
    return (
        f"{stages} stage{'s' if stages > 1 else ''} (model.stage_layers=[{blocks}]), "
        f"stage {fullest} takes {size_text(cut.bytes[fullest])} of "
        f"{size_text(cut.usable_bytes[fullest])} usable"
    )


def _names(devices: Sequence[float]) -> str:
    counts = {size: devices.count(size) for size in devices}
    return ", ".join(f"{count} x {size_text(size)}" for size, count in counts.items())
