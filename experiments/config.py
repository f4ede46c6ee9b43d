"""This module is the schema of one run: what a YAML file or a point of a sweep may say."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    TypeAdapter,
    model_validator,
)

from moetier.experiments.files import find_file, inside
from moetier.experiments.overrides import apply_overrides
from moetier.sim.hardware import Profile, load_profile
from moetier.sim.machine.hierarchy import build_hierarchy
from moetier.sim.policy.compose import compose, name_of
from moetier.sim.throughput import PositiveRate
from moetier.sim.units import Bytes, Share, Time, parse_bytes, parse_share
from moetier.sim.yaml_input import check, read_yaml
from moetier.traces.errors import InputError
from moetier.traces.formats import FORMATS
from moetier.traces.geometry import load_geometry

OWN = "own"
"""As a popularity: that of the run's own routing, which nobody knows in advance."""

SOURCES = ("trace", "synthetic", "live")
SWEEP_KEYS = ("base", "sweep", "zip", "plots")


def parse_capacity(value: object) -> int | Fraction:
    """Return "2 GiB" in bytes and "25 %" as a fraction; raise `InputError` for others."""
    if not isinstance(value, str):
        raise InputError(
            f"expected a size such as '2 GiB' or a share such as '25 %', got {value!r}"
        )
    found = parse_share(value) if value.rstrip().endswith("%") else parse_bytes(value)
    if not found:
        raise InputError(
            f"must be above zero, got {value!r}; leave the tier out to take what is left"
        )
    return found


_SHARE: TypeAdapter[Any] = TypeAdapter(Share)
_BYTES: TypeAdapter[Any] = TypeAdapter(Bytes)


def spell_capacity(value: int | Fraction) -> str:
    """Write a capacity exactly, so that `parse_capacity` reads it back."""
    adapter = _SHARE if isinstance(value, Fraction) else _BYTES
    spelled: str = adapter.dump_python(value, mode="json")
    return spelled


def _known_format(value: object) -> object:
    if value is not None and value not in FORMATS:
        raise InputError(f"unknown weights {value!r}; known: {', '.join(FORMATS)}")
    return value


Weights = Annotated[str | None, BeforeValidator(_known_format)]

Capacity = Annotated[
    int | Fraction,
    BeforeValidator(parse_capacity),
    PlainSerializer(spell_capacity, return_type=str, when_used="json"),
]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class SyntheticConfig(_Block):
    """Made-up routing: see `moetier.traces.synthetic.Synthetic` for what the numbers mean."""

    geometry: str  # the name of a published model
    layers: int | None = Field(default=None, ge=1)  # only its first so many MoE layers
    prompt: int = Field(default=0, ge=0, le=10_000_000)  # tokens of each request's prompt
    tokens: int = Field(default=128, ge=0, le=10_000_000)  # decoded, by each request
    context: int = Field(default=0, ge=0, le=10_000_000)  # tokens that were there before
    requests: int = Field(default=1, ge=1, le=10_000)  # that run in lockstep
    skew: float = Field(default=1.0, ge=0, le=10, allow_inf_nan=False)  # exponent of Zipf's law
    reuse: float = Field(default=0.3, ge=0, le=1)  # chance to keep an expert
    layer_correlation: float = Field(default=0.0, ge=0, le=1)  # share of noise common to layers
    seed: int = Field(default=0, ge=0)  # of the draws


class MeasureConfig(_Block):
    """What is measured: *warmup_steps* decode steps are left out of rates and means."""

    warmup_steps: int = Field(default=0, ge=0)


class EvaluateConfig(_Block):
    """What a live model is asked: the first *items* of moe-tiny's tasks, or of a file.

    *prompts* names a .txt of prompts or a .jsonl of `{prompt, answer, task}`. The prompts of the
    first *long_prompts* also begin texts of *long_tokens* tokens, to see whether they fall into
    loops.
    """

    items: int = Field(default=220, ge=1)
    prompts: str | None = None
    batch_size: int = Field(default=1, ge=1)  # requests that run together
    max_new_tokens: int | None = Field(default=None, ge=1)  # default: as long as the true answer
    long_prompts: int = Field(default=11, ge=0)
    long_tokens: int = Field(default=64, ge=0)
    seed: int = Field(default=0, ge=0)  # of the tasks' items


class MachineConfig(_Block):
    """What performs a live run: `simulated` time, a real `disk`, or a GPU (`cuda`).

    The experts are read from a file, or copied from pinned memory; the GPU takes only *lanes*.
    *lanes* threads read, by default as many as the link of the profile has lanes. Each is held to
    *pace* bytes/s after *latency* per slice, or reads as fast as it can. The file of the experts is
    in *folder*, by default where the system keeps temporary files, and removed after the run.
    """

    kind: Literal["simulated", "disk", "cuda"] = "simulated"  # that performs the run
    lanes: int | None = Field(default=None, ge=1, le=64)
    pace: PositiveRate | None = None
    latency: Time = 0
    folder: str | None = None


class RunConfig(_Block):
    """One run: a source of routing, a machine and a policy. The keys are a contract."""

    name: str | None = None  # for people; changes nothing
    trace: str | None = None  # a .parquet file of recorded routing
    synthetic: SyntheticConfig | None = None  # routing that is made up
    live: str | None = None  # a model that runs: moe-tiny, a folder, or an id on the hub
    model: str | None = None  # a published geometry, for what the trace does not know
    hardware: str  # `moetier list hardware`, or the path of a YAML
    weights: Weights = None  # `bf16`, `q4_k_m`, ...; null: as recorded
    capacity: dict[str, Capacity] = {}  # by tier: a size, or a share of all experts' bytes
    policy: str | dict[str, Any] = "on-demand"  # a preset, or a mapping of parts
    tiers: list[str] | None = None  # which of the machine's, fastest first; null: all
    exclusive: bool = False  # does a slice leave the tier that it is copied from?
    overlap: bool = False  # an expert begins when its own slices are there, not the whole batch's
    seed: int = Field(default=0, ge=0)  # of random parts
    popularity: str | None = None  # a trace whose counts a `static` part uses, or `own`
    predictor: str | dict[str, Any] | None = None  # whose predictions the batches carry
    measure: MeasureConfig = MeasureConfig()  # what counts
    kv_bytes: int = Field(default=2, ge=1, le=4)  # of one number in the key/value cache
    evaluate: EvaluateConfig = EvaluateConfig()  # of a live run
    machine: MachineConfig | None = None  # of a live run; default: simulated

    @model_validator(mode="after")
    def _one_source(self) -> RunConfig:
        given = [key for key in SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            raise ValueError(f"expected one routing source of {', '.join(SOURCES)}, got {got}")
        if self.popularity == OWN and self.live is not None:
            raise ValueError("a live model has no routing of its `own` yet; name a trace")
        if "evaluate" in self.model_fields_set and self.live is None:
            raise ValueError("`evaluate` says what a live model is asked, and none is given")
        if self.machine is not None and self.live is None:
            raise ValueError("`machine` says what performs a live model's run, and none is given")
        if self.model is not None and self.trace is None:
            raise ValueError(f"model '{self.model}' completes a trace, and none is given; drop it")
        return self


def read_mapping(path: str | Path, overrides: list[str] | None = None) -> dict[str, Any]:
    """Return the mapping that the YAML file *path* holds, with *overrides* such as `a.b=c` set."""
    file = find_file(path)
    data = read_yaml(file)
    if not isinstance(data, dict):
        raise InputError(
            f"expected a mapping of keys, got {type(data).__name__}",
            where=file,
            way_out="experiments/configs/ has examples",
        )
    return apply_overrides(data, overrides or [])


def load_run(path: str | Path, overrides: list[str] | None = None) -> RunConfig:
    """Return the run that the YAML file *path* describes; raise `InputError` for what is wrong.

    *overrides* are texts `key.sub=value` whose values are YAML.
    """
    data = read_mapping(path, overrides)
    if any(key in data for key in SWEEP_KEYS):
        raise InputError("this is a sweep, not one run", where=path, way_out="use `moetier sweep`")
    where = f"{path} with --set {' '.join(overrides)}" if overrides else str(path)
    return check_run(data, where)


def check_run(data: dict[str, Any], where: str) -> RunConfig:
    """Return *data* as a run whose names all exist; *where* says where it was given."""
    config = check(RunConfig, data, where)
    with inside(where):
        with inside("hardware"):
            profile = load_hardware(config.hardware)
        cached = build_hierarchy(profile, config.tiers, config.exclusive).cached
        policy = compose(config.policy, cached)
        if config.live is not None and policy.needs_future:
            raise InputError(
                f"'{policy.name}' is an oracle: it needs the future, which a live model does not "
                "have",
                where="policy",
                way_out="use it on a trace",
            )
        if config.model is not None:
            with inside("model"):
                load_geometry(config.model)
        if config.synthetic is not None:
            with inside("synthetic.geometry"):
                whole = load_geometry(config.synthetic.geometry)
            with inside("synthetic"):
                whole.first_layers(config.synthetic.layers or whole.n_moe_layers)
        popularity = None if config.popularity == OWN else config.popularity
        named = {"trace": config.trace, "popularity": popularity}
        for key, file in (named | {"evaluate.prompts": config.evaluate.prompts}).items():
            if file is not None:
                with inside(key):
                    find_file(file)
    return config


def policy_label(spec: str | dict[str, Any]) -> str:
    """Return a short, readable name for a policy, for tables and legends."""
    name = name_of(spec)
    return name if " " in name else name.removeprefix("eviction=")


def load_hardware(text: str) -> Profile:
    """Return the machine of a name or a path; paths are looked for as `find_file` does."""
    is_path = "/" in text or text.endswith((".yaml", ".yml"))
    return load_profile(find_file(text) if is_path else text)
