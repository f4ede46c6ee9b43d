"""This module tests the prompts that the quickstart captures."""

from __future__ import annotations

from importlib.resources import files

from moetier.traces.samples.tasks import TASKS, held_out_items


def test_the_sample_prompts_are_four_held_out_items_of_every_task() -> None:
    text = (files("moetier.traces.samples") / "prompts.txt").read_text()

    assert text.splitlines() == [item.prompt for item in held_out_items(4, seed=1)]
    assert len(text.splitlines()) == 4 * len(TASKS)
