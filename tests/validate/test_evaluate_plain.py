"""Runs of the plain model are kept, and told apart by all that decides them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="validation needs the extra 'models'")
pytest.importorskip("transformers", reason="validation needs the extra 'models'")

from torch import nn  # noqa: E402

from moetier.validate import evaluate_plain  # noqa: E402  # needs torch
from moetier.validate.evaluate_plain import HELD, Plain  # noqa: E402
from moetier.validate.live_generate import Decoding, Output, Request  # noqa: E402

REQUESTS = [Request((3, 4), 2), Request((5,), 1, (6,))]
OUTPUTS = [Output((1, 2), (0.1, 1 / 3), "ab"), Output((6,), (2.5,), "cd")]


class Model(nn.Module):
    """A model that is never run."""

    device = torch.device("cpu")

    def __init__(self, experts: str = "grouped_mm") -> None:
        """Name an experts implementation."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.experts = experts

    @property
    def config(self) -> Any:
        """Return what is read of a configuration."""
        model = self

        class Config:
            _experts_implementation = model.experts
            _attn_implementation = "sdpa"

            def get_text_config(self) -> Any:
                return self

        return Config()


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[list[Request]]]:
    """Count the runs of a model that always says the same."""
    made: list[list[Request]] = []

    def fake(model: Any, requests: list[Request], decoding: Decoding, **_: Any) -> list[Output]:
        made.append(requests)
        return list(OUTPUTS)

    monkeypatch.setattr(evaluate_plain, "generate", fake)
    evaluate_plain._memory.clear()
    yield made
    evaluate_plain._memory.clear()


def test_the_second_time_comes_from_memory(runs: list[Any]) -> None:
    plain = Plain(Model(), "m")

    assert plain.run(REQUESTS, Decoding()) == OUTPUTS
    assert plain.run(REQUESTS, Decoding()) == OUTPUTS
    assert len(runs) == plain.ran == 1


def test_another_process_reads_the_folder_exactly(runs: list[Any], tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    Plain(Model(), "m", folder).run(REQUESTS, Decoding())
    evaluate_plain._memory.clear()

    assert Plain(Model(), "m", folder).run(REQUESTS, Decoding()) == OUTPUTS
    assert len(runs) == 1


@pytest.mark.parametrize("text", ["", "{}", "[[1]]", "[3]", "\x00"])
def test_a_damaged_file_is_run_again(runs: list[Any], tmp_path: Path, text: str) -> None:
    plain = Plain(Model(), "m", tmp_path)
    (tmp_path / f"{plain.key(REQUESTS, Decoding())}.json").write_text(text)

    assert plain.run(REQUESTS, Decoding()) == OUTPUTS
    assert len(runs) == 1


@pytest.mark.parametrize(
    "change", [("2.5", "9.0"), ("true", "false"), ('"sha256": "', '"sha256": "0')]
)
def test_a_figure_that_was_changed_is_not_believed(
    change: tuple[str, str], runs: list[Any], tmp_path: Path
) -> None:
    Plain(Model(), "m", tmp_path).run(REQUESTS, Decoding())
    evaluate_plain._memory.clear()
    (file,) = tmp_path.glob("*.json")
    before = file.read_text()
    file.write_text(before.replace(*change))
    assert file.read_text() != before

    assert Plain(Model(), "m", tmp_path).run(REQUESTS, Decoding()) == OUTPUTS
    assert len(runs) == 2


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(
    runs: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("")

    assert Plain(Model(), "m", file / "below").run(REQUESTS, Decoding()) == OUTPUTS


def test_again_trusts_nothing(runs: list[Any], tmp_path: Path) -> None:
    plain = Plain(Model(), "m", tmp_path)
    plain.run(REQUESTS, Decoding())
    plain.run(REQUESTS, Decoding(), again=True)

    assert len(runs) == 2


def test_all_that_decides_bits_is_in_the_key() -> None:
    kept = torch.get_num_threads()
    torch.set_num_threads(1)
    keys = [
        Plain(Model(), "m").key(REQUESTS, Decoding()),
        Plain(Model(), "n").key(REQUESTS, Decoding()),
        Plain(Model("eager"), "m").key(REQUESTS, Decoding()),
        Plain(Model().to(torch.bfloat16), "m").key(REQUESTS, Decoding()),
        Plain(Model(), "m").key(REQUESTS[:1], Decoding()),
        Plain(Model(), "m").key(REQUESTS[::-1], Decoding()),
        Plain(Model(), "m").key(REQUESTS, Decoding(2)),
        Plain(Model(), "m").key(REQUESTS, Decoding(1, (5,))),
        Plain(Model(), "m").key(REQUESTS, Decoding(1, (), 3)),
    ]
    torch.set_num_threads(2)
    keys.append(Plain(Model(), "m").key(REQUESTS, Decoding()))
    torch.set_num_threads(kept)

    assert len(set(keys)) == len(keys)


def test_memory_is_bounded_and_keeps_the_latest(runs: list[Any]) -> None:
    plain = Plain(Model(), "m")
    plain.run(REQUESTS, Decoding(1))
    for size in range(2, HELD + 2):
        plain.run(REQUESTS, Decoding(1))
        plain.run(REQUESTS, Decoding(size))

    assert len(evaluate_plain._memory) == HELD
    assert len(runs) == HELD + 1  # the one that was used in between stayed
