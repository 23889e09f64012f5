"""Packed documents through transformers: by `doc_ids`, or by positions that begin again."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from subquad.hf import SubquadCache
from subquad.testing import assert_exact, assert_same_maths
from tests.hf.small import language_model, perceiver_ar, prompt
from tests.models.small import assert_refused

TEXTS = [prompt(1, length, length) for length in (5, 1, 8)]
BATCH = DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": text[0].tolist()} for text in TEXTS])
TOKENS = BATCH["input_ids"]
IDS = torch.tensor([[2] * 5 + [0] + [2] * 8])


def alone(model):
    """Logits of each text, and the mean loss over all tokens that are predicted."""
    outputs = [model(text, labels=text) for text in TEXTS]
    total = sum(output.loss * (text.shape[1] - 1) for output, text in zip(outputs, TEXTS, strict=True))
    return torch.cat([output.logits for output in outputs], 1), total / 11


def test_the_collator_of_transformers_packs():
    model = language_model()
    assert BATCH["position_ids"].tolist() == [[*range(5), 0, *range(8)]]
    logits, loss = alone(model)
    output = model(**BATCH)
    assert_same_maths(output.logits, logits)
    assert_same_maths(output.loss, loss)
    assert output.past_key_values is None
    shared = model(TOKENS.expand(2, -1), position_ids=BATCH["position_ids"]).logits
    assert_same_maths(shared, logits.expand(2, -1, -1))


def test_documents_by_id():
    model = language_model()
    logits, loss = alone(model)
    output = model(TOKENS, labels=TOKENS, doc_ids=IDS)
    assert_same_maths(output.logits, logits)
    assert_same_maths(output.loss, loss)
    summed = model(TOKENS, labels=BATCH["labels"], doc_ids=IDS, num_items_in_batch=11)
    assert_same_maths(summed.loss, loss)
    padded = torch.cat([TOKENS, TOKENS[:, :3]], 1)
    output = model(padded, doc_ids=torch.cat([IDS, torch.full((1, 3), -1)], 1))
    assert_same_maths(output.logits[:, :14], logits)
    mask = (torch.arange(17) < 14).long()[None]
    by_mask = model(padded, attention_mask=mask, doc_ids=torch.cat([IDS, IDS[:, :3]], 1))
    assert_exact(by_mask.logits, output.logits)


def test_documents_by_the_borders_and_numbers_of_transformers_collators():
    model = language_model()
    logits, loss = alone(model)
    for name in ("return_flash_attn_kwargs", "return_seq_idx"):
        collator = DataCollatorWithFlattening(return_tensors="pt", **{name: True})
        batch = collator([{"input_ids": text[0].tolist()} for text in TEXTS])
        for left_out in (None, "position_ids"):
            output = model(**{key: value for key, value in batch.items() if key != left_out})
            assert_same_maths(output.logits, logits)
            assert_same_maths(output.loss, loss)


def test_documents_that_do_not_fit_are_refused():
    model, ones = language_model(), torch.ones_like(TOKENS)
    gap, late, twice = [*range(5), 0, *range(1, 8), 11], [1, 2, 3, 4, 5, 0, *range(8)], [*range(5), 0, 0, *range(2, 9)]
    counting = BATCH | {"labels": TOKENS, "num_items_in_batch": 11}

    cache, counted = "packed documents take no cache and make none", "position_ids must count the row's real tokens"
    assert_refused(
        (lambda: model(**BATCH, use_cache=True), ValueError, cache),
        (lambda: model(**BATCH, past_key_values=SubquadCache()), ValueError, cache),
        (lambda: model(**BATCH, doc_ids=IDS), ValueError, "doc_ids already set the positions, from 0 in each document"),
        *((lambda p=p: model(TOKENS, position_ids=torch.tensor([p])), ValueError, counted) for p in (gap, late, twice)),
        (lambda: model(**BATCH, attention_mask=ones), ValueError, counted),
        (lambda: model(**counting), ValueError, "counts labels at the first tokens of documents or at padding"),
        (lambda: model(TOKENS, cu_seq_lens_q=torch.tensor([0, 3])), ValueError, r"from 0 to its 14 tokens, got 1 rows"),
        (
            lambda: model(TOKENS, cu_seqlens=torch.tensor([0, 3])),
            TypeError,
            "takes no argument 'cu_seqlens'; of packed",
        ),
        (lambda: perceiver_ar()(**BATCH), ValueError, "only a row's last tokens and takes no packed documents"),
    )


def test_borders_with_positions_are_read_and_contradictions_refused():
    model = language_model("llp")
    T = TOKENS.shape[1]
    positions = torch.cat([torch.arange(3), torch.arange(T - 3)])[None]
    ids = (torch.arange(T) >= 3).long()[None]
    packed = model(TOKENS, position_ids=positions).logits
    assert_exact(model(TOKENS, position_ids=positions, seq_idx=ids).logits, packed)
    assert_exact(model(TOKENS, cu_seq_lens_k=torch.tensor([0, 3, T])).logits, packed)
    with pytest.raises(ValueError, match=r"count from 0 in each document of seq_idx"):
        model(TOKENS, position_ids=torch.arange(T)[None], seq_idx=ids)


def test_a_compiled_model_refuses_positions_that_restart():
    model = language_model("llp")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    T = TOKENS.shape[1]
    assert_same_maths(compiled(TOKENS, position_ids=torch.arange(T)[None]).logits, model(TOKENS).logits)
    with pytest.raises(RuntimeError, match="position_ids restart in a row"):
        compiled(TOKENS, position_ids=torch.cat([torch.arange(3), torch.arange(T - 3)])[None])
