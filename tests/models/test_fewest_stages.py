"""Whether a model fits on devices, by which cut, and what is said of it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml
from skippipe_sched.errors import InputError

from skippipe_jax.cli.main import main
from skippipe_jax.config import Config, parse_config
from skippipe_jax.models.fewest_stages import (
    IN_FLIGHT,
    coarsest_cut,
    cut_into,
    fewest_devices,
    parse_devices,
)
from skippipe_jax.models.node_memory import USABLE_SHARE, memory_of_node
from tests.harness.training_runs import SMALL_CASE

MODEL = {"width": 16, "layers": 7, "heads": 2, "kv_heads": 1, "ffn_width": 24, "context": 32}


def config_of(**model: int) -> Config:
    data = {"sequence_length": 32, "microbatch_size": 1}
    return parse_config({"model": MODEL | model, "data": data})


def fullness(config: Config, sizes: tuple[float, ...], blocks: tuple[int, ...]) -> float:
    return max(
        memory_of_node(
            config,
            own,
            is_data_stage=stage == 0,
            replicas=1,
            in_flight=IN_FLIGHT,
            under_way=IN_FLIGHT,
        ).total
        / (USABLE_SHARE * size)
        for stage, (size, own) in enumerate(zip(sizes, blocks, strict=True))
    )


@pytest.mark.parametrize("devices", [(1e6, 1e6, 1e6), (3e6, 1e6, 1e6), (2e6, 1e6, 5e5)])
def test_no_cut_leaves_the_fullest_device_less_full(devices: tuple[float, ...]):
    config = config_of()
    cut = cut_into(config, devices, len(devices))
    assert sum(cut.blocks) == 7
    best = min(
        fullness(config, sizes, blocks)
        for sizes in set(itertools.permutations(devices))
        for blocks in itertools.product(range(1, 6), repeat=3)
        if sum(blocks) == 7
    )
    assert cut.bytes[cut.fullest] / cut.usable_bytes[cut.fullest] == pytest.approx(best)


def test_the_coarsest_cut_is_the_first_that_fits():
    config = config_of()
    one, two, three = (cut_into(config, [1e6] * 3, stages) for stages in (1, 2, 3))
    room = two.bytes[two.fullest] / USABLE_SHARE
    assert three.bytes[three.fullest] < two.bytes[two.fullest] < one.bytes[0]
    found = coarsest_cut(config, [room + 1] * 3)
    assert found is not None
    assert found.blocks == two.blocks
    assert coarsest_cut(config, [room / 10] * 3) is None
    fewest = fewest_devices(config, room + 1)
    assert fewest is not None
    assert cut_into(config, [room + 1] * fewest, fewest).fits
    assert not cut_into(config, [room + 1] * (fewest - 1), fewest - 1).fits
    assert fewest_devices(config, 100.0) is None


def test_devices_are_read(tmp_path: Path):
    assert parse_devices("3x24GB") == [24e9] * 3
    assert parse_devices("2 x 1GiB, 0.5 GB") == [2**30, 2**30, 5e8]
    case = tmp_path / "case.yaml"
    case.write_text(yaml.safe_dump(SMALL_CASE | {"memory_bytes": 2e9}))
    assert set(parse_devices(str(case))) == {2e9}
    case.write_text(yaml.safe_dump(SMALL_CASE))
    for wrong in ("3x24", "0x24GB", "24MB", "", "99999x1GB", str(case)):
        with pytest.raises(InputError) as refused:
            parse_devices(wrong)
        assert refused.value.field == "--devices"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--model", "8b", "--devices", "3x80GB"],
            "fits on 3 x 80.0 GB: 3 stages (model.stage_lay",
        ),
        (["--model", "8b", "--devices", "3x24GB"], "any number of 24.0 GB: a stage of one"),
        (["--model", "1.5b", "--devices", "2x16GB"], "needs 3 x 16.0 GB: 3 stages"),
        (["--model", "500m", "--devices", "2x16GB"], "1 more device becomes a replica"),
        (["--config", "config.yaml", "--devices", "1GB"], "fits on 1 x 1.00 GB: 1 stage"),
        (["--model", "llama3-8b", "--devices", "3x24GB"], "Did you mean 8b?"),
        (["--model", "8b"], "error: --devices = None"),
        (["--devices", "3x24GB"], "error: --config = 'train.yaml'"),
        ([], "error: --config = 'train.yaml'"),
    ],
)
def test_the_command_says_whether_it_fits(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        yaml.safe_dump({"model": MODEL, "data": {"sequence_length": 32}})
    )
    code = main(["estimate-memory", *words])
    printed = capsys.readouterr()
    assert code == (2 if "error" in printed.err else 0)
    assert said in printed.out + printed.err


def test_what_a_remedy_saves_is_said(capsys: pytest.CaptureFixture[str]):
    assert main(["estimate-memory", "--model", "8b", "--devices", "12x24GB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if line.startswith("optimizer.state_memory=host")]
    stage_bytes = 8 * (218_112_000 + 2 * 128256 * 4096 + 4096)
    assert row.split()[-1] == "8"
    assert float(row.split()[1]) == pytest.approx(stage_bytes / 1e9, rel=0.5)
