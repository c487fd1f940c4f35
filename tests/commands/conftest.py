"""Commands run inside the test process."""

import pytest


@pytest.fixture(autouse=True)
def keep_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the process's logging as the tests need it."""
    monkeypatch.setattr("aserve.cli.configure_logging", lambda level: None)
