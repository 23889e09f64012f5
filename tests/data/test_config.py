"""Configurations of data: each rule refuses a value by name."""

import pytest

from subquad.data.config import DataConfig, LabelledConfig, ListOpsConfig, ProbeConfig


@pytest.mark.parametrize(("kind", "values", "message"), [
    (DataConfig, {"held_out": 0.0}, r"held_out must lie between 0 and 1, both excluded, got 0\.0"),
    (DataConfig, {"vocab_size": 256}, r"vocab_size must be at least 257 for tokenizer='bpe' .*, got 256"),
    (DataConfig, {"tokenizer": "unigram", "vocab_size": 9}, "vocab_size must be at least 257 for tokenizer='unigram'"),
    (DataConfig, {"path": ""}, "path must name a file, a folder, a glob, 'stdlib' or 'hf:NAME'"),
    (LabelledConfig, {"path": "x"}, "classify.path='x' has no effect with dataset=toy"),
    (LabelledConfig, {"dataset": "text", "path": ""}, "classify.path='' must name a folder, a file or hf:NAME"),
    (LabelledConfig, {"dataset": "text", "path": "hf::plain"}, "'hf::plain' names no dataset; it must be hf:NAME or"),
    (LabelledConfig, {"dataset": "listops", "path": "hf:x"}, "listops must be a folder; only text and image can be"),
    (LabelledConfig, {"examples": 0}, "classify.examples must be at least 1, got 0"),
    (LabelledConfig, {"dataset": "text", "path": "x", "listops": {"max_args": 3}}, "classify.listops has no effect wi"),
    (LabelledConfig, {"dataset": "listops", "path": "x", "listops": {"max_args": 3}}, "dataset=listops and path='x'"),
    (LabelledConfig, {"dataset": "listops", "pathfinder": {"difficulty": "easy"}}, "classify.pathfinder has no effect"),
    (LabelledConfig, {"dataset": "retrieval", "path": "x", "validation": "test"}, "no effect with dataset=retrieval"),
    (LabelledConfig, {"validation": "test"}, "no effect with dataset=toy, which has its own validation part; only te"),
    (ListOpsConfig, {"max_depth": 1}, "listops.max_depth must be at least 2, got 1"),
    (ListOpsConfig, {"min_length": 0}, "listops.min_length must be at least 1, got 0"),
    (ListOpsConfig, {"leaf": 1.0}, "listops.leaf must lie between 0 and 1, both excluded, got 1.0"),
    (ListOpsConfig, {"max_length": 500}, "listops.max_length must be at least min_length=501, got 500"),
    (ListOpsConfig, {"max_depth": 3}, "min_length=501 is above the 122 tokens of the longest expression with max_d"),
    (ProbeConfig, {"pairs": 0}, "probe.pairs must be at least 1, got 0"),
    (ProbeConfig, {"held_out": 0}, "probe.held_out must be at least 1, got 0"),
    (ProbeConfig, {"seed": -1}, "probe.seed must be at least 0, got -1"),
    (ProbeConfig, {"name": "copy", "symbols": 1}, "vocabulary is too small: copy needs at least 2, .* least 2, got 1"),
    (ProbeConfig, {"name": "passkey", "symbols": 0}, "vocabulary is too small: passkey needs at least 1"),
    (ProbeConfig, {"name": "copy", "shortest": 0}, "probe.shortest must be at least 1 .* got 0 for copy"),
    (ProbeConfig, {"name": "mqar", "shortest": 3}, "probe.shortest .* needs name=copy, got 3 for mqar"),
])  # fmt: skip
def test_a_wrong_value_is_refused_with_its_rule(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind.from_dict(values)


def test_the_smallest_vocabulary_is_for_trained_tokenizers_only():
    assert DataConfig(vocab_size=257).vocab_size == 257
    assert DataConfig(tokenizer="bytes", vocab_size=1).tokenizer == "bytes"
