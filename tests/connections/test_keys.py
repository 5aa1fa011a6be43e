"""The secret of a run: how it is made and read, what follows from it, and what goes without one."""

from __future__ import annotations

import hashlib
import ssl
import stat
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.cli.main import main
from skippipe_jax.config import ClusterConfig
from skippipe_jax.connections.keys import (
    FILE_VARIABLE,
    LOOPBACK_ONLY,
    SECRET_VARIABLE,
    Keys,
    Secret,
    derived,
    read_secret,
)
from skippipe_jax.connections.links import TlsCodec

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
    assert main(["keygen", str(path)]) == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = path.read_text()
    found = read_secret(str(path))
    assert found is not None
    assert found.text == text.strip()
    told = capsys.readouterr()
    assert f"cluster: {{secret: {path}}}" in told.out
    assert found.text not in told.out + told.err

    assert main(["keygen", str(path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"error: FILE = '{path}': already exists")
    assert path.read_text() == text
    assert main(["keygen", str(tmp_path / "none" / "secret")]) == 2
    assert "No such file" in capsys.readouterr().err


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
    monkeypatch.setenv("HOME", str(tmp_path))
    found, named = read_secret("~/configured"), read_secret(configured)
    assert named is not None
    assert found == replace(named, shown="~/configured")
    monkeypatch.setenv(FILE_VARIABLE, written(tmp_path / "named", f"{'f' * 40}\n"))
    assert text() == "f" * 40
    monkeypatch.setenv(SECRET_VARIABLE, f"{'t' * 40}\n")
    assert text() == "t" * 40
    monkeypatch.delenv(SECRET_VARIABLE)
    monkeypatch.setenv(FILE_VARIABLE, "")
    assert text() == "c" * 40
    assert read_secret(None) is None


@pytest.mark.parametrize(
    "content", ["", "\n", "thought up", "x" * 31, f"{'x' * 40} {'y' * 40}", f"{'x' * 40}\nshort"]
)
def test_what_is_no_secret_is_refused_and_not_shown(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = written(tmp_path / "secret", content)
    with pytest.raises(InputError) as caught:
        read_secret(path)
    assert str(caught.value).startswith(f"cluster.secret = '{path}': each line must be one word ")
    monkeypatch.setenv(SECRET_VARIABLE, content)
    with pytest.raises(InputError, match=SECRET_VARIABLE) as caught:
        read_secret(None)
    assert not content.strip() or content.strip() not in str(caught.value)


def test_of_two_secrets_the_first_is_shown_and_each_is_taken(tmp_path: Path):
    found = read_secret(written(tmp_path / "secret", f"{'n' * 40}\n{'o' * 40}\n"))
    assert found is not None
    assert (found.text, found.other) == ("n" * 40, "o" * 40)
    assert "n" * 40 not in repr(found)
    assert "o" * 40 not in repr(found)
    three = "\n".join(letter * 40 for letter in "abc")
    with pytest.raises(InputError, match="has 3 secrets, more than 2") as caught:
        read_secret(written(tmp_path / "three", three))
    assert "a" * 40 not in str(caught.value)


@pytest.mark.parametrize(("mode", "warns"), [(0o644, True), (0o602, True), (0o640, False)])
def test_a_secret_that_every_user_can_read_or_change_is_warned_of_once(
    mode: int, warns: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "secret"
    path.write_text(TEXT)
    path.chmod(mode)
    for _ in range(2):
        assert read_secret(str(path)) is not None
    told = capsys.readouterr().err
    assert told.count("\n") == warns
    assert TEXT not in told
    if warns:
        assert told.startswith(f"warning: cluster.secret = '{path}': every user of this machine")
        assert told.endswith(f"(mode {mode:o}). Run chmod 600 {path}\n")


def test_a_secret_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(InputError, match=r"cluster\.secret = .*none': cannot be read"):
        Keys.of(ClusterConfig(secret=str(tmp_path / "none")))
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path))
    with pytest.raises(InputError, match=f"{FILE_VARIABLE} = .*cannot be read"):
        Keys.of(ClusterConfig())


def test_a_secret_and_none_are_not_asked_for_together():
    with pytest.raises(InputError, match=r"cluster\.insecure = True: cannot be combined"):
        ClusterConfig(secret="secret", insecure=True)


# What follows from one.


def test_a_secret_gives_the_same_certificate_everywhere_and_always():
    """Also on a host with another version of all packages, or hosts would not know each other."""
    key, certificate = derived(TEXT)
    assert (
        hashlib.sha256(key + certificate).hexdigest()
        == "a605d5f2fd1351a88ef58372739f1f967175e9ff8450d11ed58723a7b51cdd82"
    )
    assert TEXT.encode() not in key + certificate
    other_key, other = derived(f"{TEXT}b")
    assert other_key != key
    assert other != certificate


def is_taken(caller: Keys, listener: Keys) -> bool:
    """Whether both ends of a connection take each other for hosts of one run."""
    assert caller.calling is not None
    assert listener.listening is not None
    ends = [TlsCodec(caller.calling), TlsCodec(listener.listening)]
    said, through = b"", set[int]()
    try:
        for turn in range(6):  # By turns, each with what the other has said.
            end = ends[turn % 2]
            if turn % 2 in through:
                end.decrypted(said)
            elif end.handshake(said):
                through.add(turn % 2)
            said = end.outgoing()
    except ssl.SSLError:
        return False
    return through == {0, 1}


def test_a_secret_is_changed_host_by_host_while_all_others_take_it():
    def keys(text: str, other: str | None = None) -> Keys:
        second = None if other is None else other * 40
        return Keys(Secret("cluster.secret", "a file", text * 40, second))

    old, both, new_first, new = keys("o"), keys("o", "n"), keys("n", "o"), keys("n")
    for one, other in pairwise([old, both, new_first, new]):
        for caller, listener in product([one, other], repeat=2):
            assert is_taken(caller, listener)
    stranger = keys("s")
    for own in (old, both, new_first, new):
        assert not is_taken(stranger, own)
        assert not is_taken(own, stranger)
    assert not is_taken(old, new)


# By public addresses.


@pytest.mark.parametrize(
    "address",
    [
        *("10.88.0.1", "172.31.255.1", "192.168.1.1", "100.64.0.1", "127.0.0.1", "169.254.3.4"),
        *("::1", "fe80::1%eth0", "fd00::1", "::ffff:10.88.0.1"),
    ],
)
def test_hosts_with_a_secret_may_use_private_addresses(address: str):
    Keys(Secret("cluster.secret", "a file", TEXT)).require_allowed(address)


@pytest.mark.parametrize(
    "address", ["192.0.2.1", "172.32.0.1", "100.128.0.1", "2001:db8::1", "::ffff:192.0.2.1"]
)
def test_what_is_transferred_goes_to_no_public_address_unless_that_is_asked_for(
    address: str, tmp_path: Path
):
    path = written(tmp_path / "secret", TEXT)
    with pytest.raises(InputError, match=r"cluster\.insecure_transfers = False") as caught:
        Keys.of(ClusterConfig(secret=path)).require_allowed(address)
    assert address in caught.value.problem
    assert "experiments/launch/wireguard.sh" in caught.value.remedy
    Keys.of(ClusterConfig(secret=path, insecure_transfers=True)).require_allowed(address)
    # Without a secret that is not enough.
    with pytest.raises(InputError, match=r"cluster\.secret"):
        Keys.of(ClusterConfig(insecure_transfers=True)).require_allowed(address)


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
    assert "skippipe keygen FILE" in caught.value.remedy
    insecure = Keys(insecure=True)
    insecure.require_allowed(address)
    warning = insecure.warning(address)
    assert warning is not None
    assert warning.startswith("cluster.insecure: ")
    assert insecure.warning(address) is None  # It is said once.
    with_secret = Keys(Secret("cluster.secret", "a file", TEXT))
    assert with_secret.warning(address) is None
