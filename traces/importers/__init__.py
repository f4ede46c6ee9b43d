"""This package reads traces that other programs wrote; one file per format.

An importer is a function `(source, out, **options) -> Header`: it reads the file *source*, writes
the trace *out* and returns its header. What the format does not say is listed in `header.unknown`.
Call one by name with `IMPORTERS.create(name, {"source": ..., "out": ..., **options})`, which
checks the options.
"""

from __future__ import annotations

from moetier.traces.registry import Registry
from moetier.traces.schema import Header

IMPORTERS: Registry[Header] = Registry("importer", __name__)
register = IMPORTERS.register
