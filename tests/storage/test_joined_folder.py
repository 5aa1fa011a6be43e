"""The folder of a host that has joined a run: what is kept there, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import Config, DataConfig, MixtureConfig, TrainConfig, to_yaml
from skippipe_jax.storage.joined_folder import (
    JOINED,
    configurations,
    contents_of,
    earlier_join,
    file_stamps,
    is_joined,
    keep,
    require_not_joined,
    run_dir_of,
)

RUN = Config(
    run_dir="runs/far", data=DataConfig(source="text", path="text"), train=TrainConfig(steps=7)
)
GIVEN = {
    "config.yaml": to_yaml(RUN).encode(),
    "plan.json": b"{}",
    "plans/later.json": b"{}",
    "tokenizer/tokenizer.model": b"\x00\xff",
}


def test_what_was_given_is_kept_as_it_is_and_given_to_others(tmp_path: Path):
    folder = tmp_path / "far"
    keep(folder, GIVEN, ["10.0.0.1:1"])
    assert contents_of(folder) == GIVEN
    assert is_joined(folder)
    assert earlier_join(folder) == (GIVEN, ["10.0.0.1:1"])
    assert run_dir_of(GIVEN) == "runs/far"
    before = file_stamps(folder)
    keep(folder, GIVEN, ["10.0.0.2:1"])
    assert file_stamps(folder) == before, "what is there is not written again"
    # The same run later, by other plans and for longer.
    longer = to_yaml(Config(run_dir="runs/far", data=RUN.data)).encode()
    later = {"config.yaml": longer, "plan.json": b"{1}"}
    keep(folder, later, [])
    assert earlier_join(folder) == (later | {k: GIVEN[k] for k in GIVEN if "token" in k}, [])
    assert file_stamps(folder) != before


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path):
    assert earlier_join(tmp_path / "new") == ({}, [])
    keep(tmp_path / "far", GIVEN, [])
    other = to_yaml(Config(run_dir="runs/other", data=RUN.data)).encode()
    with pytest.raises(InputError, match="a host used this folder to join another run"):
        keep(tmp_path / "far", GIVEN | {"config.yaml": other}, [])
    assert contents_of(tmp_path / "far") == GIVEN
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_bytes(GIVEN["config.yaml"])
    with pytest.raises(InputError, match="is the folder of a run itself"):
        earlier_join(run)
    require_not_joined(run)
    with pytest.raises(InputError, match="the folder of a diskless host"):
        require_not_joined(tmp_path / "far")


@pytest.mark.parametrize(
    "name",
    [
        "../evil",
        "/etc/evil",
        "plans/../../evil",
        "plans/evil.sh",
        "plans/deep/evil.json",
        "tokenizer/..",
        "tokenizer//evil",
        "./plan.json",
        "checkpoints/evil",
        JOINED,
        "",
    ],
)
def test_a_file_that_no_run_gives_is_not_written(tmp_path: Path, name: str):
    with pytest.raises(InputError, match="the received files are not a run"):
        keep(tmp_path / "far", GIVEN | {name: b"evil"}, [])
    assert [*tmp_path.rglob("*")] == []


@pytest.mark.parametrize("config", [b"\xff", b"- 1", b"seed: x", b"{", b"unknown: 1"])
def test_a_configuration_that_is_none_is_an_input_error(tmp_path: Path, config: bytes):
    with pytest.raises(InputError):
        keep(tmp_path / "far", GIVEN | {"config.yaml": config}, [])


def test_what_differs_on_this_host_is_told_and_all_else_is_the_runs(tmp_path: Path):
    folder = tmp_path / "far"
    keep(folder, GIVEN, [])
    theirs, own = configurations(folder, ["data.path=elsewhere", "compilation_cache=null"])
    assert theirs == RUN
    assert (own.run_dir, own.data.path, own.compilation_cache) == (str(folder), "elsewhere", None)
    assert own.train == RUN.train
    assert own.cluster.runtime == "independent"
    for override, named in (
        ("train.steps=8", "train.steps = 8: must be 7, as on all hosts"),
        ("data.sequence_length=8", "data.sequence_length = 8: must be 256, as on all hosts"),
        ("run_dir=other", "run_dir = 'other'"),
    ):
        with pytest.raises(InputError, match=named):
            configurations(folder, [override])


def test_of_a_mixture_only_the_paths_may_differ(tmp_path: Path):
    mixture = (MixtureConfig(path="a", weight=2.0), MixtureConfig(path="b"))
    run = Config(run_dir="runs/far", data=DataConfig(source="mixture", mixture=mixture))
    keep(tmp_path, GIVEN | {"config.yaml": to_yaml(run).encode()}, [])

    def told(weight: float) -> list[str]:
        entries: list[dict[str, Any]] = [{"path": "c", "weight": weight}, {"path": "d"}]
        return [f"data.mixture={json.dumps(entries)}"]

    _, own = configurations(tmp_path, told(2.0))
    assert [source.path for source in own.data.sources()] == ["c", "d"]
    with pytest.raises(InputError, match=r"data\.mixture = "):
        configurations(tmp_path, told(3.0))
