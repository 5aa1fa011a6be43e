"""The secret of a run: how it is made and read, what follows from it, and what goes without one."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.__main__ import parser
from skippipe_jax.arguments import run_parsed
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.keys import LOOPBACK_ONLY, Keys, derived
from skippipe_jax.connections.secret import (
    FILE_VARIABLE,
    SECRET_VARIABLE,
    Secret,
    make_secret,
    read_secret,
)

TEXT = "a" * 40


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test's environment has no secret."""
    for variable in (SECRET_VARIABLE, FILE_VARIABLE):
        monkeypatch.delenv(variable, raising=False)


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# Making one.


def test_the_command_makes_a_secret_that_only_its_user_may_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "secret"
    assert run_parsed(parser(["keys"]), ["keys", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    found = read_secret(str(path))
    assert found is not None
    assert found.text == text.strip()
    told = capsys.readouterr()
    assert f"cluster: {{secret: {path}}}" in told.out
    assert found.text not in told.out + told.err

    assert run_parsed(parser(["keys"]), ["keys", str(path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: FILE = '{path}': is there already")
    assert path.read_text() == text
    assert run_parsed(parser(["keys"]), ["keys", str(tmp_path / "none" / "secret")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_no_two_secrets_are_alike(tmp_path: Path):
    for name in ("one", "other"):
        make_secret(tmp_path / name)
    assert (tmp_path / "one").read_text() != (tmp_path / "other").read_text()


# Reading one.


def test_the_environment_wins_over_the_configuration_and_text_over_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    configured = written(tmp_path / "configured", f"{'c' * 40}\n")

    def text() -> str:
        found = read_secret(configured)
        assert found is not None
        return found.text

    assert text() == "c" * 40
    monkeypatch.setenv(FILE_VARIABLE, written(tmp_path / "named", f"{'f' * 40}\n"))
    assert text() == "f" * 40
    monkeypatch.setenv(SECRET_VARIABLE, f"{'t' * 40}\n")
    assert text() == "t" * 40
    monkeypatch.delenv(SECRET_VARIABLE)
    monkeypatch.setenv(FILE_VARIABLE, "")
    assert text() == "c" * 40
    assert read_secret(None) is None


@pytest.mark.parametrize("content", ["", "\n", "thought up", "x" * 31, f"{'x' * 40}\n{'x' * 40}"])
def test_what_is_no_secret_is_refused_and_not_shown(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path / "secret", content)
    with pytest.raises(InputError) as caught:
        read_secret(path)
    assert str(caught.value).startswith(f"cluster.secret = '{path}': holds no secret")
    monkeypatch.setenv(SECRET_VARIABLE, content)
    with pytest.raises(InputError, match=SECRET_VARIABLE) as caught:
        read_secret(None)
    assert not content.strip() or content.strip() not in str(caught.value)


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"cluster\.secret = .*none': cannot read this file"):
        Keys.of(ClusterConfig(secret=str(tmp_path / "none")))
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match=f"{FILE_VARIABLE} = .*cannot read this file"):
        Keys.of(ClusterConfig())


def test_a_secret_is_not_shown_with_what_holds_it():
    assert TEXT not in repr(Secret("cluster.secret", "a file", TEXT))


def test_a_secret_and_none_are_not_asked_for_together():
    with pytest.raises(InputError, match=r"cluster\.insecure = True: there is a cluster\.secret"):
        ClusterConfig(secret="secret", insecure=True)


# What follows from one.


def test_a_secret_gives_the_same_certificate_everywhere_and_always():
    """Also on a host with another version of all packages, or hosts would not know each other."""
    key, certificate = derived(Secret("cluster.secret", "a file", TEXT))
    assert (
        hashlib.sha256(key + certificate).hexdigest()
        == "18d93c155cb5e163bcf04efab1f20527dade10a6c622c3533e05171d14ac6178"
    )
    assert TEXT.encode() not in key + certificate
    other_key, other = derived(Secret("cluster.secret", "a file", f"{TEXT}b"))
    assert other_key != key
    assert other != certificate


# Without one.


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1", "::ffff:127.0.0.1"])
def test_hosts_without_a_secret_may_use_loopback_addresses(address: str):
    LOOPBACK_ONLY.require_allowed(address)
    assert Keys(insecure=True).warning(address) is None


@pytest.mark.parametrize("address", ["10.88.0.1", "192.0.2.1", "2001:db8::1", "fe80::1%eth0"])
def test_hosts_without_a_secret_use_no_other_address_unless_told_to(address: str):
    with pytest.raises(InputError) as caught:
        LOOPBACK_ONLY.require_allowed(address)
    assert caught.value.field == "cluster.secret"
    assert address in caught.value.problem
    assert "skippipe keys FILE" in caught.value.remedy
    insecure = Keys(insecure=True)
    insecure.require_allowed(address)
    warning = insecure.warning(address)
    assert warning is not None
    assert warning.startswith("warning: cluster.insecure: ")
    assert insecure.warning(address) is None  # It is said once.
    with_secret = Keys(Secret("cluster.secret", "a file", TEXT))
    with_secret.require_allowed(address)
    assert with_secret.warning(address) is None
