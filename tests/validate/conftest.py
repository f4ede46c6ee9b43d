"""Run what uses torch on one thread: on shared cores, more wait for each other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="validation needs the extra 'models'")
pytest.importorskip("transformers", reason="validation needs the extra 'models'")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)
