"""This module writes the reference pages of the documentation from the code, when it is built.

It is a hook of mkdocs. A page cannot be out of date, since no page is kept: keys, types and
defaults come from the schemas, their meaning from the comments beside them, commands from the
command line itself, and parts from the registries that `moetier list` shows.
"""

from __future__ import annotations

import inspect
import io
import json
import re
import textwrap
import tokenize
from collections.abc import Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from moetier.experiments.catalogue import KINDS
from moetier.experiments.cli import app
from moetier.experiments.config import RunConfig
from moetier.experiments.search_config import SearchConfig
from moetier.experiments.sweep import SweepConfig
from moetier.experiments.validation_config import ValidateConfig
from moetier.sim.hardware import Profile
from moetier.traces.geometry import Geometry
from moetier.traces.schema import Header, Predictor, Provenance, arrow_schema

SCHEMAS: dict[str, tuple[type[BaseModel], str, str]] = {
    "run": (RunConfig, "A run", "What `moetier simulate` and `moetier evaluate` read."),
    "sweep": (SweepConfig, "A sweep", "What `moetier sweep` reads."),
    "search": (SearchConfig, "A search", "What `moetier search` reads."),
    "validate": (ValidateConfig, "A validation", "What `moetier validate` reads."),
    "hardware": (Profile, "A machine", "What `hardware:` names, and `moetier calibrate` writes."),
}
"""Page -> the schema of a YAML file, its title, and what reads it."""

COLUMNS = {
    "request": "which request, from 0",
    "phase": "0 prefill, 1 decode",
    "step": "forward pass, counted over the whole trace, from 0",
    "position": "of the token in its request, from 0",
    "layer": "of the model, from 0",
    "moe_layer": "the same layer, counted among those with routed experts",
    "experts": "the ids that the router chose; -1 where a slot is empty",
    "weights": "of these experts; null where unknown",
    "valid": "false for padding and for requests that have ended: the row counts for nothing",
    "scores": "the router's, of every expert, in the header's `score_kind`, unless that is none",
    "predicted_1": "a predictor's scores of every expert, one MoE layer ahead (`predicted_2`: "
    "two); left out if the header names no predictor",
    "recorded": "what the recording device did for each expert: 0 fetched it, 1 had it, 2 had "
    "prefetched it; left out unless the header says `recorded_residency`",
}
"""Column of a trace -> its meaning. A column that is missing here ends the build."""

UNIT = "number with its unit"
"""How a YAML file writes what is whole nanoseconds or bytes inside."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and JSON schemas to those of the folder."""
    made = {f"reference/{name}.md": schema_page(name) for name in SCHEMAS}
    made |= {f"schemas/{name}.json": json_schema(name) for name in SCHEMAS}
    made |= {"reference/cli.md": cli_page(), "reference/parts.md": parts_page()}
    made |= {"reference/trace.md": trace_page()}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    return files


def json_schema(name: str) -> str:
    """Return the JSON schema of the YAML file *name*, for editors that complete and check."""
    model, title, _ = SCHEMAS[name]
    schema = model.model_json_schema(mode="serialization")  # as a file spells it
    for part in [schema, *schema.get("$defs", {}).values()]:
        given = {key for key, value in part.get("properties", {}).items() if "default" not in value}
        part["required"] = [key for key in part.get("required", []) if key in given]
    return json.dumps({**schema, "title": f"{title} of moetier"}, indent=2) + "\n"


def schema_page(name: str) -> str:
    """Return the page of the YAML file *name*: a table of keys for it and each block inside."""
    model, title, about = SCHEMAS[name]
    intro = [f"# {title}", "", about, ""]
    intro += [f"JSON schema, for an editor: [{name}.json](../schemas/{name}.json)."]
    return "\n".join([*intro, *_tables(model)]) + "\n"


def trace_page() -> str:
    """Return the page of a trace's columns and of its header."""
    geometry = Geometry(name="", n_experts=1, top_k=1, moe_layers=[0])
    header = Header(
        geometry=geometry,
        score_kind="logits",
        predictors=[Predictor(name="", horizon=1)],
        recorded_residency=True,
        provenance=Provenance(kind="captured"),
    )
    lines = [
        "# A trace",
        "",
        "One Parquet file. A row is one token at one MoE layer, ordered by step, then by layer; "
        "all rows of the same step and layer are one batch. "
        "`moetier trace validate` checks that; `moetier trace info` shows what is in it.",
        "",
        "## Columns",
        "",
        "| Column | Type | Meaning |",
        "|---|---|---|",
    ]
    for field in arrow_schema(header):
        width = "top-k" if field.name in ("experts", "weights", "recorded") else "E"
        wide = f"list of {width} " if field.type.num_fields else ""
        kind = field.type.value_type if wide else field.type
        lines.append(f"| `{field.name}` | {wide}{kind} | {COLUMNS[field.name]} |")
    lines += ["", "E is the number of experts.", "", "## Header", ""]
    lines += ["JSON, under the key `moetier` of the file's schema metadata.", ""]
    return "\n".join([*lines, *_tables(Header)]) + "\n"


def _tables(model: type[BaseModel]) -> list[str]:
    """Return a table of the keys of *model*, and one for each block inside, under its key."""
    lines: list[str] = []
    seen: dict[type[BaseModel], str] = {model: ""}
    for block in _blocks(model, seen):
        lines += ["", *([f"## {seen[block]}", ""] if block is not model else [])]
        lines += [
            inspect.getdoc(block) or "",
            "",
            "| Key | Type | Default | Meaning |",
            "|---|---|---|---|",
        ]
        meanings = comments(block)
        spelled = block.model_json_schema(mode="serialization")["properties"]
        for key, field in block.model_fields.items():
            default = "required" if field.is_required() else f"`{_spelled(field)}`"
            kind = _kind(field.annotation)
            if "text" not in kind and "string" in json.dumps(spelled[key]) and "`" not in kind:
                kind = kind.replace("number", UNIT)
            cells = [f"`{key}`", kind, default, meanings.get(key, "")]
            lines.append(f"| {' | '.join(map(_cell, cells))} |")
    return lines


def comments(model: type[BaseModel]) -> dict[str, str]:
    """Return what stands in comments beside the fields of *model*, by field."""
    found, field = {}, None
    source = textwrap.dedent(inspect.getsource(model))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        match = re.match(r"\s+(\w+): ", token.line)
        if match and match[1] in model.model_fields:
            field = match[1]
        if token.type == tokenize.COMMENT and field and not token.line.lstrip().startswith("#"):
            text = token.string.lstrip("# ")
            if not text.startswith(("fmt:", "type:", "noqa")):
                found[field] = text
    return found


def cli_page() -> str:
    """Return the page of all commands and their options."""
    lines = [
        "# Command line",
        "",
        "Every command ends with status 0, with 1 where something was measured and missed, and "
        "with 2 for bad input, saying which file, key and value, and the way out.",
    ]
    for path, command in sorted(_commands("moetier", typer.main.get_command(app))):
        usage = " ".join([path, *(f"{p.name.upper()}" for p in command.params if _is_argument(p))])
        lines += ["", f"## {path}", "", f"`{usage} [OPTIONS]`", "", _plain(command.help or "")]
        rows = [_option(param) for param in command.params if param.name != "help"]
        if rows:
            lines += ["", "| Option | Type | Default | Meaning |", "|---|---|---|---|", *rows]
    return "\n".join(lines) + "\n"


def parts_page() -> str:
    """Return the page of everything that is registered by name."""
    lines = ["# Parts", "", "What a name in a config can be. `moetier list` shows the same."]
    for kind, entries in KINDS.items():
        lines += ["", f"## {kind.capitalize()}", "", f"`moetier list {kind}`"]
        groups: dict[str, list[dict[str, Any]]] = {}
        for entry in entries():
            groups.setdefault(entry["kind"], []).append(entry)
        for group, members in groups.items():
            if len(groups) > 1:
                lines += ["", f"### {group.capitalize()}"]
            lines += ["", "| Name | What it is | Parameters |", "|---|---|---|"]
            lines += [
                f"| `{e['name']}` | {_cell(e['summary'])} | {_cell(_parameters(e))} |"
                for e in members
            ]
    return "\n".join(lines) + "\n"


def _blocks(model: type[BaseModel], seen: dict[type[BaseModel], str]) -> Iterator[type[BaseModel]]:
    """Yield *model* and the models inside it, noting in *seen* the key that leads to each."""
    yield model
    prefix = "" if len(seen) == 1 else f"{seen[model]}."
    inner = []
    for key, field in model.model_fields.items():
        for part in _models(field.annotation):
            if part not in seen:
                seen[part] = f"{prefix}{key}"
                inner.append(part)
    for part in inner:
        yield from _blocks(part, seen)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def _kind(annotation: Any) -> str:
    """Return a type as a reader of YAML thinks of it."""
    if get_origin(annotation) in (Union, UnionType):
        kinds = [_kind(part) for part in get_args(annotation) if part is not type(None)]
        return " or ".join(dict.fromkeys(kinds))
    if get_origin(annotation) in (list, tuple):
        return f"list of {_kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "mapping"
    if args := [str(part) for part in get_args(annotation) if isinstance(part, str)]:
        return ", ".join(f"`{part}`" for part in args)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    words = {
        "str": "text", "int": "number", "float": "number", "bool": "true or false", "Path": "path",
    }  # fmt: skip
    name = getattr(annotation, "__name__", str(annotation))
    return words.get(name, UNIT)


def _spelled(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined or value is None:
        return "null"
    if isinstance(value, BaseModel):
        return "see below"
    return json.dumps(value) if isinstance(value, bool | str | list | dict) else str(value)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
        return
    for name, member in inner.items():
        yield from _commands(f"{path} {name}", member)


def _is_argument(param: Any) -> bool:
    return bool(param.param_type_name == "argument")


def _option(param: Any) -> str:
    names = [param.name.upper()] if _is_argument(param) else [*param.opts, *param.secondary_opts]
    default = (
        "required"
        if param.required
        else ""
        if param.default in (None, ())
        else f"`{param.default}`"
    )
    kind = _kind(param.type_descriptor.annotation)
    if getattr(param, "is_flag", False):
        kind = "flag"
    shown = ", ".join(f"`{name}`" for name in names)
    return f"| {shown} | {kind} | {default} | {_cell(_plain(getattr(param, 'help', None) or ''))} |"


def _parameters(entry: dict[str, Any]) -> str:
    if "parameters" not in entry:
        return str(entry.get("source", "")) if entry["kind"] != "preset" else ""
    yaml = {"None": "null", "True": "true", "False": "false"}
    return ", ".join(
        f"`{p['name']}`"
        + ("" if p["default"] is None else f" = {yaml.get(p['default'], p['default'])}")
        for p in entry["parameters"]
    )


def _plain(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|").replace("<", "&lt;")
