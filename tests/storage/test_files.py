"""Writing a file that breaks off leaves what was there."""

from __future__ import annotations

from pathlib import Path

import pytest

from skippipe_jax.storage.files import atomic_write


@pytest.mark.parametrize("durably", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, durably: bool):
    path = tmp_path / "plan.json"
    for text in ("old", "new, ž"):
        atomic_write(path, text, durably=durably)
        assert path.read_text(encoding="utf-8") == text
    with pytest.raises(UnicodeEncodeError):
        atomic_write(path, "no text \ud800", durably=durably)
    assert path.read_text(encoding="utf-8") == "new, ž"
    atomic_write(path, "again", durably=durably)
    assert [found.name for found in tmp_path.iterdir()] == ["plan.json"]
