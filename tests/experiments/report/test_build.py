"""Tests of the written page without a browser: structure, escaping, policy, and static figures."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

pytest.importorskip("plotly", reason="needs the extra 'report'")
pytest.importorskip("jinja2", reason="needs the extra 'report'")

from moetier.experiments.report import build, page
from moetier.experiments.report.build import write_report
from moetier.experiments.report.folder import read_folder
from moetier.experiments.report.page import SCRIPTS, asset, content_hash, embed
from moetier.traces.errors import InputError

VOID = {"meta", "br", "input", "img", "link", "hr"}


class Page(HTMLParser):
    """What a page consists of; fails where elements are not closed in turn."""

    def __init__(self, text: str) -> None:
        """Read *text*."""
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.ids: list[str] = []
        self.headings: list[int] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Take in an element."""
        given = dict(attrs)
        self.tags.append((tag, given))
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if re.fullmatch(r"h\d", tag):
            self.headings.append(int(tag[1]))
        if tag == "script":
            self.scripts.append((given, ""))
        if tag == "style":
            self.styles.append("")
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        """Close the last element."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Take in text."""
        inside = self._open[-1] if self._open else ""
        if inside == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif inside == "style":
            self.styles[-1] += data
        else:
            self.text += data

    def having(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all elements *tag*."""
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def data(self) -> dict[str, Any]:
        """Return what the scripts read."""
        (text,) = [text for attributes, text in self.scripts if attributes.get("id") == "data"]
        found: dict[str, Any] = json.loads(text)
        return found

    @property
    def policy(self) -> str:
        """Return the Content-Security-Policy."""
        (found,) = [
            str(meta["content"])
            for meta in self.having("meta")
            if meta.get("http-equiv") == "Content-Security-Policy"
        ]
        return found


@pytest.fixture(scope="module", autouse=True)
def no_plotly() -> Iterator[None]:
    """Leave Plotly.js out: the rest is tested here, and to parse megabytes takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly.js v0 */")
        yield


def page_of(folder: Path, **options: Any) -> Page:
    written = write_report(folder, static=False, **options)
    assert written.figures == []
    assert written.problems == []
    return Page(written.page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def small(no_plotly: None, finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("page") / "small"
    shutil.copytree(finished, folder)
    return page_of(folder)


def test_every_section_of_a_sweep_is_there(small: Page) -> None:
    expected = {
        "tradeoffs", "point", "points", "where", "hits", "timelines", "remarks", "provenance",
    }  # fmt: skip

    assert expected <= set(small.ids)
    assert {"recommended", "validation", "headroom"}.isdisjoint(small.ids)
    links = {str(a["href"]).removeprefix("#") for a in small.having("a")}
    assert links <= set(small.ids)
    assert len(small.ids) == len(set(small.ids))


def test_the_page_refers_to_nothing_outside_itself(small: Page) -> None:
    for tag, attributes in small.tags:
        for name in ("src", "href", "action", "data", "srcset", "poster"):
            assert str(attributes.get(name, "#")).startswith("#"), (tag, attributes)
    assert not any("@import" in text or "url(" in text for text in small.styles)


def test_the_policy_allows_the_hashes_of_what_is_there_and_nothing_else(small: Page) -> None:
    parts = dict(part.strip().split(" ", 1) for part in small.policy.split(";"))
    run = [text for attributes, text in small.scripts if attributes.get("type") is None]

    assert parts["default-src"] == "'none'"
    assert parts["script-src"].split() == [content_hash(text) for text in run]
    assert parts["style-src-elem"].split() == [content_hash(text) for text in small.styles]
    assert len(run) == len(small.styles) == 2
    assert "unsafe-eval" not in small.policy
    assert "unsafe-inline" not in parts["script-src"]


def test_a_hash_is_the_one_that_browsers_compute() -> None:
    digest = base64.b64encode(hashlib.sha256(b"alert(1)").digest()).decode()

    assert content_hash("alert(1)") == f"'sha256-{digest}'"


def test_headings_go_down_one_level_at_a_time(small: Page) -> None:
    assert small.headings[0] == 1
    assert small.headings.count(1) == 1
    assert all(b - a <= 1 for a, b in zip(small.headings, small.headings[1:], strict=False))


def test_there_are_landmarks_captions_and_text_for_every_figure(small: Page) -> None:
    names = [tag for tag, _ in small.tags]
    assert all(names.count(tag) == 1 for tag in ("main", "header", "footer", "nav", "h1"))
    assert names.count("caption") == names.count("table")
    figures = [a for a in small.having("div") if "plot" in str(a.get("class")).split()]
    assert len(figures) == names.count("figure") == 1 + 2 + 1 + 3
    assert all(a["role"] == "img" for a in figures)
    assert all(a.get("aria-label") or a.get("aria-labelledby") for a in figures)
    assert names.count("figcaption") == len(figures)
    assert all(a.get("scope") for a in small.having("th"))
    (html,) = small.having("html")
    assert html["lang"] == "en"


def test_what_can_be_used_is_labelled(small: Page) -> None:
    labelled = [tag for tag, _ in small.tags if tag == "label"]

    assert len(labelled) == len(small.having("select")) + len(small.having("input")) == 5
    assert all(button.get("type") == "button" for button in small.having("button"))
    assert {a.get("role") for a in small.having("p")} >= {"status"}


def test_every_drawn_figure_has_its_place(small: Page) -> None:
    assert set(small.data["figures"]) <= set(small.ids)
    assert len(small.data["figures"]) == 6


def test_hostile_names_stay_text(hostile: Path) -> None:
    found = page_of(hostile)

    assert len(found.scripts) == 3  # data, Plotly, ours: none was closed early
    assert found.having("img") == found.having("b") == []
    policy = next(axis for axis in found.data["axes"] if axis["name"] == "policy")
    assert '</script><img src=x onerror=alert(1)> & "q" \'' in policy["texts"]
    raw = (hostile / "report.html").read_text()
    assert "<img" not in raw
    assert "onerror=alert(1)&gt;" in raw  # in tables and titles
    for figure in found.data["figures"].values():
        for trace in figure["traces"]:
            assert "<img" not in trace["name"]
        assert not any("<img" in str(t) for t in figure["layout"]["yaxis"].get("ticktext", []))


def test_json_cannot_leave_its_element() -> None:
    text = embed({"a": "</script><!--&\u2028"})

    assert {"<", ">", "&"}.isdisjoint(text)
    assert text.isascii()
    assert json.loads(text) == {"a": "</script><!--&\u2028"}
    with pytest.raises(ValueError, match="JSON compliant"):
        embed(float("nan"))


def test_a_script_that_speaks_of_scripts_stays_whole() -> None:
    assert page._inline("a('</script>'); b('<!--')\r\n") == "a('<\\/script>'); b('<\\!--')\n"


def test_the_same_results_give_the_same_bytes(sweep: Path, tmp_path: Path) -> None:
    first = write_report(sweep, tmp_path / "a.html", static=False).page.read_bytes()

    assert write_report(sweep, tmp_path / "b.html", static=False).page.read_bytes() == first


def test_an_old_report_stays_when_a_new_one_fails(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_report(sweep, static=False, timelines=0)
    before = (sweep / "report.html").read_bytes()

    def fail(*_: Any) -> str:
        raise RuntimeError("out of ideas")

    monkeypatch.setattr(build, "render", fail)
    with pytest.raises(RuntimeError):
        write_report(sweep, static=False, timelines=0)

    assert (sweep / "report.html").read_bytes() == before
    assert not list(sweep.glob(".*.tmp"))


def test_a_folder_to_write_to_must_be_there(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        write_report(finished, tmp_path / "gone" / "x.html", static=False, timelines=0)


def test_without_plotly_the_extra_is_named(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "find_spec", lambda name: None if name == "plotly" else name)

    with pytest.raises(InputError, match=r"needs plotly.*pip install moetier\[report\]"):
        write_report(finished, tmp_path / "x.html", static=False, timelines=0)


def test_an_empty_result_is_a_page_that_says_so(sweep: Path) -> None:
    shutil.rmtree(sweep / "points")
    pd.read_parquet(sweep / "results.parquet").iloc[:0].to_parquet(sweep / "results.parquet")

    found = page_of(sweep)

    assert "The folder holds no point." in found.text
    assert {"tradeoffs", "point", "points"}.isdisjoint(found.ids)
    assert found.data["n"] == 0


def test_a_sweep_that_failed_throughout_says_why(sweep: Path) -> None:
    table = pd.read_parquet(sweep / "results.parquet")
    table["status"], table["error"] = "failed", "no room for the dense part"
    table.to_parquet(sweep / "results.parquet")

    found = page_of(sweep)

    assert "6 of 6 points failed" in found.text
    assert "no room for the dense part" in found.text
    assert "points" in found.ids
    assert "tradeoffs" not in found.ids


def test_a_stopped_sweep_has_a_page(sweep: Path) -> None:
    for name in ("results.parquet", "results.csv", "sweep.yaml", "provenance.json"):
        (sweep / name).unlink()

    found = page_of(sweep, timelines=0)

    assert "The sweep was stopped before its end" in found.text
    assert "None was asked for." in found.text
    assert found.data["n"] == 6


def test_points_without_a_metric_are_null_on_the_page(sweep: Path) -> None:
    table = pd.read_parquet(sweep / "results.parquet")
    table.loc[0, "tpot_ms"] = float("nan")
    table.to_parquet(sweep / "results.parquet")

    (column,) = [c for c in page_of(sweep).data["metrics"] if c["name"] == "tpot_ms"]

    assert column["values"][0] is None
    assert all(column["values"][1:])


def test_a_single_run_shows_what_is_left_to_win(one_run: Path) -> None:
    found = page_of(one_run)

    assert {"headroom", "point", "where", "timelines"} <= set(found.ids)
    assert {"tradeoffs", "points", "hits"}.isdisjoint(found.ids)
    assert "25.0%" in found.text
    assert found.data["key_name"] == "fingerprint of the records"
    assert "content keys" not in found.text


def test_a_validation_shows_its_points_and_what_it_missed(validated: Path) -> None:
    found = page_of(validated)

    assert "p90_error is 15.0%, above 10.0%" in found.text
    assert "would pass too" in found.text
    assert "10, 9, 10.5" in found.text
    assert list(found.data["figures"]) == ["measured"]
    assert "2 times, with other numbers" in found.text


def test_a_validation_without_times_says_so(validated: Path) -> None:
    (validated / "validation.json").write_text('{"points": []}')

    assert "No point has both times." in page_of(validated).text


def test_all_scripts_are_in_the_page(small: Page) -> None:
    (_, ours) = [text for attributes, text in small.scripts if not attributes]

    assert all(asset(name) in ours for name in SCRIPTS)
    folder = Path(build.__file__).parent / "assets"
    assert {path.name for path in folder.glob("*.js")} == set(SCRIPTS)


def test_a_named_point_gets_its_timeline_first(sweep: Path) -> None:
    entries = read_folder(sweep).entries

    found = page_of(sweep, timelines=1, timeline_of=[entries[4].key[:8]])

    assert found.data["timelines"] == [[4, "timeline-1"]]
    assert list(found.data["figures"]).count("timeline-2") == 0
    for key in ("nothing", ""):
        with pytest.raises(InputError, match=f"no point .* beginning with '{key}'"):
            write_report(sweep, static=False, timeline_of=[key])


def test_a_live_point_says_why_it_has_no_timeline(sweep: Path) -> None:
    for file in (sweep / "points").glob("*.json"):
        outcome = json.loads(file.read_text())
        outcome["config"] = {"live": "moe-tiny", "hardware": "phone-ufs4"}
        file.write_text(json.dumps(outcome))

    found = page_of(sweep)

    assert "it runs a model (3 points)" in found.text
    assert found.data["timelines"] == []
    assert found.data["verbs"] == {"same": "evaluate"}


def test_a_search_says_what_it_left_out(sweep: Path) -> None:
    (sweep / "search.yaml").write_text("name: found\nobjectives: [tpot_ms, byte_miss_rate]\n")
    (sweep / "recommended.yaml").write_text("# the best\nhardware: <phone>\n")
    told = {"rule": "the <best>", "left_out": {"eviction: belady": "needs the future"}}
    (sweep / "provenance.json").write_text(json.dumps(told))

    found = page_of(sweep, timelines=0)

    assert "the <best>" in found.text
    assert "hardware: <phone>" in found.text
    assert "eviction: belady: needs the future" in found.text
    assert (found.data["x"], found.data["y"]) == ("tpot_ms", "byte_miss_rate")


def test_the_front_of_a_search_comes_first_and_what_it_recommends_before(
    finished: Path,
) -> None:
    folder = read_folder(finished)
    entries = [
        replace(entry, metrics=entry.metrics | {"on_front": at in (2, 4, 5)})
        for at, entry in enumerate(folder.entries)
    ]
    search = replace(folder, entries=entries)

    assert build._best(search, {"recommended": 4}) == [4, 2, 5]
    assert build._best(search, {"recommended": None}) == [2, 4, 5]
    assert build._best(folder, {"recommended": None, "x": None}) == []


@pytest.mark.slow
def test_static_figures_are_png_and_pdf(sweep: Path) -> None:
    written = write_report(sweep, timelines=0)

    names = [path.name for path in written.figures]
    expected = ["pareto", "breakdown", "line"]
    assert names == [f"{name}.{ext}" for name in expected for ext in ("png", "pdf")]
    assert written.problems == []
    for path in written.figures:
        head = path.read_bytes()[:4]
        assert head == (b"\x89PNG" if path.suffix == ".png" else b"%PDF")
    line = pd.read_csv(sweep / "figures" / "line.csv")
    assert set(line["curve"]) == {"on-demand", "layer-lfu", "belady"}


@pytest.mark.slow
def test_a_capacity_can_be_an_axis_of_a_figure_for_papers(sweep: Path) -> None:
    (sweep / "search.yaml").write_text("name: s\nobjectives: [tpot_ms, capacity.dram]\n")

    written = write_report(sweep, timelines=0)

    assert written.problems == []
    assert "on_front" in pd.read_csv(sweep / "figures" / "pareto.csv").columns


@pytest.mark.slow
def test_long_names_get_room(sweep: Path) -> None:
    table = pd.read_parquet(sweep / "results.parquet")
    short = write_report(sweep, timelines=0).figures[2].read_bytes()
    table["policy"] = [f"{name} " + "with a long list of parts " * 3 for name in table["policy"]]
    table.to_parquet(sweep / "results.parquet")

    long = write_report(sweep, timelines=0).figures[2].read_bytes()

    def size(png: bytes) -> tuple[int, int]:
        return int.from_bytes(png[16:20], "big"), int.from_bytes(png[20:24], "big")

    assert size(long)[0] > size(short)[0]  # wider by the names, higher by their second lines
    assert size(long)[1] > size(short)[1]


@pytest.mark.slow
def test_equal_figures_have_equal_bytes(sweep: Path) -> None:
    first = [path.read_bytes() for path in write_report(sweep, timelines=0).figures]

    assert [path.read_bytes() for path in write_report(sweep, timelines=0).figures] == first


def test_a_validation_is_drawn_for_papers_too(validated: Path) -> None:
    written = write_report(validated)

    assert [path.name for path in written.figures] == ["validation.png", "validation.pdf"]


def test_a_figure_that_cannot_be_drawn_is_no_failure(validated: Path) -> None:
    (validated / "validation.json").write_text('{"points": []}')

    written = write_report(validated)

    assert written.figures == []
    assert written.problems[0].startswith("validation: ")
    assert written.page.is_file()


def test_without_matplotlib_the_page_is_written_all_the_same(
    sweep: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)

    written = write_report(sweep, timelines=0)

    assert written.figures == []
    assert len(written.problems) == 3
    assert all("needs matplotlib" in text or "need matplotlib" in text for text in written.problems)
    assert written.page.is_file()


def test_a_file_where_figures_belong_is_a_problem_and_no_failure(sweep: Path) -> None:
    (sweep / "figures").write_text("mine")

    written = write_report(sweep, timelines=0)

    assert written.page.is_file()
    assert written.figures == []
    assert "figures: cannot be made: File exists" in written.problems[0]
