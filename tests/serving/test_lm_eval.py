"""lm-evaluation-harness asks the server the same as `subquad eval --tasks` asks the model."""

import importlib.util
import threading
from contextlib import contextmanager

import pytest
import uvicorn
from lm_eval.evaluator import evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from transformers import PreTrainedTokenizerFast

from subquad.data.special_tokens import separator_id
from subquad.evaluation.harness import prepare_tasks
from subquad.generation import BatchDecoder
from subquad.serving import ServeConfig
from subquad.serving.texts import Texts
from subquad.testing import assert_same_maths
from tests.evaluation.test_harness import BPE, TASKS, decoder, exact
from tests.serving.helpers import make, until


@contextmanager
def listening(app):
    """The address of an application that a thread serves."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="on", ws="none"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)


@pytest.mark.skipif(importlib.util.find_spec("tenacity") is None, reason="the harness asks servers by tenacity")
@pytest.mark.parametrize("attention", ["llp", "linear"])
def test_its_figures_by_the_server_are_those_by_the_model(attention, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    names, model = ["local_texts", "local_choices", "local_words"], decoder(attention, vocab_size=300)
    ours, theirs = (
        prepare_tasks(model, BPE, names, task_path=TASKS, length=200, num_fewshot=1, batch_size=4) for _ in range(2)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=BPE, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    end = separator_id(BPE)
    app = make(
        BatchDecoder(model, slots=4, max_context=400),
        config=ServeConfig(slots=4, max_prompt=300, max_tokens=100),
        texts=Texts(BPE, end_tokens=frozenset([end])),
    )
    with listening(app) as url:
        api = LocalCompletionsAPI(
            f"{url}/v1/completions", model="tiny", tokenizer=str(tmp_path / "tokenizer"),
            tokenizer_backend="huggingface", custom_prefix_token_id=end, max_length=300, batch_size=4, max_retries=1,
        )  # fmt: skip
        found = evaluate(api, theirs.loaded, bootstrap_iters=0, log_samples=False)["results"]
    expected = ours.measure().results
    compared = 0
    for task, metrics in expected.items():
        for metric, value in metrics.items():
            if isinstance(value, float) and "stderr" not in metric:
                assert_same_maths(exact(found[task][metric]), exact(value), f"{task} {metric}")
                compared += 1
    assert compared == 6
