"""Reading channels: what is looked up and read, by hand and against plain loops."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetier.sim.layout import Layout
from moetier.sim.policy.base import Context
from moetier.sim.policy.compose import compose, presets
from moetier.sim.policy.precision.channels import Channels
from moetier.sim.policy.prefetch.predicted import ranked
from moetier.sim.policy.routing.rerouting import cached_experts
from moetier.sim.run import Setting, simulate
from moetier.sim.testing import Run, run, toy_header, toy_profile, toy_trace
from moetier.traces.batch import DECODE, LayerBatch
from moetier.traces.channels import channel_cost
from moetier.traces.errors import InputError
from moetier.traces.gating import GateRule
from moetier.traces.geometry import load_geometry

# An expert: 4 channels of three rows of 64 bytes. Its sketch: 8 rows of 7 bytes of trits, 16 of
# scales and 8 of norms, each in whole sectors of 32.
WHOLE, CHANNEL, SKETCH = 768, 192, 64 + 32 + 32
SIZES: dict[str, Any] = {"hidden": 32, "moe_intermediate": 4, "layers": 2}
TWO = {"kind": "channels", "reads": "70 %", "recovery": "none"}  # 2 channels: 66.7 %
HEADER = toy_header(WHOLE, n_experts=4, top_k=2, **SIZES)
FAST = toy_profile(gpu={"peak": "1000 TOP/s"})  # bound by bytes, one a nanosecond


def started(**arguments: Any) -> Channels:
    given: dict[str, Any] = {"reads": "70 %", "recovery": "none"}
    part = Channels(**(given | arguments))
    layout = part.layout([WHOLE, WHOLE], HEADER.geometry)
    part.start(Context(layout, 4 * WHOLE, (), np.random.default_rng(0)))
    return part


def batch(experts: list[int], mask: Any = None, n_tokens: int = 1) -> LayerBatch:
    """Return a batch of layer 1 that keeps *mask*, rows of channels."""
    screen = None if mask is None else lambda _: np.array(mask, np.bool_).reshape(-1, 4)
    return LayerBatch(0, DECODE, 1, n_tokens, n_tokens, experts, screen=screen)


def replayed(precision: Any, steps: list[Any], capacity: int = 4 * WHOLE, **policy: Any) -> Run:
    trace = toy_trace(HEADER, steps)
    return run(trace, FAST, {"precision": precision} | policy, capacity={"hbm": capacity})


def test_a_token_reads_sketch_and_kept_channels_of_whole_experts() -> None:
    token = [[0, 1], [2, 3]]
    seen = replayed(TWO, [token, token, token])

    read = 2 * (SKETCH + 2 * CHANNEL)
    assert seen.column("lookup_bytes") == [2 * WHOLE] * 6
    assert seen.column("fetch_bytes") == [2 * WHOLE] * 2 + [0] * 4
    assert seen.column("spared_bytes") == [2 * WHOLE - read] * 6
    assert seen.column("expert_ns") == [read] * 6
    assert seen.metrics["weight_read_share"] == read / (2 * WHOLE) == 2 / 3
    assert seen.metrics["lossless"] is False


def test_a_recovery_map_is_read_too() -> None:
    seen = replayed({"kind": "channels", "reads": "75 %", "rank": 1}, [[[0, 1], [0, 1]]])

    maps = 64 + 32  # U of 32 numbers, and V of 4 in a sector, 16 bit each
    assert seen.metrics["weight_read_share"] == (SKETCH + maps + CHANNEL) / WHOLE


def test_more_than_all_channels_reads_more_than_the_expert() -> None:
    seen = replayed(TWO | {"reads": "200 %"}, [[[0, 1], [0, 1]]])

    assert seen.column("spared_bytes") == [-2 * SKETCH] * 2
    assert seen.metrics["weight_read_share"] == 1 + SKETCH / WHOLE


def test_reads_may_be_a_number() -> None:
    assert started(reads=0.7).kept == started(reads="70 %").kept == [2, 2]
    assert started(reads=0.1667).kept == [0, 0]


def test_a_batch_reads_what_any_token_keeps() -> None:
    part = started()
    both = batch([0, 1, 1, 2], [[1, 1, 0, 0], [1, 0, 1, 0], [0, 1, 1, 0], [0] * 4], n_tokens=2)

    assert part.needed(both) == [4, 5, 5, 6]
    kept = 2 + 3 + 0  # of experts 0, 1 and 2
    assert part.spared(both, [4, 5, 6]) == 3 * WHOLE - (3 * SKETCH + kept * CHANNEL)
    assert part.spared(both, [4, 6]) == 2 * WHOLE - (2 * SKETCH + 2 * CHANNEL)  # 1 is skipped


def test_only_blocks_with_a_kept_channel_are_looked_up() -> None:
    part = started(unit="block", blocks=2)
    both = batch([3, 0, 0, 1], [[1, 1, 0, 0], [1, 0, 0, 1], [0, 0, 1, 1], [0] * 4], n_tokens=2)
    layout = part.context.layout

    assert (layout.n_parts, layout.nbytes[0], layout.total_bytes) == (2, WHOLE // 2, 8 * WHOLE)
    assert part.needed(both) == [8 + 6, 8 + 0, 8 + 1, 8 + 1]
    kept = 2 + 3  # of experts 3 and 0; of expert 1 only the sketch is read
    assert part.spared(both, [14, 8, 9]) == 3 * WHOLE // 2 - (3 * SKETCH + kept * CHANNEL)
    assert part.spared(both, [8, 9]) == WHOLE - (2 * SKETCH + 3 * CHANNEL)  # 3 is skipped


def test_blocks_are_fetched_and_kept_one_by_one() -> None:
    token = [[0, 1], [2, 3]]
    one = TWO | {"reads": "45 %", "unit": "block", "blocks": 4}  # 1 channel: 41.7 %
    seen = replayed(one, [token] * 30)

    assert seen.column("lookup_bytes") == [2 * CHANNEL] * 60
    assert seen.column("expert_ns") == [2 * (SKETCH + CHANNEL)] * 60
    assert 0 < seen.metrics["misses"] < 60
    assert seen.column("spared_bytes") == [-2 * SKETCH] * 60


def test_an_expert_that_keeps_nothing_needs_no_block() -> None:
    none = TWO | {"reads": "17 %", "unit": "block", "blocks": 4}
    seen = replayed(none, [[[0, 1], [2, 3]]] * 2)

    assert seen.column("lookups") == [0] * 4
    assert seen.column("expert_ns") == [2 * SKETCH] * 4


def test_a_skipped_expert_is_not_read() -> None:
    seen = replayed(TWO, [[[0, 1], [2, 3]]], miss="skip")

    assert seen.column("skipped") == [2, 2]
    assert seen.column("spared_bytes") == [0, 0]
    assert seen.column("expert_ns") == [0, 0]


def test_sketches_and_maps_lie_beside_the_cache() -> None:
    part = started(recovery="low-rank", rank=1, reads="80 %", unit="block", blocks=2)

    assert part.beside(HEADER.geometry) == 2 * 4 * (SKETCH + 64 + 32)
    setting = Setting(FAST, {"precision": TWO}, {"hbm": 2 * WHOLE})
    stage = simulate(toy_trace(HEADER, [[[0, 1], [2, 3]]]), setting).stage
    assert stage.budget.sketches == 2 * 4 * SKETCH
    assert stage.costs.layout is stage.layout


def test_a_trace_draws_k_and_says_so() -> None:
    part = started(reads="45 %")
    (row,) = part._drawn(batch([1]))
    many = part._drawn(batch([1] * 4000, n_tokens=4000))
    shares = many.mean(0)

    assert row.sum() == 1
    assert many.sum(1).tolist() == [1] * 4000
    assert shares == pytest.approx([0.25] * 4, abs=0.04)
    seen = replayed(TWO, [[[0, 1], [2, 3]]])
    (said,) = [text for text in seen.result.known_limitations if "channels matter" in text]
    assert "2 of 4 are drawn" in said


def test_draws_follow_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moetier.sim.policy.precision.channels._DRAWN", 8)  # two entries at a time
    blocks = TWO | {"reads": "45 %", "unit": "block", "blocks": 4}
    trace = toy_trace(HEADER, [[[[0, 1], [2, 3]], [[0, 2], [1, 3]]]] * 8)
    policy = {"precision": blocks}
    first, again, other = (
        run(trace, FAST, policy, capacity={"hbm": 2 * WHOLE}, seed=seed) for seed in (0, 0, 1)
    )

    assert first.digest == again.digest != other.digest


def test_everything_that_a_batch_keeps_is_asked_once() -> None:
    part, asked = started(unit="block", blocks=2), []

    def screen(given: LayerBatch) -> Any:
        asked.append(given)
        return np.ones((1, 4), np.bool_)

    one = LayerBatch(0, DECODE, 1, 1, 1, [2], screen=screen)
    part.spared(one, part.needed(one))

    assert asked == [one]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reads": "16 %"}, r"policy\.precision: reads of 16\.00% do not pay .* are 16\.67 %"),
        ({"reads": "30 %", "recovery": "low-rank"}, r"a recovery map of rank 16 does not fit 4"),
        ({"unit": "block", "blocks": 3}, r"4 channels have no 3 equal blocks; choose a number"),
        ({"rank": 2}, r"a rank of 2 without a recovery map; use `recovery: low-rank`"),
        ({"reads": "much"}, "much"),
    ],
)
def test_what_does_not_fit_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        started(**arguments)


def test_experts_without_a_gate_are_refused() -> None:
    geometry = HEADER.geometry.model_copy(update={"expert_matrices": 2})
    with pytest.raises(InputError, match=r"policy\.precision: the experts of 'toy' have no gate"):
        Channels(recovery="none").layout([WHOLE], geometry)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"miss": "cpu"}, r"policy\.miss: 'Channels' is computed where its sketches are"),
        ({"miss": "degrade"}, r"policy\.miss: 'Degrade' is about MSB and LSB slices"),
        ({"eviction": "slice-aware"}, r"policy\.eviction: 'SliceAware' is about MSB"),
    ],
)
def test_combinations_without_sense_are_refused(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replayed(TWO, [[[0, 1], [2, 3]]], **policy)


def test_an_oracle_foresees_experts_but_no_drawn_blocks() -> None:
    token = [[0, 1], [2, 3]]
    assert replayed(TWO, [token] * 2, eviction="belady").metrics["misses"] == 4
    with pytest.raises(InputError, match="'Channels' draws what is needed, so that no oracle"):
        replayed(TWO | {"unit": "block", "blocks": 2}, [token] * 2, eviction="belady")


def test_a_predicted_expert_comes_with_all_its_blocks() -> None:
    layout = started(unit="block", blocks=2).context.layout
    gate = GateRule.of(HEADER)
    context = Context(layout, 4 * WHOLE, (), np.random.default_rng(0), gate=gate)
    one = LayerBatch(0, DECODE, 0, 1, 1, [0, 1])
    one.predicted[1] = np.array([[0.1, 0.9, 0.2, 0.8]], np.float32)

    assert list(ranked(context, one, 1)) == [10, 11, 14, 15]


def test_an_expert_counts_as_cached_with_half_its_blocks() -> None:
    layout = Layout([[1] * 4] * 2, 3, blocks=True)
    resident = {12, 13, 16, 20, 21, 22}  # 2, 1 and 3 blocks of layer 1
    context = Context(layout, 24, resident, np.random.default_rng(0))

    assert cached_experts(context, 1).tolist() == [True, False, True]


def test_the_preset_is_the_published_reader() -> None:
    part = compose("channel-reader").precision
    assert isinstance(part, Channels)
    geometry = load_geometry("qwen3-30b-a3b")
    part.layout([geometry.expert_weights * 2] * 48, geometry)

    assert presets()["channel-reader"]["precision"]["reads"] == "17.8 %"
    assert (part.rank, part.rule, part.whole) == (16, "top-k", True)
    assert part.kept == [77] * 48
    share = channel_cost(geometry, rank=16).share(77)
    assert 0.177 < share <= 0.178


masks = st.lists(st.integers(0, 15), min_size=4, max_size=4)


@given(first=masks, second=masks, blocks=st.sampled_from([1, 2, 4]))
def test_reads_are_those_of_plain_loops(first: list[int], second: list[int], blocks: int) -> None:
    """Two tokens, each on experts 0 to 3 in its own order; a number is a row of four channels."""
    part = started(unit="block" if blocks > 1 else "expert", blocks=blocks)
    experts = [0, 1, 2, 3, 3, 1, 0, 2]
    rows = [[row >> c & 1 for c in range(4)] for row in first + second]
    made = batch(experts, rows, n_tokens=2)
    needed, read = [], 0
    for e, row in zip(experts, rows, strict=True):
        touched = {c * blocks // 4 for c in range(4) if row[c]} if blocks > 1 else {0}
        needed += [(4 + e) * blocks + block for block in sorted(touched)]
    for e in range(4):
        union = {
            c for at, row in zip(experts, rows, strict=True) if at == e for c in range(4) if row[c]
        }
        read += SKETCH + len(union) * CHANNEL
    unique = sorted(set(needed))

    assert part.needed(made) == needed
    assert part.spared(made, unique) == len(unique) * WHOLE // blocks - read
