"""The text of several domains that every machine has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from experiments.experts import text
from skippipe_jax.experts.config import load_experts


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small installation: a standard library, NumPy and SciPy, and packages."""
    long = "\n".join(f"VALUE_{number} = {number}  # a comment" for number in range(60))
    files = {
        "lib/one.py": f'"""Says what one is.{" Well." * 80}"""\n{long}\n',
        "lib/same.py": f'"""Says what one is.{" Well." * 80}"""\n{long}\n',
        "lib/broken.py": "print 1\n" * 100,
        "lib/test/test_one.py": long,
        "lib/encodings/cp1.py": long + "\n# cp1",
        "lib/LICENSE.txt": "Do what you like. " * 40,
        "packages/p.dist-info/METADATA": "Name: p\n" * 80,
        "packages/p.dist-info/licenses/COPYING": "Copy it. " * 90,
        "numpy/tests/test_a.py": long + "\nassert True",
        "numpy/a.pyi": "def f() -> int: ...\n" * 40,
        "numpy/a.h": "#define A 1\n" * 50,
        "scipy/b.py": long + "\n# scipy",
        "scipy/tests/test_b.py": long + "\n# hidden",
    }
    for name, content in files.items():
        path = tmp_path / "installed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    for name, folder in (("STANDARD", "lib"), ("PACKAGES", "packages"), ("NUMPY", "numpy"),
                         ("SCIPY", "scipy")):  # fmt: skip
        monkeypatch.setattr(text, name, tmp_path / "installed" / folder)
    return tmp_path


def documents(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_every_domain_has_its_own_text_once(installed: Path):
    sizes = text.write(installed / "out")
    found = {name: documents(installed / "out" / f"{name}.jsonl") for name in sizes}
    assert len(found) >= 6
    for name, own in found.items():
        assert own, name
        assert len(set(own)) == len(own)
        assert sizes[name] == sum(map(len, own))
        assert all(text.SHORTEST <= len(one) <= text.LONGEST for one in own)
    [code] = found["code"]  # That of two modules is the same.
    assert "VALUE_3 = 3" in code
    assert "comment" not in code
    assert "Says what" not in code
    [said] = found["docstrings"]
    assert said.startswith("Says what one is.")
    assert "VALUE" not in said
    assert len(found["licences"]) == 2
    assert not any("hidden" in one for one in found["numerical"])
    everything = [one for own in found.values() for one in own]
    assert len(set(everything)) == len(everything)


def test_the_same_installation_gives_the_same_files(installed: Path):
    for out in ("first", "again"):
        text.write(installed / out)
    for path in (installed / "first").iterdir():
        assert path.read_bytes() == (installed / "again" / path.name).read_bytes()


def test_long_documents_are_cut_at_a_line_and_large_domains_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text, "LONGEST", 30)
    monkeypatch.setattr(text, "SHORTEST", 5)
    monkeypatch.setattr(text, "MOST", 100)
    assert text.shortened("a line\n" * 9) == "a line\n" * 4
    assert text.shortened("x" * 90) == "x" * 30
    texts = [f"document {number} " * 3 for number in range(40)]
    found = text.chosen([*texts, *texts, "tiny"])
    assert found == text.chosen(reversed(texts))
    assert 100 <= sum(map(len, found)) < 100 + 30
    assert found != [text.shortened(own) for own in texts[: len(found)]]


def test_the_configurations_name_the_domains_that_are_written():
    for name in ("quick", "study"):
        config = load_experts(Path(f"experiments/experts/{name}.yaml"))
        assert set(config.names) <= set(text.DOMAINS)
        for domain in config.domains:
            assert domain.path == f"{config.folder}/text/{domain.name}.jsonl"
        assert config.prepare == text.__name__
