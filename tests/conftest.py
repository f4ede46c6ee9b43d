"""Options and fixtures shared by all tests."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# Two shared cores keep no deadline; the same examples every time, so that a failure is found again.
settings.register_profile("moetier", deadline=None, derandomize=True)
settings.load_profile("moetier")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real traces; a test that needs it skips where there is none."""
    folder = os.environ.get("MOETIER_DATA")
    if folder is None or not Path(folder).is_dir():
        pytest.skip("MOETIER_DATA does not point at the real traces")
    return Path(folder)


@pytest.fixture(scope="module")  # no longer, since Playwright's loop runs until it is closed
def chromium() -> Iterator[Any]:
    """A running Chromium of the system; none is downloaded."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package 'playwright'")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    found = os.environ.get("MOETIER_CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if found is None:
        pytest.skip(f"no Chromium: none of {', '.join(names)} is on the path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare text with the file of the test's name, or rewrite it under `--update-golden`."""
    name = request.node.name.removeprefix("test_")
    path = Path(str(request.path)).parent / f"{name}.json"

    def check(text: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(text, encoding="utf-8")
        expected = path.read_text(encoding="utf-8") if path.exists() else "(no such file)"

        assert text == expected, f"{path.name} differs; `pytest --update-golden` rewrites it"

    return check
