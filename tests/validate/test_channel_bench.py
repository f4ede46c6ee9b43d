"""Check what the channel bench measures, at a size that takes no time."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba", reason="the kernel needs the extra 'kernels'")

from moetier.traces.geometry import Geometry
from moetier.validate import channel_bench
from moetier.validate.channel_bench import (
    Plan,
    bench,
    draws,
    in_turn,
    main,
    random_experts,
    torch_block,
)

TINY = Geometry(name="tiny", n_experts=4, top_k=2, moe_layers=[0], hidden=64, moe_intermediate=48)
PLAN = Plan(TINY, batches=(1, 3), reads=(0.3, 0.5), rank=2, repeats=3)


def test_a_row_per_batch_and_target() -> None:
    rows = bench(PLAN)

    assert [(row["batch"], row["reads_target"]) for row in rows] == [
        (1, 0.3),
        (1, 0.5),
        (3, 0.3),
        (3, 0.5),
    ]
    for row in rows:
        assert row["dense_ms"] == min(row["dense_all_ms"].values())
        assert row["speedup"] == pytest.approx(row["dense_ms"] / row["reader_ms"])
        assert row["speedup_low"] <= row["speedup_high"]
        assert row["published"] == ("1.60-1.90" if row["batch"] == 1 else "up to 2.69")


def test_reads_are_the_target_for_one_token_and_a_union_for_more() -> None:
    one, _, three, _ = bench(PLAN)

    assert 0.3 - 1 / 48 < one["reads"] <= 0.3
    assert three["reads"] > 0.3


def test_dense_blocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = random_experts(TINY, 0)
    x, ids, weights = draws(PLAN, 3)[0]
    exact = torch_block(experts, torch.float32)(x, ids, weights)
    rounded = torch_block(experts, torch.bfloat16)(x, ids, weights)

    torch.testing.assert_close(rounded, exact, atol=0.03, rtol=0.03)


def test_every_step_sees_every_draw_but_not_after_another() -> None:
    seen: dict[str, list[float]] = {"a": [], "b": []}
    order: list[tuple[str, float]] = []

    def step(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            seen[name].append(float(x))
            order.append((name, float(x)))
            return x

        return run

    numbers = [torch.tensor(float(i)) for i in range(4)]
    batches = [(number, number, number) for number in numbers]
    times = in_turn({name: step(name) for name in seen}, batches)
    timed = order[2:]  # after one call each to warm up

    assert sorted(seen["a"][1:]) == sorted(seen["b"][1:]) == [0.0, 1.0, 2.0, 3.0]
    assert [len(each) for each in times.values()] == [4, 4]
    assert all(one[1] != two[1] for one, two in zip(timed[::2], timed[1::2], strict=True))


def test_the_command_prints_a_table_or_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_bench, "load_geometry", lambda name: TINY)
    options = ["--batch", "1", "--reads", "0.4", "--rank", "0", "--repeats", "2"]

    assert main(options) == 0
    table = capsys.readouterr().out
    assert main([*options, "--json", "--experts", "3"]) == 0
    rows = json.loads(capsys.readouterr().out)

    assert table.startswith("sketch ")
    assert [(row["k"], row["rank"], row["repeats"]) for row in rows] == [(rows[0]["k"], 0, 2)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "nonesuch"], "unknown model"),
        (["--model", "moe-tiny", "--reads", "0.01", "--batch", "1"], "smallest possible reads"),
    ],
)
def test_input_that_cannot_be_used(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    if "moe-tiny" in options:
        monkeypatch.setattr(channel_bench, "load_geometry", lambda name: TINY)

    assert main(options) == 2
    assert message in capsys.readouterr().err


def test_a_geometry_without_sizes_is_refused() -> None:
    with pytest.raises(ValueError, match="size of an expert"):
        random_experts(Geometry(name="x", n_experts=2, top_k=1, moe_layers=[0]), 0)
