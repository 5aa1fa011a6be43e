"""Tests of connections may be coroutines: each has its own event loop, and ends its hosts."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from skippipe_jax.connections import asking
from tests.connections.meshes import RUN, Host


@pytest.fixture(autouse=True)
def _versions_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joiners have the versions that hosts of these tests have."""
    monkeypatch.setattr(asking, "versions", lambda: RUN.versions)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine."""
    test = pyfuncitem.function
    if not inspect.iscoroutinefunction(test):
        return None
    names = inspect.signature(test).parameters

    async def run() -> None:
        try:
            await test(**{name: pyfuncitem.funcargs[name] for name in names})
        finally:
            Host.end_all()

    asyncio.run(run())
    return True
