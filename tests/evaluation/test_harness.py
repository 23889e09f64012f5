"""What lm-evaluation-harness measures through us, against sums of log-probabilities taken by hand and our own loss."""

import functools
import json
import logging
import math
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from subquad.data.tokenizers import bytes_tokenizer
from subquad.data.vocabularies import SEPARATOR, train_bpe
from subquad.evaluation import evaluate
from subquad.evaluation.harness import SEEDS, HarnessModel, evaluate_tasks
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import Decoder, DecoderConfig
from subquad.testing import assert_exact, assert_same_maths

TASKS = Path(__file__).parent / "tasks"
TEXT = "A heron stood in the ford at dusk; it did not move, and neither did we, until the light went. Später kam Regen."
MECHANISMS = {"llp": {"segment": 4}, "linear": {}, "window": {"width": 5}}
BPE = train_bpe([TEXT, "one two three four", "Question: what is it? Answer: the ferry"] * 3, 300)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")


def decoder(attention="llp", vocab_size=256, **fields):
    torch.manual_seed(0)
    options = {attention: MECHANISMS.get(attention, {})}
    shape = {"dim": 16, "num_layers": 1, "num_heads": 2, "position": "sinusoidal", "init_std": 0.4}
    config = DecoderConfig(vocab_size=vocab_size, attention=attention, options=options, **(shape | fields))
    return Decoder(config).double()


def exact(value):
    return torch.tensor(value, dtype=torch.float64)


def request(*arguments):
    return SimpleNamespace(args=arguments, task_name="by hand")


@torch.no_grad()
def by_hand(model, context, answer):
    """log p of the answer's tokens after the context's, and whether each is the likeliest: one pass a token."""
    tokens, total, likeliest = list(context), 0.0, True
    for token in answer:
        logits_V = model(torch.tensor([tokens]))[0][0, -1]
        total += float(F.log_softmax(logits_V, -1)[token])
        likeliest &= int(logits_V.argmax()) == token
        tokens.append(token)
    return total, likeliest


def nats(model, tokens, length=None):
    length = length or len(tokens) - 1
    return evaluate(model, tokens, length=length).loss * (len(tokens) - 1)


@pytest.mark.parametrize("attention", ["llp", "linear"])
def test_the_perplexity_of_a_task_is_that_of_our_own_evaluator(attention, tmp_path):
    model, length, ids = decoder(attention), 16, list(TEXT.encode())
    ids = ids[: len(ids) // length * length]  # whole windows: no last one that has more context than ours
    text = bytes(ids).decode()
    shutil.copy(TASKS / "texts.yaml", tmp_path)
    (tmp_path / "texts.jsonl").write_text(json.dumps({"text": text}))
    found = evaluate_tasks(model, bytes_tokenizer(), ["local_texts"], task_path=tmp_path, length=length).results
    words = len(text.split())
    ours = evaluate(model, [ord("\n"), *ids], length=length, text_bytes=len(ids), words=words)
    assert ours.tokens == len(ids) > 2 * length
    theirs = {name: found["local_texts"][f"{name},none"] for name in ("byte_perplexity", "word_perplexity")}
    assert_same_maths(exact(theirs["byte_perplexity"]), exact(ours.perplexity))
    assert_same_maths(exact(math.log(theirs["word_perplexity"])), exact(ours.loss * len(ids) / words))
    # Ours charges its first token, here the prefix, log2(vocabulary) bits; theirs does not.
    bits = found["local_texts"]["bits_per_byte,none"] + math.log2(256) / len(ids)
    assert_same_maths(exact(bits), exact(ours.bits_per_byte))


@pytest.fixture(scope="module")
def asked():
    model = decoder("llp")
    return model, HarnessModel(model, bytes_tokenizer(), 8, 4, None)


@settings(max_examples=25)
@given(tokens=st.integers(0, 40), length=st.integers(1, 20), batch=st.integers(1, 5))
def test_texts_of_any_length_are_summed_over_the_documented_windows(asked, tokens, length, batch):
    model, harness = asked
    harness._max_length, harness.batch_size_per_gpu = length, batch
    text = TEXT[:tokens]
    prefixed = [ord("\n"), *text.encode()]
    n, rest = len(prefixed) - 1, (len(prefixed) - 1) % length
    expected = nats(model, prefixed[: n - rest + 1], length) if n > rest else 0.0
    if rest:  # the last window reads as many tokens as fit, and counts the rest
        last = prefixed[max(0, n - length) :]
        expected += nats(model, last) - (nats(model, last[:-rest]) if len(last) - 1 > rest else 0.0)
    (theirs,) = harness.loglikelihood_rolling([request(text)], disable_tqdm=True)
    assert_same_maths(exact(-theirs), exact(expected))


PAIRS = [("one two", " three"), ("", "four"), ("x", " y"), ("Was ist", " grün?"), ("a longer beginning of a text", "!")]


@pytest.mark.parametrize(("tokenizer", "batch"), [("bytes", 1), ("bytes", 4), ("bpe", 4)])
def test_an_answers_score_is_the_sum_of_its_log_probabilities(tokenizer, batch):
    tokenizer = bytes_tokenizer() if tokenizer == "bytes" else BPE
    model = decoder("window", vocab_size=len(tokenizer.get_vocab()))
    harness = HarnessModel(model, tokenizer, 64, batch, None)
    prefix = tokenizer.token_to_id(SEPARATOR) if tokenizer is BPE else ord("\n")
    scores = harness.loglikelihood([request(*pair) for pair in PAIRS], disable_tqdm=True)
    for (context, answer), (score, likeliest) in zip(PAIRS, scores, strict=True):
        before = tokenizer.encode(context, add_special_tokens=False).ids
        whole = tokenizer.encode(context + answer, add_special_tokens=False).ids
        expected = by_hand(model, before or [prefix], whole[len(before) :])
        assert_same_maths(exact(score), exact(expected[0]))
        assert likeliest == expected[1]
    assert (harness.asked, harness.cut) == (len(PAIRS), 0)


def test_what_comes_before_an_answer_is_cut_from_the_left_and_counted():
    model = decoder("linear")
    harness = HarnessModel(model, bytes_tokenizer(), 8, 2, None)
    scores = harness.loglikelihood([request(TEXT[:30], "abc"), request("xyz", "abc")], disable_tqdm=True)
    expected = [by_hand(model, TEXT[24:30].encode(), b"abc"), by_hand(model, b"xyz", b"abc")]
    assert_same_maths(exact([s[0] for s in scores]), exact([e[0] for e in expected]))
    assert (harness.asked, harness.cut) == (2, 1)


@torch.no_grad()
def greedy(model, tokens, new):
    tokens = list(tokens)
    for _ in range(new):
        tokens.append(int(model(torch.tensor([tokens]))[0][0, -1].argmax()))
    return tokens[-new:]


FREE = {"until": [], "do_sample": False}
PROMPTS = ["one two three", "a", "Monday", "der Regen kam"]


@pytest.mark.parametrize(("attention", "batch"), [(name, batch) for name in ("llp", "linear") for batch in (1, 4)])
def test_a_continuation_is_the_greedy_one_up_to_its_end_however_many_are_asked_at_once(attention, batch):
    model, end = decoder(attention, vocab_size=len(BPE.get_vocab())), BPE.token_to_id(SEPARATOR)
    if attention == "linear":
        with torch.no_grad():
            model.embedding.tokens.weight[end] *= 3  # so that some texts end and others do not
    harness, options = HarnessModel(model, BPE, 64, batch, None), {**FREE, "max_gen_toks": 9}
    texts = harness.generate_until([request(prompt, dict(options)) for prompt in PROMPTS], disable_tqdm=True)
    expected = [greedy(model, BPE.encode(prompt).ids, 9) for prompt in PROMPTS]
    assert texts == [BPE.decode(tokens[: (*tokens, end).index(end)]) for tokens in expected]
    assert attention == "llp" or 0 < sum(end in tokens for tokens in expected) < len(PROMPTS)
    stop = max(texts, key=len)[4]
    requests = [request(prompt, {**options, "until": [stop]}) for prompt in PROMPTS]
    stopped = harness.generate_until(requests, disable_tqdm=True)
    assert stopped == [text.partition(stop)[0] for text in texts]


def test_the_prompt_of_a_continuation_is_cut_and_counted():
    model = decoder("linear")
    harness = HarnessModel(model, bytes_tokenizer(), 12, 1, None)
    options = {**FREE, "max_gen_toks": 4}
    long, short = (harness.generate_until([request(t, options)], disable_tqdm=True) for t in (TEXT[21:30], TEXT[22:30]))
    assert long == short
    assert (harness.asked, harness.cut) == (2, 1)


def test_batches_change_no_result_and_repeating_gives_the_same():
    names = ["local_texts", "local_choices", "local_words"]
    one, four, again = (
        evaluate_tasks(decoder(), bytes_tokenizer(), names, task_path=TASKS, length=200, batch_size=n, num_fewshot=1)
        for n in (1, 4, 4)
    )
    assert again.results == four.results
    for task, metrics in one.results.items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert_same_maths(exact(four.results[task][metric]), exact(value), f"{task} {metric}")
    assert (one.cut, one.requests) == (0, 4 + 15 + 5)
    assert one.samples["local_choices"] == {"original": 5, "effective": 5}
    assert one.num_fewshot == {"local_texts": 1, "local_choices": 1, "local_words": 0}  # which sets 0 itself
    assert one.task_versions == {"local_texts": 1.0, "local_choices": 2.0, "local_words": 1.0}


def test_accuracy_is_that_of_the_scores_by_hand():
    model, right = decoder("window"), 0
    for line in (TASKS / "choices.jsonl").read_text().splitlines():
        example = json.loads(line)
        context = f"Question: {example['question']}\nAnswer:".encode()
        scores = [by_hand(model, context, f" {choice}".encode())[0] for choice in example["choices"]]
        right += scores.index(max(scores)) == example["answer"]
    found = evaluate_tasks(model, bytes_tokenizer(), ["local_choices"], task_path=TASKS, length=256)
    assert found.results["local_choices"]["acc,none"] == right / 5


def test_the_result_says_what_decided_it_and_is_json(caplog):
    model = decoder().train()
    random.seed(7)
    np.random.seed(7)
    state, numpy_state, torch_state = random.getstate(), np.random.get_state()[1], torch.get_rng_state()
    found = evaluate_tasks(model, bytes_tokenizer(), ["local_choices"], task_path=TASKS, length=24, limit=2)
    values = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert values["samples"] == {"local_choices": {"original": 5, "effective": 2}}
    assert values["config"] == {
        "model": "SubquadForCausalLM", "attention": "llp", "parameters": sum(p.numel() for p in model.parameters()),
        "dtype": "float64", "device": "cpu", "tasks": ["local_choices"], "length": 24, "prefix_token": 10,
        "batch_size": 8, "limit": 2, "bootstrap": 1000, "seeds": SEEDS,
    }  # fmt: skip
    assert values["versions"].keys() == {"subquad", "lm_eval", "torch", "transformers"}
    assert (values["requests"], values["cut"]) == (6, 6)
    assert "6 of 6 requests were longer than the window of 24 tokens and lost their start" in caplog.text
    assert "local_choices" in found.table
    assert model.training
    assert random.getstate() == state
    assert (np.random.get_state()[1] == numpy_state).all()
    assert_exact(torch.get_rng_state(), torch_state)


@pytest.mark.parametrize("position", ["learned", "rotary"])
def test_a_model_of_transformers_is_asked_as_the_harness_does(position):
    """GPT-2 of transformers, with its own tokenizer's special tokens, and a model of ours that transformers wraps."""
    if position == "learned":
        torch.manual_seed(0)
        sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
        model = GPT2LMHeadModel(GPT2Config(vocab_size=300, n_positions=96, **sizes)).double()
    else:
        config = decoder("linear").config.replace(vocab_size=300)
        torch.manual_seed(0)
        model = SubquadForCausalLM(SubquadConfig.from_decoder(config)).double()
    tokenizer = BPE if position == "rotary" else HarnessModel(decoder(vocab_size=300), BPE, 9, 1, None).tokenizer
    length, tasks = None if position == "learned" else 96, ["local_texts", "local_words"]
    found = evaluate_tasks(model, tokenizer, tasks, task_path=TASKS, length=length, batch_size=4)
    assert found.config["length"] == 96
    total, size = 0.0, 0
    for line in (TASKS / "texts.jsonl").read_text().splitlines():
        text = json.loads(line)["text"]
        ids = torch.tensor([[0, *BPE.encode(text).ids]])
        with torch.no_grad():
            logits_BTV = model.eval()(ids[:, :-1]).logits
        total += F.cross_entropy(logits_BTV[0], ids[0, 1:], reduction="sum").item()
        size += len(text.encode())
        assert ids.shape[1] <= 97
    assert_same_maths(exact(math.log(found.results["local_texts"]["byte_perplexity,none"])), exact(total / size))


def test_special_tokens_that_a_text_spells_out_are_text():
    harness = HarnessModel(decoder(vocab_size=300), BPE, 9, 1, None)
    spelled = f"one {SEPARATOR} two"
    assert 0 not in harness.tok_encode(spelled)
    assert harness.tok_decode(harness.tok_encode(spelled)) == spelled
    own = HarnessModel(decoder(), bytes_tokenizer(), 9, 1, None)
    assert own.tok_encode("Ā\n") == list("Ā\n".encode())  # its first character is how a tokenizer writes byte 0
    adds = Tokenizer.from_str(BPE.to_str())
    adds.post_processor = processors.TemplateProcessing(f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, 0)])
    assert adds.encode("one two").ids[0] == 0
    assert HarnessModel(decoder(vocab_size=300), adds, 9, 1, None).tok_encode("one two") == BPE.encode("one two").ids


def test_a_tokenizer_without_any_special_token_pads_with_a_token_that_the_model_has():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=64, n_embd=16, n_layer=1, n_head=2)).double()
    plain = PreTrainedTokenizerFast(tokenizer_object=bytes_tokenizer())
    requests = [request(prompt, {**FREE, "max_gen_toks": 5}) for prompt in PROMPTS]
    one, four = (HarnessModel(model, plain, None, n, 10).generate_until(requests, disable_tqdm=True) for n in (1, 4))
    assert one == four
    assert plain.pad_token_id == 10
    assert len(plain) == 256


def test_a_standard_error_without_a_formula_is_sampled_in_this_process(tmp_path, capsys, monkeypatch):
    for name in ("choices.yaml", "choices.jsonl"):
        text = (TASKS / name).read_text().replace("aggregation: mean", "aggregation: median")
        (tmp_path / name).write_text(text)
    monkeypatch.setattr("multiprocessing.Pool", None)
    error, again = (
        evaluate_tasks(decoder(), bytes_tokenizer(), ["local_choices"], task_path=tmp_path, length=200).results[
            "local_choices"
        ]["acc_stderr,none"]
        for _ in range(2)
    )
    assert 0 < error == again < 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "bootstrapping" in captured.err


def word_level():
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(7)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def test_a_prefix_token_can_be_named():
    model = decoder(vocab_size=7)
    (score,) = HarnessModel(model, word_level(), 9, 1, 3).loglikelihood_rolling([request("w1 w5")], disable_tqdm=True)
    assert_same_maths(exact(-score), exact(nats(model, [3, 1, 5])))


PERCEIVER = decoder().config.replace(attention="perceiver_ar", options={"perceiver_ar": {"latents": 5}})


@pytest.mark.parametrize(("make", "tokenizer", "options", "match"), [
    (lambda: SubquadForCausalLM(SubquadConfig.from_decoder(PERCEIVER)), "bytes", {}, "the last 5 tokens; `subquad"),
    (lambda: decoder(vocab_size=9), "bytes", {}, "256 tokens, the model knows 9; is it another model's"),
    (decoder, "bytes", {"prefix_token": 256}, "prefix_token must be between 0 and 255, the model's vocab.*, got 256"),
    (decoder, "bytes", {"length": None}, "a decoder has no length limit: give one, such as length=1024"),
    (lambda: decoder(position="learned", max_positions=20), "bytes", {"length": 21}, "at most 20, the model's number"),
    (lambda: GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=8, n_embd=8, n_layer=1, n_head=1)), "bytes",
     {"length": 9}, "length must be at most 8, the model's number of positions, got 9"),
    (lambda: decoder(vocab_size=7), "words", {}, "no token that can precede a text .*choose one with prefix_token"),
    (decoder, "bytes", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (decoder, "bytes", {"limit": 0}, "limit must be at least 1, got 0"),
    (decoder, "bytes", {"num_fewshot": -1}, "num_fewshot must be at least 0, got -1"),
    (decoder, "bytes", {"task_path": "nowhere"}, "task_path must be a folder with YAML files of tasks, got 'now"),
    (decoder, "bytes", {"tasks": "local_words"}, "tasks must be a list of at least one name, got"),
    (decoder, "bytes", {"tasks": []}, "tasks must be a list of at least one name, got"),
    (decoder, "bytes", {"length": 6}, "which leaves no room for a prompt in a window of 6; raise"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(make, tokenizer, options, match):
    tokenizer = bytes_tokenizer() if tokenizer == "bytes" else word_level()
    options = {"tasks": ["local_words"], "length": 20, "task_path": TASKS} | options
    with pytest.raises(ValueError, match=match):
        evaluate_tasks(make(), tokenizer, options.pop("tasks"), **options)


@pytest.mark.parametrize(("pair", "match"), [
    (("abc", "defghijkl"), "task's answer has 9 tokens, more than the window of 8; raise --length"),
    (("abc", ""), "task's answer '' adds no token after 'abc'"),
])  # fmt: skip
def test_an_answer_that_cannot_be_scored_is_refused(pair, match):
    harness = HarnessModel(decoder(), bytes_tokenizer(), 8, 1, None)
    with pytest.raises(ValueError, match=match):
        harness.loglikelihood([request(*pair)], disable_tqdm=True)


def test_an_unknown_task_is_answered_with_near_ones(monkeypatch):
    few = functools.partial(TaskManager, include_defaults=False)  # the harness's own take ten seconds to read
    monkeypatch.setattr("subquad.evaluation.harness.TaskManager", few)
    has = r"has local_choices, local_texts, local_words; `lm-eval ls tasks` lists the harness's own"
    with pytest.raises(ValueError, match=rf"unknown task 'local_word'; did you mean 'local_words'.*tasks {has}"):
        evaluate_tasks(decoder(), bytes_tokenizer(), ["local_word"], task_path=TASKS, length=9)


@pytest.mark.slow
def test_the_harness_own_tasks_are_known_beside_those_of_a_folder():
    with pytest.raises(ConnectionError, match="the data of local_words, wikitext is not on this machine"):
        evaluate_tasks(decoder(), bytes_tokenizer(), ["local_words", "wikitext"], task_path=TASKS, length=99)


def test_data_that_only_a_network_has_is_said_to_be(tmp_path):
    task = (TASKS / "texts.yaml").read_text().replace("dataset_path: json", "dataset_path: nobody/nothing")
    (tmp_path / "texts.yaml").write_text(task)
    match = "the data of local_texts is not on this machine and couldn't be downloaded"
    with pytest.raises(ConnectionError, match=match):
        evaluate_tasks(decoder(), bytes_tokenizer(), ["local_texts"], task_path=tmp_path, length=9)


@pytest.mark.parametrize("shots", [None, 2])
def test_only_a_number_of_examples_that_a_task_ignores_is_warned_of(caplog, shots):
    with caplog.at_level(logging.WARNING):  # the harness warns of a model in memory
        evaluate_tasks(
            decoder(), bytes_tokenizer(), ["local_words"], task_path=TASKS, length=99, limit=1, num_fewshot=shots
        )
    said = "local_words fixes num_fewshot at 0 and ignores num_fewshot=2"
    assert [said in record.getMessage() for record in caplog.records] == [True] * (shots is not None)
    assert logging.getLogger("lm_eval.models.huggingface").level == logging.NOTSET
