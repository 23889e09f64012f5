"""One flipped bit in a file that a run, a state or the preparation of data wrote: refused by name, or without effect.

Without effect are a file that is only written, and a change that leaves all that is read from the file as it was.
`SUBQUAD_FLIPS` sets how many bits of each file are flipped, one at a time.
"""

import os
import random
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from subquad.cli import main
from subquad.data import DataConfig, load_tokenizer, prepare
from subquad.data.corpus import _open
from subquad.data.special_tokens import special_tokens
from subquad.parsing import read_json
from subquad.state import State
from subquad.testing import assert_exact
from subquad.training import TrainConfig, train
from subquad.training.progress import read_metrics
from subquad.training.runs import load_run
from tests.fuzz.targets import decoder, make_corpus, make_state, make_tokens, read_windows
from tests.training.configs import config_of, write_text
from tests.training.helpers import assert_same_weights, forget

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.draws]
FLIPS = int(os.environ.get("SUBQUAD_FLIPS", "200"))
UNREAD = (".process", "curves.png", "evaluation.json", "report.json", "samples.txt", "events.out.tfevents*")
"""Files of a run that people read, and no command: only the error about a run in use repeats `.process`."""
LISTS = ("checksums.json", "manifest.json", "index.json", "names.json")
"""Files that list others: if they disagree, the error names either."""


def flipped(file, name):
    """Yield `FLIPS` times with another bit of the file flipped; the file is whole afterwards."""
    whole, rng = file.read_bytes(), random.Random(name)
    places = range(len(whole)), [i for i, byte in enumerate(whole) if byte]  # headers are padded with zeros
    for _ in range(FLIPS):
        changed = bytearray(whole)
        changed[rng.choice(rng.choice(places))] ^= 1 << rng.randrange(8)
        file.write_bytes(changed)
        yield
    file.write_bytes(whole)


def outcomes(file, name, read, same):
    """Count the flips that `read` refuses by an error that names the file, and those after which `same(read())`."""
    counts = Counter()
    for _ in flipped(file, name):
        try:
            found = read()
        except (ValueError, TypeError, OSError) as error:
            said, told = str(error), file.parent if file.name in LISTS else file.name
            counts["refused" if str(told) in said else f"refused without its name: {said}"] += 1
        else:
            counts["without effect" if same(found) else "read otherwise"] += 1
    sys.stdout.write(f"{name}: {dict(counts)}\n")
    assert set(counts) <= {"refused", "without effect"}
    return counts


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    """A finished run with its reports; its only checkpoint is that of its second step of four."""
    home = tmp_path_factory.mktemp("run")
    config = config_of(text, home, trackers=["tensorboard"])
    config.to_file(home / "run.yaml")
    assert main(["train", "--config", str(home / "run.yaml"), "--run.sample_tokens", "4"]) == 0
    shutil.rmtree(home / "run" / "checkpoints" / "checkpoint-4")
    return home / "run"


def test_a_finished_model_is_refused_and_its_settings_never_change_it(run):
    tokens = torch.arange(32)[None]

    def answer():
        loaded = load_run(run, "cpu")
        with torch.no_grad():
            return loaded.decoder(tokens)[0], loaded.tokenizer.to_str()

    logits, words = answer()

    def same(found):
        assert_exact(found[0], logits, "the logits")
        return found[1] == words

    sums = read_json(run / "checksums.json")
    assert {"model.safetensors", "config.json", "tokenizer.json", "modeling_subquad.py"} <= set(sums)
    for name in [*sums, "checksums.json"]:
        assert outcomes(run / name, name, answer, same) == {"refused": FLIPS}
    # People change it: what must stay the same is in the manifest of the checkpoint, and in config.json of the model.
    assert outcomes(run / "config.yaml", "config.yaml", answer, same)["refused"] > FLIPS // 4
    metrics = read_metrics(run)
    left = outcomes(run / "metrics.jsonl", "metrics.jsonl", lambda: read_metrics(run), lambda found: found == metrics)
    assert left["refused"] > 0.9 * FLIPS  # without effect is the last line's end, whose line counts as cut off
    assert read_metrics(run) == metrics
    told = {path for part in UNREAD for path in run.rglob(part)}
    assert len(told) == len(UNREAD)
    every = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()} - {
        path.relative_to(run).as_posix() for path in told
    }
    assert {name for name in every if not name.startswith("checkpoints/")} == {
        *sums, "checksums.json", "config.yaml", "metrics.jsonl",
    }  # fmt: skip
    for file in told:
        for _ in flipped(file, file.name):
            pass
    assert same(answer())


def test_a_checkpoint_is_refused_or_resumed_to_the_same_bits(run, tmp_path):
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    config = TrainConfig.from_file(run / "config.yaml")
    config = config.replace(run=config.run.replace(folder=str(copy), trackers=[], resume="must"))
    folder = copy / "checkpoints" / "checkpoint-2"

    def resume():
        forget(copy)
        return train(config).folder

    def same(found):
        assert_same_weights(run, found)
        shutil.rmtree(folder.with_name("checkpoint-4"))
        return True

    assert same(resume())
    for file in sorted(folder.iterdir()):
        counts = outcomes(file, f"checkpoint/{file.name}", resume, same)
        if file.name != "manifest.json":
            assert counts == {"refused": FLIPS}
    assert counts["refused"] > FLIPS // 2


def test_a_state_is_refused(tmp_path):
    make_state(tmp_path)
    file = tmp_path / "a.safetensors"
    assert outcomes(file, "a state", lambda: State.load(file, model=decoder()), bool) == {"refused": FLIPS}


def test_prepared_text_is_refused(tmp_path):
    (tmp_path / "corpus").mkdir()
    make_corpus(tmp_path / "corpus")

    def contents():
        found = _open(tmp_path / "corpus")
        tokens = [part.tokens[:].tolist() for part in (found.train, found.held_out)]
        tokenizer = load_tokenizer(tmp_path / "corpus")
        return tokens, found.held_out_text(), found.files, tokenizer.to_str(), special_tokens(tokenizer)

    whole = contents()
    for file in sorted((tmp_path / "corpus").iterdir()):
        assert outcomes(file, f"prepared text, {file.name}", contents, lambda found: found == whole)["refused"] > 0


def test_a_token_set_is_refused(tmp_path):
    make_tokens(tmp_path)

    def contents():
        read_windows(tmp_path, "stream", "documents")
        found = prepare(DataConfig(path=str(tmp_path / "set"), tokenizer="bytes"))
        parts = [(part.tokens[: len(part)].tolist(), part.documents.tolist()) for part in (found.train, found.held_out)]
        return parts, found.train_files, found.tokenizer.to_str()

    whole = contents()
    for file in sorted(path for path in (tmp_path / "set").rglob("*") if path.is_file()):
        assert outcomes(file, f"token set, {file.name}", contents, lambda found: found == whole)["refused"] > 0
