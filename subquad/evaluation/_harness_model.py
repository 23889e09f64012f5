"""A model as lm-evaluation-harness asks for it. Imported where the extra `eval` is installed, by `harness` alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from tokenizers import Tokenizer
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from subquad.data.tokenizers import check_vocabulary, separator_id
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder

LIMITS = ("max_position_embeddings", "n_positions", "n_ctx")
"""Where models of transformers keep the number of their positions."""


class HarnessModel(HFLM):
    """`HFLM` over a model in memory, which says what it cannot do and counts what it cut.

    `asked` counts the requests and `cut` those whose text before the answer was too long, so that its start was left
    out. Raises `ValueError` for an answer that is longer than the window, or has no token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prefix_token: int,
        length: int | None,
        batch_size: int,
        adds_special_tokens: bool,
    ) -> None:
        self.asked = self.cut = 0
        if tokenizer.pad_token_id is None:
            # Any token does, for a mask covers it; a token of its own would lie outside of the embedding.
            tokenizer.pad_token_id = prefix_token
        super().__init__(
            pretrained=model,
            tokenizer=tokenizer,
            prefix_token_id=prefix_token,
            max_length=length,
            batch_size=batch_size,
            add_bos_token=None if adds_special_tokens else False,
        )

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> Any:
        """The text of tokens; None for no token, which is the end of text of a tokenizer that has none."""
        return None if tokens is None else super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        rolling = override_bs is not None  # windows of a text, which the harness cuts to fit
        for texts, context, answer in requests:
            if not answer:
                raise ValueError(f"the answer {texts[1]!r} of a task has no token of its own after {texts[0][-40:]!r}")
            if len(answer) > self.max_length:
                raise ValueError(
                    f"an answer of a task has {len(answer)} tokens, more than the window of {self.max_length}; "
                    "raise --length"
                )
            self.asked += not rolling
            self.cut += len(context) + len(answer) > self.max_length + 1
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm or rolling, override_bs=override_bs)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """log p of whole texts, in windows that do not overlap; the last has as many tokens before as fit."""
        self.asked += len(requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> Any:
        """Continuations of prompts up to a stop string; a prompt and its continuation fit the window together."""
        for request in requests:
            prompt, options = request.args
            new = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if new >= self.max_length:
                raise ValueError(
                    f"a task generates up to {new} tokens, which leaves no prompt in a window of {self.max_length}: "
                    "raise --length"
                )
            self.asked += 1
            self.cut += len(self.tok_encode(prompt)) > self.max_length - new
        return super().generate_until(requests, disable_tqdm=disable_tqdm)


def as_transformers(decoder: Decoder, end_token: int | None) -> SubquadForCausalLM:
    """The decoder itself, not a copy, as a model of transformers whose `generate` ends at `end_token`.

    Raises `ValueError` for a model that (as `PerceiverAR`) does not predict all the tokens that a task scores.
    """
    if decoder.predicts_last is not None:
        raise ValueError(
            f"tasks score answers of any length, and {decoder.config.attention} predicts its last "
            f"{decoder.predicts_last} tokens alone; "
            "`subquad eval` without --tasks measures it on a text"
        )
    with torch.device("meta"):  # its own weights are replaced at once
        model = SubquadForCausalLM(SubquadConfig.from_decoder(decoder.config, eos_token_id=end_token))
    model.model = decoder
    return model


@contextmanager
def quiet() -> Iterator[None]:
    """Keep back what `HFLM` warns of: a model in memory (meant), and each text that is cut (`cut` counts them)."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def wrap(
    model: Decoder | PreTrainedModel,
    tokenizer: Tokenizer | PreTrainedTokenizerBase,
    length: int | None,
    batch_size: int,
    prefix_token: int | None,
) -> HarnessModel:
    """The `HarnessModel`; `ValueError` for what does not fit together."""
    decoder = model.model if isinstance(model, SubquadForCausalLM) else model
    vocabulary = model.config.vocab_size
    end = None
    if isinstance(tokenizer, Tokenizer):
        end = separator_id(tokenizer)
        check_vocabulary(tokenizer, vocabulary)
    prefix = _prefix(tokenizer) if prefix_token is None else prefix_token
    if not 0 <= prefix < vocabulary:
        raise ValueError(f"prefix_token must be between 0 and {vocabulary - 1}, the model's vocabulary, got {prefix}")
    wrapped: PreTrainedModel
    if isinstance(decoder, Decoder):
        wrapped = as_transformers(decoder, end)
        if length is None:
            raise ValueError("a decoder has no length of its own: give one, as length=1024")
        most = decoder.config.max_positions if decoder.config.position == "learned" else None
    else:
        wrapped = decoder
        most = next((n for key in LIMITS if (n := getattr(model.config, key, None)) is not None), None)
    if length is not None and most is not None and length > most:
        raise ValueError(f"length must be at most {most}, the positions that the model has, got {length}")
    return HarnessModel(
        wrapped,
        _fast(tokenizer, end) if isinstance(tokenizer, Tokenizer) else tokenizer,
        prefix_token=prefix,
        length=length,
        batch_size=batch_size,
        adds_special_tokens=not isinstance(tokenizer, Tokenizer),
    )


def _fast(tokenizer: Tokenizer, end: int | None) -> PreTrainedTokenizerFast:
    """The tokenizer in transformers' form: special tokens that a text spells out stay text, as in training."""
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()),
        eos_token=None if end is None else tokenizer.id_to_token(end),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _prefix(tokenizer: Tokenizer | PreTrainedTokenizerBase) -> int:
    """The token that a text begins after."""
    if not isinstance(tokenizer, Tokenizer):
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        token = next((token for token in special if token is not None), None)
    elif (token := separator_id(tokenizer)) is None:
        line_break = tokenizer.encode("\n", add_special_tokens=False).ids
        token = line_break[0] if len(line_break) == 1 else None
    if token is None:
        raise ValueError(
            "the tokenizer has no token that a text could begin after (a separator of documents, a line break, BOS or "
            "EOS): name one by prefix_token"
        )
    return int(token)
