"""Fixtures of the command-line tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from moetier.experiments.cli import app

Invoke = Callable[..., Any]


@pytest.fixture
def moetier(monkeypatch: pytest.MonkeyPatch) -> Invoke:
    """Return a function that runs the command line; errors that it should handle pass through."""
    monkeypatch.setenv("COLUMNS", "160")

    def invoke(*words: object, status: int = 0) -> Any:
        result = CliRunner().invoke(app, [str(word) for word in words])

        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert result.exit_code == status, result.output
        return result

    return invoke
