"""Fixtures shared by the tests of traces."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("moetier", deadline=None)  # two shared cores keep no deadline
settings.load_profile("moetier")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real traces; a test that needs it skips where there is none."""
    folder = os.environ.get("MOETIER_DATA")
    if folder is None or not Path(folder).is_dir():
        pytest.skip("MOETIER_DATA does not point at the real traces")
    return Path(folder)
