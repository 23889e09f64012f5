"""Packed documents through transformers: by `doc_ids`, or by positions that begin again."""

import pytest
import torch
from transformers import DataCollatorWithFlattening

from subquad.hf import SubquadCache, SubquadConfig, SubquadForCausalLM
from subquad.testing import assert_exact, assert_same_maths

LENGTHS = (5, 1, 8)


def tiny(attention="llp", **options):
    torch.manual_seed(0)
    shape = {"vocab_size": 23, "dim": 16, "num_layers": 2, "num_heads": 2, "init_std": 0.3}
    return SubquadForCausalLM(SubquadConfig(attention=attention, options=options, **shape)).double().eval()


def texts():
    return [torch.randint(23, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]


def flattened():
    return DataCollatorWithFlattening(return_tensors="pt")([{"input_ids": text} for text in texts()])


def alone(model):
    """Logits of each text, and the mean loss over all tokens that are predicted."""
    outputs = [model(torch.tensor([text]), labels=torch.tensor([text])) for text in texts()]
    counts = [len(text) - 1 for text in texts()]
    total = sum(output.loss * count for output, count in zip(outputs, counts, strict=True))
    return torch.cat([output.logits for output in outputs], 1), total / sum(counts)


def test_the_collator_of_transformers_packs():
    model, batch = tiny(llp={"segment": 4}), flattened()
    assert batch["position_ids"].tolist() == [[*range(5), 0, *range(8)]]
    logits, loss = alone(model)
    output = model(**batch)
    assert_same_maths(output.logits, logits)
    assert_same_maths(output.loss, loss)
    assert output.past_key_values is None


def test_documents_by_id():
    model, batch = tiny(llp={"segment": 4}), flattened()
    ids = torch.tensor([[2] * 5 + [0] + [2] * 8])
    logits, loss = alone(model)
    labels = batch["input_ids"]
    output = model(batch["input_ids"], labels=labels, doc_ids=ids)
    assert_same_maths(output.logits, logits)
    assert_same_maths(output.loss, loss)
    summed = model(batch["input_ids"], labels=batch["labels"], doc_ids=ids, num_items_in_batch=11)
    assert_same_maths(summed.loss, loss)
    padded = torch.cat([labels, labels[:, :3]], 1)
    output = model(padded, doc_ids=torch.cat([ids, torch.full((1, 3), -1)], 1))
    assert_same_maths(output.logits[:, :14], logits)
    by_mask = model(
        padded, attention_mask=(torch.arange(17) < 14).long()[None], doc_ids=torch.cat([ids, ids[:, :3]], 1)
    )
    assert_exact(by_mask.logits, output.logits)


def test_rows_share_positions():
    model, batch = tiny(llp={"segment": 4}), flattened()
    both = batch["input_ids"].expand(2, -1)
    assert_same_maths(model(both, position_ids=batch["position_ids"]).logits[1:], alone(model)[0])


def test_labels_that_are_counted_and_not_predicted():
    model, batch = tiny(), flattened()
    with pytest.raises(ValueError, match="counts labels at the first tokens of documents or at padding"):
        model(**(batch | {"labels": batch["input_ids"]}), num_items_in_batch=11)


@pytest.mark.parametrize("more", [{"use_cache": True}, {"past_key_values": SubquadCache()}])
def test_packed_documents_take_no_cache(more):
    with pytest.raises(ValueError, match="packed documents take no cache and make none"):
        tiny()(**flattened(), **more)


def test_positions_and_documents_at_once():
    with pytest.raises(ValueError, match=r"doc_ids already set the positions, .*: leave position_ids out"):
        tiny()(**flattened(), doc_ids=torch.zeros(1, 14, dtype=torch.int64))


@pytest.mark.parametrize(
    "wrong", [[[*range(5), 0, *range(1, 9)]], [[1, 2, 3, 4, 5, 0, *range(8)]], [[*range(5), 0, 0, 2, 3, 4, 5, 6, 7, 8]]]
)
def test_positions_with_gaps_are_refused(wrong):
    wrong[0][-1] += 3
    with pytest.raises(ValueError, match="position_ids must count the row's real tokens"):
        tiny()(flattened()["input_ids"], position_ids=torch.tensor(wrong))


def test_positions_that_begin_again_beside_a_mask_are_refused():
    batch = flattened()
    with pytest.raises(ValueError, match="position_ids must count the row's real tokens"):
        tiny()(**batch, attention_mask=torch.ones(1, 14, dtype=torch.int64))


def test_a_stack_takes_one_document_a_row():
    model = tiny("perceiver_ar", perceiver_ar={"latents": 4})
    with pytest.raises(
        ValueError, match="perceiver_ar predicts only a row's last tokens and takes no packed documents"
    ):
        model(**flattened())
