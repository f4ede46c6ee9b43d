"""This module is a language model for lm-evaluation-harness whose requests somebody else runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # pyright: ignore[reportMissingImports]

from moetier.traces.errors import InputError
from moetier.validate.live_generate import Output, Request, ends_of

MAX_NEW_TOKENS = 256
"""Of a generation whose task does not say; as in lm-eval's own models."""

Run = Callable[[list[Request]], list[Output]]


def build_model(model: Any, tokenizer: Any, run: Run) -> TokenByToken:
    """Return lm-eval's view of *model*, whose requests go to *run*."""
    return TokenByToken(model, tokenizer, run)


class TokenByToken(TemplateLM):  # type: ignore[misc]  # lm-eval has no types
    """Scores and generates through requests: a prompt as prefill, then token by token."""

    def __init__(self, model: Any, tokenizer: Any, run: Run) -> None:
        """Send the requests to *run*; *cut* counts contexts that did not fit the model."""
        super().__init__()
        self.tokenizer, self.run, self.cut = tokenizer, run, 0
        ends = ends_of(model)
        begin = getattr(tokenizer, "bos_token_id", None)
        self._end = ends[0] if ends else begin
        self._begin = begin if begin is not None else self._end
        config = model.config.get_text_config()
        self.most = int(getattr(config, "max_position_embeddings", 0) or 2048)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; it also stands before a text without context."""
        return self._known(self._end)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self._known(self._begin)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return the token ids of a text."""
        given = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer(string, **given)["input_ids"])

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return ln(probability) of each continuation, and whether it is the greedy one."""
        asked = [self._forced(context, answer) for _, context, answer in requests]
        return [(-sum(output.nll), output.greedy) for output in self.run(asked)]

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return ln(probability) of whole texts, in windows as long as the model allows."""
        asked: list[Request] = []
        owners: list[int] = []
        for number, instance in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(instance.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.most,
                context_len=1,
            )
            for context, answer in map(make_disjoint_window, windows):
                asked.append(self._forced(list(context), list(answer)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, output in zip(owners, self.run(asked), strict=True):
            totals[owner] -= sum(output.nll)
        return totals

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return greedy texts, each cut at the first of its stop strings."""
        asked, stops = [], []
        for instance in requests:
            context, how = instance.args
            if how.get("do_sample") and float(how.get("temperature") or 0) > 0:
                raise InputError(
                    f"a task samples (temperature {how['temperature']})",
                    where="--lm-eval",
                    way_out="decoding is greedy here; set `do_sample: false` in the task",
                )
            until = how.get("until") or []
            stops.append([until] if isinstance(until, str) else list(until))
            limit = int(how.get("max_gen_toks") or MAX_NEW_TOKENS)
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            asked.append(Request(self._fitting(prompt, limit), limit))
        texts = []
        for output, until in zip(self.run(asked), stops, strict=True):
            text: str = self.tokenizer.decode(list(output.tokens), skip_special_tokens=True)
            for stop in until:
                text = text.split(stop)[0] if stop else text
            texts.append(text)
        return texts

    def _forced(self, context: list[int], answer: list[int]) -> Request:
        if not answer:
            raise InputError(
                "a task scores a continuation without tokens",
                where="--lm-eval",
                way_out="check the choices of the task",
            )
        return Request(self._fitting(context, len(answer)), len(answer), tuple(answer))

    def _fitting(self, context: list[int], n_more: int) -> tuple[int, ...]:
        """Return what of *context* fits before *n_more* tokens, the last of which is not read."""
        room = self.most - n_more + 1
        if room < 1:
            raise InputError(
                f"a task asks for {n_more} tokens, the model's texts have up to {self.most}",
                where="--lm-eval",
                way_out="lower max_gen_toks in the task",
            )
        self.cut += len(context) > room
        return tuple(context[-room:])

    def _known(self, token: int | None) -> int:
        if token is None:
            raise InputError(
                "a task scores a text without context, and the model has no first or last token",
                where="--lm-eval",
                way_out="give its checkpoint a bos_token_id",
            )
        return token
