"""This module puts a report's page together: template, style, scripts, and a policy for them.

The page's Content-Security-Policy names the hash of every script and style in it and forbids all
else, so that nothing is ever requested and nothing that a name smuggles in would run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from moetier.traces.errors import InputError

SCRIPTS = (
    "data.js", "front.js", "plot.js", "tradeoff.js", "hover.js", "point.js", "table.js", "main.js",
)  # fmt: skip
STYLE = "report.css"
TEMPLATE = "report.html.j2"
PLOTLY_STYLE = "/* Plotly.js adds its rules here. */"
"""Plotly.js writes rules into a style that it finds; one that it made itself would be refused."""


_STYLE_IDS = re.compile(r'document\.getElementById\("([0-9a-f]{64})"\)')
"""The ids under which Plotly.js looks for styles of maps before it adds them, which the policy of
the page would refuse. Elements with these ids stand there instead: a report has no maps."""


def render(context: Mapping[str, Any]) -> str:
    """Return the page of *context*, whose `data` goes to its scripts.

    Raises:
        InputError: If Jinja or Plotly is not installed.
    """
    for name in ("jinja2", "plotly"):
        if find_spec(name) is None:
            raise InputError(
                f"a report needs {name}, which is not installed",
                way_out="`pip install moetier[report]`",
            )
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    plotly = _inline(get_plotlyjs())
    own = _inline("\n".join(asset(name) for name in SCRIPTS))
    style = asset(STYLE)
    scripts = " ".join(map(content_hash, (plotly, own)))
    styles = " ".join(map(content_hash, (style, PLOTLY_STYLE)))
    policy = (
        f"default-src 'none'; script-src {scripts}; style-src-elem {styles}; "
        "style-src-attr 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    )
    return environment.from_string(asset(TEMPLATE)).render(
        **{**context, "data": embed(context["data"])},
        policy=policy, plotly=plotly, placeholders=_STYLE_IDS.findall(plotly), script=own,
        style=style, plotly_style=PLOTLY_STYLE,
    )  # fmt: skip


def asset(name: str) -> str:
    """Return the text of one of the package's own files."""
    found = (files("moetier.experiments.report") / "assets" / name).read_text(encoding="utf-8")
    return found.replace("\r\n", "\n")


def content_hash(text: str) -> str:
    """Return the source expression by which a Content-Security-Policy allows *text* inline."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def embed(value: Any) -> str:
    """Return *value* as JSON that cannot leave a script element, whatever it says.

    Raises:
        ValueError: If a number in it is not finite.
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _inline(text: str) -> str:
    """Return a script as it can stand in HTML, where its hash is that of these very bytes."""
    return text.replace("\r\n", "\n").replace("</script", "<\\/script").replace("<!--", "<\\!--")
