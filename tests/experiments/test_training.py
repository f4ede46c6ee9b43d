"""`moetier train-predictor` reads a YAML file, writes a checkpoint and says what it reaches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from moetier.experiments.cli import app
from moetier.experiments.training import TrainConfig, load_training, train_from
from moetier.traces.errors import InputError

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a training config and returns its path."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"add {a},{a + 7}=\n" for a in range(10, 22)))

    def write_config(**changes: Any) -> Path:
        config = {
            "model": "traces/samples/moe-tiny",
            "prompts": str(prompts),
            "predictor": {"kind": "low-rank", "rank": 4},
            "out": str(tmp_path / "p.safetensors"),
            "epochs": 2,
            "max_new_tokens": 2,
            **changes,
        }
        path = tmp_path / "train.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in config.items() if v is not None}))
        return path

    return write_config


@pytest.fixture
def one_thread() -> Iterator[None]:
    torch = pytest.importorskip("torch", reason="training needs the extra 'models'")
    pytest.importorskip("transformers", reason="training needs the extra 'models'")
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(kept)


def run(*words: object) -> Any:
    return CliRunner().invoke(app, ["train-predictor", *map(str, words)], env={"COLUMNS": "160"})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"prompts": None}, "expected either prompts or a trace"),
        ({"trace": "x.parquet"}, "expected either prompts or a trace"),
        ({"out": "p.pt"}, "ends in .safetensors, got 'p.pt'"),
        ({"out": "none/p.safetensors"}, "out: its folder does not exist"),
        ({"predictor": "low-rnk"}, "did you mean 'low-rank'"),
        ({"predictor": {"kind": "low-rank", "rnk": 1}}, "parameter 'rnk'"),
        ({"prompts": "none.txt"}, "prompts: none.txt: no such file"),
        ({"epoch": 3}, "did you mean 'epochs'"),
        ({"held_out": 1.5}, "held_out"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(
    write: Write, changes: dict[str, Any], said: str
) -> None:
    result = run(write(**changes))

    assert result.exit_code == 2
    assert said in result.stderr
    assert "train.yaml" in result.stderr


def test_defaults(write: Write) -> None:
    config = load_training(write())

    assert isinstance(config, TrainConfig)
    assert (config.seed, config.held_out, config.validation, config.patience) == (0, 0.2, 0.1, 3)


def test_overrides(write: Write) -> None:
    config = load_training(write(), ["predictor.rank=2", "seed=4"])

    assert config.predictor == {"kind": "low-rank", "rank": 2}
    assert config.seed == 4


def test_a_predictor_without_anything_to_learn_is_status_2(write: Write, one_thread: None) -> None:
    result = run(write(predictor="popularity"))

    assert result.exit_code == 2
    assert "'popularity' has nothing to learn" in result.stderr


def test_a_folder_without_a_model_is_status_2(
    write: Write, tmp_path: Path, one_thread: None
) -> None:
    result = run(write(model=str(tmp_path)))

    assert result.exit_code == 2
    assert "check the name of the model" in result.stderr


@pytest.mark.slow
def test_a_training_from_prompts(write: Write, tmp_path: Path, one_thread: None) -> None:
    result = run(write(), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)

    assert found["predictor"] == {"kind": "low-rank", "rank": 4}
    assert found["model"] == "moe-tiny"
    assert found["n_parameters"] == (7 + 6) * 4 * (128 + 32)
    assert found["prompts"] == {"train": 9, "validation": 1, "held_out": 2}
    assert [(row["horizon"], row["layer"]) for row in found["layers"]] == [
        (h, layer) for h in (1, 2) for layer in range(h, 8)
    ]
    assert len(found["losses"]) == found["epochs"] + 1
    assert (tmp_path / "p.safetensors").is_file()
    again = json.loads(run(write(), "--json").stdout)
    assert again == found


@pytest.mark.slow
def test_a_table_for_people(write: Write, one_thread: None) -> None:
    text = run(write(predictor="router-reuse")).stdout

    assert "router-reuse for moe-tiny: 0 weights of its own" in text
    assert "cosine r" in text
    assert text.count("mean") == 1


@pytest.mark.slow
def test_a_training_from_a_capture_reaches_the_same(
    write: Write, tmp_path: Path, one_thread: None
) -> None:
    from moetier.traces.capture import capture_model
    from moetier.traces.samples import moe_tiny_path

    from_prompts = train_from(load_training(write()), "train.yaml")
    trace = tmp_path / "t.parquet"
    capture_model(
        str(moe_tiny_path()), tmp_path / "prompts.txt", trace,
        hidden=True, max_new_tokens=2, batch_size=8,
    )  # fmt: skip
    from_trace = train_from(load_training(write(prompts=None, trace=str(trace))), "train.yaml")

    assert from_trace == from_prompts


@pytest.mark.slow
def test_a_checkpoint_annotates_a_capture(write: Write, tmp_path: Path, one_thread: None) -> None:
    from moetier.traces.io import TraceReader

    assert run(write(predictor="default-vector")).exit_code == 0
    words = [
        "capture", "--model", "traces/samples/moe-tiny", "--prompts", tmp_path / "prompts.txt",
        "--out", tmp_path / "t.parquet", "--predictor", tmp_path / "p.safetensors",
        "--max-new-tokens", 2,
    ]  # fmt: skip
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    reader = TraceReader(tmp_path / "t.parquet", with_scores=True)

    assert [entry.name for entry in reader.header.predictors] == ["default-vector"]
    assert all(sorted(b.predicted) == ([1] if b.layer < 7 else []) for b in reader.batches())


def test_training_without_torch_says_what_to_install(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(InputError, match=r"needs torch.*moetier\[models\]"):
        train_from(load_training(write()), "train.yaml")
