"""Every error of the project has a text, and reaches another process as it was raised."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import pkgutil
import subprocess
import sys

import pytest
import skippipe_sched
from skippipe_sched.errors import SIGPIPE_EXIT_CODE, InputError, SkipPipeError

import skippipe_jax
from skippipe_jax.errors import CorruptCheckpoint, PeerTimeout
from skippipe_jax.serving.errors import ApiError

for package in (skippipe_jax, skippipe_sched):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def kinds(of: type[SkipPipeError]) -> list[type[SkipPipeError]]:
    return [of, *(kind for own in of.__subclasses__() for kind in kinds(own))]


def made(kind: type[SkipPipeError]) -> SkipPipeError:
    if issubclass(kind, CorruptCheckpoint):
        return kind(20, "checkpoint", "x" * 300, "is damaged", "Choose another")
    if issubclass(kind, InputError):
        return kind("case.nodes", -1, "is negative", "Choose another")
    if issubclass(kind, ApiError):
        return kind(429, "too many requests are waiting", headers={"Retry-After": "1"})
    return kind("host 2 was lost")


@pytest.mark.parametrize("kind", kinds(SkipPipeError))
def test_an_error_is_pickled(kind: type[SkipPipeError]):
    error = made(kind)
    found = pickle.loads(pickle.dumps(error))
    assert type(found) is kind
    assert str(found) == str(error)
    assert vars(found) == vars(error)


@pytest.mark.parametrize("kind", kinds(SkipPipeError))
def test_no_error_is_raised_without_a_text(kind: type[SkipPipeError]):
    required = [
        parameter
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.default is parameter.empty
    ]
    if not required:
        assert str(kind())  # pyright: ignore[reportCallIssue]


def test_who_waits_too_long_raises_what_is_a_timeout_to_all():
    assert isinstance(PeerTimeout("in vain"), TimeoutError)


@pytest.mark.parametrize("buffers", ["", "1"])
def test_a_command_whose_output_nobody_reads_ends_without_a_traceback(buffers: str):
    """As after `| head`, whether the interpreter buffers what it prints or not."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "skippipe_jax", "config", "keys"]
    environment = os.environ | {"PYTHONUNBUFFERED": buffers}
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, env=environment)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (SIGPIPE_EXIT_CODE, b"")
