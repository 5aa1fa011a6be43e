"""How optional packages are installed, as messages say it: from a clone; none is published."""

from __future__ import annotations

from pathlib import Path

import pytest
from skippipe_sched.errors import InputError

from skippipe_jax.config import extras

ROOT = Path(extras.__file__).parents[2]


def test_messages_name_the_extra_of_a_clone():
    with pytest.raises(InputError, match=r'pip install -e "\.\[data\]"'):
        extras.require("no_such_package", "data", "data.path", "text.parquet")
    sources = [*ROOT.glob("skippipe_jax/**/*.py"), *ROOT.glob("sched/**/*.py")]
    assert len(sources) > 100
    assert [path for path in sources if "skippipe-jax[" in path.read_text()] == []
