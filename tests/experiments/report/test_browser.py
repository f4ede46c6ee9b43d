"""Tests of reports in a headless Chromium, where the system has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="needs the extra 'report'")
pytest.importorskip("playwright", reason="needs the package 'playwright'")

from moetier.experiments.config import load_run
from moetier.experiments.report.build import write_report
from moetier.experiments.report.choice import on_front
from moetier.experiments.report.folder import read_folder
from moetier.experiments.runs import run

pytestmark = pytest.mark.slow

WIDE = {"width": 1280, "height": 900}
PHONE = {"width": 360, "height": 740}

Open = Callable[..., Any]


@pytest.fixture(scope="module")
def report(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a small sweep."""
    return write_report(finished, tmp_path_factory.mktemp("r") / "r.html", static=False).page


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Return a function that opens a file; afterwards its page has neither erred nor asked."""
    contexts: list[Any] = []
    said: list[str] = []
    asked: list[str] = []

    def open_(path: Path, **options: Any) -> Any:
        context = chromium.new_context(**({"viewport": WIDE} | options))
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_
    for context in contexts:
        context.close()

    assert said == []
    assert all(url.startswith("file:") and url.endswith(".html") for url in asked)
    assert len(asked) == len(contexts)


def mark(page: Any, at: int) -> tuple[float, float]:
    """Return where mark number *at* of the first figure is, brought into view."""
    marks = page.locator("#pareto .scatterlayer .points path")
    marks.nth(at).scroll_into_view_if_needed()
    box = marks.nth(at).bounding_box()
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def until(page: Any, condition: str) -> None:
    """Wait for a condition; Playwright's own way evaluates text, which the page forbids."""
    for _ in range(100):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never: {condition}")


def text_of(page: Any, selector: str) -> str:
    return str(page.locator(selector).inner_text())


def test_it_loads_and_draws_everything(open_page: Open, report: Path) -> None:
    page = open_page(report)

    assert page.locator(".js-plotly-plot").count() == page.locator(".plot").count() == 7
    assert page.locator("#pareto .points path").count() >= 6
    assert page.locator("#points-table tbody tr").count() == 6
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_nothing_can_be_asked_for_even_by_a_script(chromium: Any, report: Path) -> None:
    page = chromium.new_page()
    asked: list[str] = []
    page.on("requestfinished", lambda request: asked.append(request.url))
    page.goto(report.as_uri())

    blocked = page.evaluate(
        """async () => {
          const found = [];
          const seen = (event) => found.push(event.effectiveDirective);
          document.addEventListener("securitypolicyviolation", seen);
          try { await fetch("https://example.org/x"); } catch { }
          const image = new Image();
          image.src = "https://example.org/x.png";
          const script = document.createElement("script");
          script.textContent = "window.broken = true";
          document.body.append(image, script);
          await new Promise((done) => setTimeout(done, 200));
          return [found.sort(), window.broken === true];
        }"""
    )

    assert blocked == [["connect-src", "img-src", "script-src-elem"], False]
    assert asked == [report.as_uri()]
    page.close()


def test_hovering_shows_policy_capacity_and_every_metric(open_page: Open, report: Path) -> None:
    page = open_page(report)

    page.mouse.move(*mark(page, 0))
    page.wait_for_selector("#card:not([hidden])")

    text = text_of(page, "#card")
    assert any(name in text for name in ("on-demand", "layer-lfu", "belady"))
    assert "capacity.dram" in text
    known = page.evaluate(
        """() => {
          const title = document.querySelector("#card h4").textContent;
          const i = ALL.find((at) => title === policyOf(at));
          return DATA.metrics.filter((m) => valueOf(m, i) !== null).map((m) => m.label);
        }"""
    )
    assert len(known) > 40
    assert set(known) <= set(page.locator("#card dt").all_inner_texts())
    box = page.locator("#card").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= WIDE["width"]

    page.keyboard.press("Escape")
    page.wait_for_selector("#card", state="hidden")
    page.mouse.move(5, 5)
    page.mouse.move(*mark(page, 0))
    page.wait_for_selector("#card:not([hidden])")
    page.mouse.move(5, 5)
    page.wait_for_selector("#card", state="hidden")


def test_a_click_shows_yaml_and_command(open_page: Open, report: Path, tmp_path: Path) -> None:
    page = open_page(report)
    before = text_of(page, "#chosen-yaml")
    other = page.evaluate("view.front.length") - 1

    for at in range(other + 6):  # until another point than the first is chosen
        page.mouse.click(*mark(page, at))
        page.wait_for_timeout(50)
        if text_of(page, "#chosen-yaml") != before:
            break

    yaml = text_of(page, "#chosen-yaml")
    assert yaml != before
    assert yaml.startswith("synthetic:")
    command = text_of(page, "#chosen-command")
    assert command.startswith("moetier simulate small-")
    file = tmp_path / command.split()[-1]
    file.write_text(yaml)
    tpot = run(load_run(file))["tpot_ms"]
    assert page.evaluate("metric('tpot_ms', view.chosen)") == pytest.approx(tpot, rel=1e-7)
    assert text_of(page, "#status").startswith(page.evaluate("titleOf(view.chosen)"))


def test_a_chosen_point_leads_to_its_timeline(open_page: Open, report: Path) -> None:
    page = open_page(report)
    timed = dict(page.evaluate("DATA.timelines"))

    for i in range(6):
        page.click(f"#points-table tbody tr >> nth={i} >> button")

        if i in timed:
            href = page.get_attribute("#chosen-timeline a", "href")
            assert href == f"#{timed[i]}"
            assert text_of(page, f"figure:has({href}) h3") == page.evaluate(f"titleOf({i})")
        else:
            assert "--timeline-of " + page.evaluate(f"DATA.keys[{i}]")[:8] in text_of(
                page, "#chosen-timeline"
            )


def test_a_point_is_copied_and_saved(open_page: Open, report: Path, tmp_path: Path) -> None:
    page = open_page(report, permissions=["clipboard-read", "clipboard-write"])
    paste = "navigator.clipboard.readText()"

    page.click("#copy-command")
    until(page, "byId('copied').textContent === 'Command copied.'")
    assert page.evaluate(paste) == text_of(page, "#chosen-command")

    page.click("#copy-both")
    until(page, "byId('copied').textContent === 'File and command copied.'")
    lines = page.evaluate(paste).splitlines()
    assert lines[0].startswith("cat > small-")
    assert lines[0].endswith("<<'END_OF_YAML'")
    assert lines[-2:] == ["END_OF_YAML", text_of(page, "#chosen-command")]

    with page.expect_download() as waiting:
        page.click("#save-yaml")
    waiting.value.save_as(tmp_path / "p.yaml")
    assert waiting.value.suggested_filename == text_of(page, "#chosen-command").split()[-1]
    assert (tmp_path / "p.yaml").read_text() == page.evaluate("yamlOf(view.chosen)")


def test_axes_and_colours_can_be_chosen(open_page: Open, report: Path) -> None:
    page = open_page(report)

    page.select_option("#axis-x", "ttft_ms")
    page.select_option("#axis-hue", "capacity.dram")

    title = page.locator("#pareto .xtitle").text_content()
    assert title.startswith("time to first token (ms)")
    assert [b.inner_text() for b in page.locator("#legend button").all()] == ["25 %", "50 %"]
    assert "over time to first token" in text_of(page, "#pareto-alt")

    page.select_option("#axis-x", "tokens")

    assert "no front" in text_of(page, "#pareto-alt")


def test_a_series_can_be_hidden(open_page: Open, report: Path) -> None:
    page = open_page(report)
    before = page.locator("#pareto .points path").count()

    page.click("#legend button >> nth=0")

    assert page.get_attribute("#legend button >> nth=0", "aria-pressed") == "false"
    assert page.locator("#pareto .points path").count() < before


def test_the_front_of_the_page_is_the_front_of_python(
    open_page: Open, finished: Path, report: Path
) -> None:
    page = open_page(report)
    entries = read_folder(finished).entries

    for x, y in (("tpot_ms", "byte_miss_rate"), ("tokens_per_s", "energy_mj_per_token")):
        page.evaluate(f"[view.x, view.y] = ['{x}', '{y}']; frontChanged()")
        found = page.evaluate("view.front")
        assert found == on_front(entries, x, y)
    values = [(3, 5), (1, 1), (1, 1), (2, 5), (2, 4), (9, 9), (0.5, 0), (9, 9), (10, 9), (None, 9)]
    columns = [[pair[0] for pair in values], [pair[1] for pair in values]]
    found = page.evaluate(
        """([x, y]) => frontOf({ better: "lower", scale: 1, values: x },
          { better: "higher", scale: 10, values: y }, x.map((_, i) => i))""",
        columns,
    )
    assert found == [6, 1, 2, 3, 5, 7]  # as in the tests of Python's


def test_everything_works_by_keyboard(open_page: Open, report: Path) -> None:
    page = open_page(report)

    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        focus = page.evaluate(
            """() => {
              const at = document.activeElement;
              const outline = getComputedStyle(at).outlineWidth;
              return [at.id, at.closest("#points-table tbody") ? "row" : at.tagName, outline];
            }"""
        )
        assert focus[2] == "3px", focus  # the focus can be seen
        reached.add(focus[0] or focus[1])
        if (
            focus[1] == "row"
            and page.evaluate("document.activeElement.closest('tr').dataset.point") == "1"
        ):
            break
    assert {"axis-x", "axis-y", "axis-hue", "copy-command", "save-yaml", "find", "row"} <= reached

    page.keyboard.press("Enter")

    assert page.evaluate("view.chosen") == 1
    assert page.evaluate("document.activeElement.id") == "point-title"
    assert text_of(page, "#status").startswith(page.evaluate("titleOf(1)"))
    assert page.locator("tr.now").get_attribute("data-point") == "1"
    assert page.locator("tr.now button").get_attribute("aria-current") == "true"


def test_the_list_sorts_and_finds(open_page: Open, report: Path) -> None:
    page = open_page(report)
    column = "#points-table thead th:nth-child(3)"

    def values() -> list[float]:
        cells = page.locator("#points-table tbody td:nth-child(3)").all()
        return [float(cell.inner_text().split()[0]) for cell in cells]

    page.click(f"{column} button")
    assert page.get_attribute(column, "aria-sort") == "ascending"
    assert values() == sorted(values())
    page.click(f"{column} button")
    assert page.get_attribute(column, "aria-sort") == "descending"
    assert values() == sorted(values(), reverse=True)

    page.fill("#find", "belady 50")
    assert page.locator("#points-table tbody tr").count() == 1
    assert text_of(page, "#page-status") == "1 to 1 of 1"
    page.fill("#find", "")
    page.check("#only-front")
    assert page.locator("#points-table tbody tr").count() == page.evaluate("view.front.length")


def test_dark_mode_reaches_the_figures(open_page: Open, report: Path) -> None:
    colours = """() => {
      const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const light = ([r, g, b]) => (r + g + b) / 765;
      const style = (selector) => getComputedStyle(document.querySelector(selector));
      const of = (selector, name) => light(rgb(style(selector)[name]));
      return [of("body", "backgroundColor"), of("body", "color"), of("#pareto .xtick text", "fill"),
              of("#pareto .xgrid", "stroke")];
    }"""

    paper, ink, ticks, grid = open_page(report, color_scheme="light").evaluate(colours)
    assert paper > 0.9
    assert max(ink, ticks) < 0.2
    assert grid > 0.7

    paper, ink, ticks, grid = open_page(report, color_scheme="dark").evaluate(colours)
    assert paper < 0.15
    assert min(ink, ticks) > 0.85
    assert grid < 0.4


def test_a_phone_needs_no_sideways_scrolling(open_page: Open, report: Path, hostile: Path) -> None:
    pages = [report, write_report(hostile, static=False).page]
    for path in pages:
        page = open_page(path, viewport=PHONE, is_mobile=True, has_touch=True)

        assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
        for place in page.locator(".plot").all():
            box = place.locator(".main-svg").first.bounding_box()
            assert box["x"] + box["width"] <= PHONE["width"]

        page.touchscreen.tap(*mark(page, 0))

        assert page.evaluate("view.chosen") is not None
        assert page.locator("#card").is_hidden()


def test_figures_follow_the_width(open_page: Open, report: Path) -> None:
    page = open_page(report)
    width = "document.querySelector('#pareto .main-svg').getBoundingClientRect().width"
    wide = page.evaluate(width)

    page.set_viewport_size({"width": 600, "height": 800})
    until(page, f"{width} < 600")

    assert wide > 1000


def test_paper_is_light_and_static(open_page: Open, report: Path) -> None:
    page = open_page(report, color_scheme="dark")

    pdf = page.pdf(format="A4")
    page.emulate_media(media="print", color_scheme="dark")

    assert pdf[:5] == b"%PDF-"
    assert len(pdf) > 20_000
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
    for selector in ("nav", "#axes", "#copy-command", "#finder", "#card"):
        assert page.locator(selector).is_hidden()
    assert page.locator("#pareto .main-svg").first.is_visible()


def test_figures_take_the_width_of_paper_and_go_back(open_page: Open, report: Path) -> None:
    page = open_page(report)
    width = "document.querySelector('#pareto .main-svg').getBoundingClientRect().width"
    wide = page.evaluate(width)

    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(width) == 660
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(width) == wide


def test_hostile_names_do_nothing(open_page: Open, hostile: Path) -> None:
    page = open_page(write_report(hostile, static=False).page)
    page.on("dialog", lambda _: pytest.fail("a name ran as a script"))

    page.mouse.move(*mark(page, 0))
    page.mouse.click(*mark(page, 0))
    page.click("#points-table tbody button >> nth=3")

    assert page.locator("main img, main b").count() == 0
    assert "<b>b</b>" in text_of(page, "#points-table")
    assert "onerror=alert(1)" in text_of(page, "#points-table")


def test_a_failed_point_shows_its_error(open_page: Open, sweep: Path) -> None:
    import pandas as pd

    table = pd.read_parquet(sweep / "results.parquet")
    table["error"] = table["error"].astype(object)
    table.loc[0, ["status", "error"]] = ["failed", "no room"]
    (sweep / "points" / f"{table['key'][0]}.json").unlink()
    table.to_parquet(sweep / "results.parquet")
    page = open_page(write_report(sweep, static=False, timelines=0).page)

    page.click("#points-table tbody button >> nth=0")

    assert text_of(page, "#status").endswith("failed, no room")
    assert page.locator("#copy-command").is_disabled()
    assert "Not known" in text_of(page, "#chosen-yaml")


@pytest.mark.parametrize("name", ["one_run", "validated"])
def test_other_folders_draw_what_they_have(
    open_page: Open, name: str, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)

    page = open_page(write_report(folder, static=False).page)

    assert page.locator(".js-plotly-plot").count() == page.locator(".plot").count() > 0
    if name == "one_run":
        assert "moetier simulate" in text_of(page, "#chosen-command")


def test_ten_thousand_points_stay_usable(open_page: Open, finished: Path, tmp_path: Path) -> None:
    import numpy as np
    import pandas as pd

    table = pd.read_parquet(finished / "results.parquet")
    rng, n = np.random.default_rng(0), 10_000
    big = table.iloc[rng.integers(0, len(table), n)].reset_index(drop=True)
    for column in ("tpot_ms", "energy_mj_per_token", "byte_miss_rate"):
        big[column] = big[column] * rng.lognormal(0, 0.3, n)
    big["key"] = [f"{at:020d}" for at in range(n)]
    big.to_parquet(tmp_path / "results.parquet")
    path = write_report(tmp_path, static=False, timelines=0).page

    page = open_page(path)

    assert path.stat().st_size < 16e6
    assert page.locator("#pareto .points path").count() <= 2_501
    assert "Drawn are 2500" in text_of(page, "#pareto-alt")
    assert page.locator("#points-table tbody tr").count() == 25
    assert text_of(page, "#page-status") == "1 to 25 of 10000"
    front = set(page.evaluate("view.front"))
    drawn = {
        i for t in page.evaluate("byId('pareto').data.map((t) => t.customdata || [])") for i in t
    }
    assert front <= drawn
    page.click("#page-on")
    assert text_of(page, "#page-status") == "26 to 50 of 10000"


def test_the_accessibility_tree_names_what_is_there(open_page: Open, report: Path) -> None:
    page = open_page(report)

    unnamed = page.evaluate(
        """() => ["button", "a", "select", "input", "summary", "[role=img]", "table"]
          .flatMap((tag) => [...document.querySelectorAll(tag)])
          .filter((at) => !(at.textContent.trim() || at.getAttribute("aria-label")
            || at.getAttribute("aria-labelledby") || at.labels?.length))
          .map((at) => at.outerHTML)"""
    )
    levels = page.evaluate(
        "[...document.querySelectorAll('h1,h2,h3,h4')]"
        ".filter((h) => h.offsetParent).map((h) => +h.tagName[1])"
    )

    assert unnamed == []
    assert levels[0] == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))
    assert page.locator("[tabindex]").evaluate_all("(all) => all.every((at) => at.tabIndex <= 0)")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium: Any, report: Path, scheme: str) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs the package 'axe-playwright-python'"
    )
    context = chromium.new_context(color_scheme=scheme, bypass_csp=True)  # axe adds its script
    page = context.new_page()
    page.goto(report.as_uri())

    found = axe.Axe().run(page).response["violations"]

    assert [(one["id"], one["nodes"][0]["html"]) for one in found] == []
    context.close()
