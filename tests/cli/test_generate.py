"""`subquad generate`: prompts, states, stop strings, samples, beams, files of texts, decoding of a Perceiver AR."""

import io
import json
import re
import sys
import zipfile

import pytest

from subquad.cli import main
from subquad.data import DataConfig, prepare
from subquad.generation import Generation
from tests.cli.folders import save_model, word_tokenizer

LLP = {"options": {"llp": {"segment": 8}}, "tie_embeddings": False}
PERCEIVER = {"attention": "perceiver_ar", "num_layers": 2}
LATENTS = {"latents": 5, "history": "self", "history_tokens": 6}
NINE = " ".join(f"w{i}" for i in range(9))
ONE = ["--prompt", "w1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llp"), **LLP)


@pytest.fixture
def text(run, printed):
    """Generate eight greedy tokens, or as the arguments say."""

    def generated(*arguments, folder=run):
        options = {"--temperature": "0", "--max_tokens": "8"}
        default = [part for name, value in options.items() if name not in arguments for part in (name, value)]
        return printed("generate", folder, *default, *arguments)

    return generated


def test_the_prompt_and_what_follows_are_printed_and_measured(run, capsys):
    arguments = ["generate", str(run), "--prompt", "w1 w2", "--max_tokens", "20", "--seed", "3"]
    assert main(arguments) == 0
    streamed = capsys.readouterr()
    assert main([*arguments, "--no-stream"]) == 0
    assert capsys.readouterr().out == streamed.out
    assert streamed.out.startswith("w1 w2")
    said = r"prompt: 2 tokens in [\d.]+ s; generated: 20 tokens in [\d.]+ s \([\d.]+ tokens/s\); state: [\d,]+ bytes\n"
    assert re.fullmatch(said, streamed.err)
    assert main([*arguments[:4], "--max_tokens", "6", "--beams", "3"]) == 0
    assert re.search(r"score: -[\d.]+ nats a token", capsys.readouterr().err)


@pytest.mark.parametrize("how", ["--stream", "--no-stream"])
def test_text_is_printed_while_it_is_generated_or_at_the_end(run, monkeypatch, how):
    plain, shown, out = Generation.__next__, [], io.StringIO()

    def watched(self):
        shown.append(len(out.getvalue()))
        return plain(self)

    monkeypatch.setattr(Generation, "__next__", watched)
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", str(run), *ONE, "--max_tokens", "12", "--seed", "0", how]) == 0
    assert len(set(shown)) > 10 if how == "--stream" else set(shown) == {len("w1")}


def test_a_prompt_is_a_text_a_file_or_standard_input(text, tmp_path, monkeypatch):
    expected = text("--prompt", "w1 w2 w3")
    (tmp_path / "prompt.txt").write_text("w1 w2 w3")
    assert text("--prompt-file", tmp_path / "prompt.txt") == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2 w3"))
    assert text("--prompt", "-") == expected
    for prompt in ("# a comment", "null", "[w1]", "12"):  # YAML would read something else
        assert text("--prompt", prompt, "--max_tokens", "1").startswith(prompt)


@pytest.mark.parametrize("precision", ["--dtype float16", "--dtype bfloat16", "--quantize int8"])
def test_a_text_of_each_precision_is_repeatable(text, precision):
    arguments = ["--prompt", "w1 w2 w3", "--max_tokens", "70", "--temperature", "1", "--seed", "2", *precision.split()]
    made = text(*arguments)
    assert len(made.split()) == 73
    assert text(*arguments) == made


def test_a_state_is_continued_in_its_own_dtype(text, refused, run, tmp_path):
    file = tmp_path / "state"
    half = ("--dtype", "float16")
    text(*ONE, "--max_tokens", "0", "--state-out", file, *half)
    assert text("--prompt", "w2", "--state-in", file, *half)
    message = refused("generate", run, "--prompt", "w2", "--state-in", file)
    assert "with other weights" in message
    assert "use the model that made it, in its dtype" in message


def test_a_stop_string_is_not_printed(text):
    free = text("--prompt", "w1 w2 w3").split()
    stop = free[6]
    for stops in (["--stop", stop], ["--stop", "[none]", "--stop", stop]):
        assert text("--prompt", "w1 w2 w3", *stops).split() == free[: free.index(stop, 3)]


@pytest.mark.parametrize("how", [[], ["--samples", "2"], ["--beams", "2"], ["--texts", "2"]], ids=str)
@pytest.mark.parametrize(("file", "form"), [("config.json", int), ("generation_config.json", lambda end: [end, 0])])
def test_a_text_ends_before_the_end_tokens_of_its_model_in_every_mode(tmp_path, text, file, form, how):
    folder, archive = save_model(tmp_path / "model", **LLP), tmp_path / "texts.zip"
    temperature = "1" if how == ["--beams", "2"] else "0"

    def found():
        if how != ["--texts", "2"]:
            return text("--prompt", "w1 w2", *how, "--temperature", temperature, folder=folder).split()
        text("--prompt", "w1 w2", *how, "--out-file", archive, folder=folder)
        return " ".join(texts(archive).values()).split()

    free = found()
    end = free[-1]
    saved = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(saved | {"eos_token_id": form(int(end.removeprefix("w")))}))
    ended = found()
    assert end in free[3:]
    assert end not in ended
    assert len(ended) < len(free)


def test_a_state_continues_as_the_whole_text_would(text, run, tmp_path, capsys):
    file, longer = tmp_path / "state.safetensors", tmp_path / "longer.safetensors"
    assert text("--prompt", "w1 w2 w3", "--state-out", file, "--max_tokens", "0") == ""
    assert text("--prompt", " w4 w5", "--state-in", file) == text("--prompt", "w1 w2 w3 w4 w5").removeprefix("w1 w2 w3")
    written = "w1 w2 w3" + text("--prompt", " w4 w5", "--state-in", file, "--state-out", longer).rstrip()
    assert text("--prompt", " w6", "--state-in", longer) == text("--prompt", f"{written} w6").removeprefix(written)
    main(["generate", str(run), *ONE, "--state-in", str(file), "--state-out", str(longer), "--max_tokens", "3"])
    said = capsys.readouterr().err
    assert re.search(rf"generated: 3 tokens in .* \(.* tokens/s\); state: [\d,]+ bytes in {longer}\n$", said)
    two = text("--prompt", "w4", "--state-in", file, "--samples", "2")
    assert two == "".join(f"--- {i} ---\n{text('--prompt', 'w4', '--state-in', file)}" for i in (1, 2))


def test_a_draft_changes_no_text(run, text, tmp_path, refused, capsys):
    other = save_model(tmp_path / "other", seed=4, **LLP)
    for draft in ("ngram", run, other):
        for more in ([], ["--samples", "2", "--temperature", "1", "--seed", "3"], ["--stop", "w5"]):
            assert text(*ONE, *more, "--draft", draft) == text(*ONE, *more)
    assert main(["generate", str(run), *ONE, "--max_tokens", "9", "--temperature", "0", "--draft", str(run)]) == 0
    assert re.search(r"tokens/s\), 6 of 6 guesses right; state", capsys.readouterr().err)
    for archive, more in (("a.zip", []), ("b.zip", ["--draft", "ngram"])):
        text("--prompt", "w1", "--texts", "3", "--seed", "2", "--out-file", tmp_path / archive, *more)
    assert texts(tmp_path / "a.zip") == texts(tmp_path / "b.zip")
    bytes_model = save_model(tmp_path / "bytes", tokenizer="bytes", **LLP)
    assert "--draft needs a model with the tokenizer of" in refused("generate", run, *ONE, "--draft", bytes_model)
    said = refused("generate", run, *ONE, "--draft", "foo")
    assert "--draft must be ngram or the folder of a smaller model; there is no folder foo" in said
    assert "leave one of them out" in refused("generate", run, *ONE, "--beams", "2", "--draft", "ngram")


def test_learned_positions_end_a_text_with_a_warning(tmp_path, refused, text, caplog):
    run = save_model(tmp_path / "learned", position="learned", max_positions=16, **LLP)
    asked = ["--prompt", "w1 w2", "--max_tokens", "50"]
    for more in ([], ["--samples", "2"], ["--beams", "2"]):
        caplog.clear()
        text(*asked, *(("--temperature", "1.0") if "--beams" in more else ()), *more, folder=run)
        assert "the text ends after 15 tokens instead of max_tokens=50: the model has positions for 16" in caplog.text
    text(*asked, "--state-out", tmp_path / "state", folder=run)
    assert "the text ends after 14 tokens" in caplog.text
    message = refused("generate", run, *ONE, "--state-in", tmp_path / "state")
    assert "has positions for 16 tokens (max_positions), and the prompt ends at 17" in message


def test_samples_are_those_of_their_seeds(text):
    drawn = ["--prompt", "w1 w2", "--temperature", "1.5", "--seed"]
    three = text(*drawn, "4", "--samples", "3")
    alone = [text(*drawn, seed) for seed in (4, 5, 6)]
    assert three == "".join(f"--- {i} ---\n{one}" for i, one in enumerate(alone, 1))
    assert len(set(alone)) == 3
    stop = ["--stop", alone[1].split()[5]]
    assert f"--- 2 ---\n{text(*drawn, '5', *stop)}" in text(*drawn, "4", "--samples", "3", *stop)


SPECIAL = {name: i for i, name in enumerate(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(9))])}


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    tokenizer = word_tokenizer(SPECIAL, specials=["<s>", "</s>"])
    return save_model(tmp_path_factory.mktemp("s"), tokenizer=tokenizer, attention="full", bos_token_id=1)


def texts(file):
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_each_text_of_a_file_is_a_document_and_the_same_seed_gives_the_same_file(sentences, tmp_path, capsys):
    one, two = tmp_path / "one.zip", tmp_path / "two.zip"
    for file in (one, two):  # more than one batch
        command = ["generate", str(sentences), "--texts", "70", "--max_tokens", "12", "--seed", "3"]
        assert main([*command, "--out-file", str(file)]) == 0
    err = capsys.readouterr().err
    assert one.read_bytes() == two.read_bytes()
    found = texts(one)
    empty = 70 - len(found)
    assert empty > 0
    assert f"{len(found)} texts of {sum(map(len, found.values())):,} bytes in {one} ({empty} empty texts left" in err
    assert all(SPECIAL.get(word, 1) not in (1, 2) for text in found.values() for word in text.split())
    assert any(len(text.split()) < 11 for text in found.values()), "a text ends where another would begin"
    data = DataConfig(path=str(one), tokenizer=str(sentences), cache=str(tmp_path / "cache"), held_out=0.3)
    assert len(prepare(data).files) == len(found)
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(("more", "tokens"), [
    (["--logit_bias", '{"1": 100}'], 6), (["--logit_bias", '{"1": 100}', "--stop", "<s>"], 1),
    (["--logit_bias", '{"2": 100}'], 1), (["--logit_bias", '{"2": 100}', "--min_tokens", "3"], 4),
])  # fmt: skip
def test_a_special_token_ends_a_text_by_its_id_if_it_is_an_end_or_a_stop_string(sentences, capsys, more, tokens):
    for count in (1, 2):
        command = ["--prompt", "w1", "--max_tokens", "6", "--temperature", "0", "--samples", str(count), *more]
        assert main(["generate", str(sentences), *command]) == 0
        assert f"generated: {count * tokens} tokens" in capsys.readouterr().err


def test_a_text_of_a_file_is_the_sample_of_its_seed(sentences, tmp_path, text):
    drawn = ["--prompt", "w1 w2", "--max_tokens", "6", "--temperature", "1", "--seed"]
    text(*drawn, "5", "--texts", "3", "--out-file", tmp_path / "texts.zip", folder=sentences)
    drawn_texts = texts(tmp_path / "texts.zip")
    assert len(drawn_texts) == 3
    for name, found in drawn_texts.items():
        sample = text(*drawn, 4 + int(name.removesuffix(".txt")), folder=sentences).split()
        assert found.split() == sample[: len(found.split())]


def test_a_model_without_a_first_token_begins_after_the_separator_or_needs_a_prompt(tmp_path, text, refused):
    tokenizer = word_tokenizer(SPECIAL, specials=["</s>"])
    two = ["--texts", "2", "--out-file", tmp_path / "texts.zip"]
    text(*two, folder=save_model(tmp_path / "after", tokenizer=tokenizer))
    bare = save_model(tmp_path / "bare")
    assert "has no begin-of-text token (bos_token_id); give a --prompt" in refused("generate", bare, *two)


@pytest.fixture(scope="module")
def modes(tmp_path_factory):
    """Folders of the same weights, by the way of decoding that they are configured for."""
    home = tmp_path_factory.mktemp("modes")
    return {
        mode: save_model(home / mode, **PERCEIVER, options={"perceiver_ar": {**LATENTS, "decode": mode}})
        for mode in ("exact", "refill", "frozen")
    }


def test_a_run_continues_in_the_mode_that_is_named(modes, text):
    def found(mode, *more):
        return text("--prompt", NINE, "--max_tokens", "8", *more, folder=modes[mode])

    exact, refill = found("exact"), found("refill")
    assert exact != refill
    assert found("refill", "--decode", "exact") == found("frozen", "--decode", "exact") == exact
    assert found("exact", "--decode", "refill") == found("exact", "--decode", "refill", "--refill", "2") == refill
    assert found("refill", "--refill", "4") == found("exact", "--decode", "refill", "--refill", "4")


def test_frozen_ends_with_a_warning_where_its_latents_do(modes, text, caplog):
    def found(tokens, *more):
        return text("--prompt", NINE, "--max_tokens", tokens, *more, folder=modes["frozen"])

    short = found(3)
    assert not caplog.records
    assert found(12) == short
    assert "ends after 3 tokens instead of max_tokens=12: decode=frozen has no latents for more" in caplog.text
    assert len(found(12, "--refill", "1").split()) == 9 + 4
    assert found(12, "--samples", "2").count(short) == 2
    assert main(["generate", str(modes["frozen"]), "--prompt", "w1 w2 w3", "--beams", "2"]) == 0


ZIP = ["--texts", "2", "--out-file", "a.zip"]


@pytest.mark.parametrize(("arguments", "match"), [
    ([], "give one of --prompt TEXT, --prompt - (standard input) and --prompt-file FILE, got none"),
    ([*ONE, "--prompt-file", "x"], "and --prompt-file FILE, got both"),
    (["--prompt-file", "/no/such"], "there is no file /no/such"),
    ([*ONE, "--state-in", "/no/such"], "there is no file /no/such"),
    ([*ONE, "--state-out", "/no/such/file"], "there is no folder /no/such for --state-out"),
    ([*ONE, "--state-out", "x", "--samples", "2"], "--state-out keeps a single text"),
    ([*ONE, "--state-out", ""], "--state-out must be a file, got ''"),
    (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
    (["--prompt", ""], "the prompt must have at least one token, got an empty text"),
    ([*ONE, "--decode", "refill"], "decode is for perceiver_ar, and this model has attention='llp'"),
    ([*ONE, "--decode", "thaw"], "exact"),
    ([*ONE, "--samples", "0"], "samples must be at least 1, got 0"),
    ([*ONE, "--beams", "2", "--stop", "x"], "without stop strings: leave --stop out"),
    ([*ONE, "--beams", "2", "--seed", "1"], "seed=1 has no effect with --beams; leave it out"),
    (ZIP[:2], "--texts N and --out-file FILE need each other, got only --texts"),
    (["--texts", "0", *ZIP[2:]], "texts must be at least 1, got 0"),
    ([*ZIP[:3], "nowhere/a.zip"], "nowhere for --out-file"),
    ([*ZIP[:3], "a.txt"], "--out-file must be a .zip file, got 'a.txt'"),
    ([*ZIP, "--samples", "2"], "--samples can't be combined with --texts; leave it out"),
])  # fmt: skip
def test_arguments_that_do_not_go_together_are_refused(run, tmp_path, monkeypatch, refused, arguments, match):
    monkeypatch.chdir(tmp_path)
    assert match in refused("generate", run, *arguments)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_no_text_and_the_state_of_another_model_are_refused(run, text, refused, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    assert "bytes is not UTF-8 text" in refused("generate", run, "--prompt-file", tmp_path / "bytes")
    assert "is not a readable state file" in refused("generate", run, *ONE, "--state-in", tmp_path / "bytes")
    other, state = save_model(tmp_path / "other", dim=32, **LLP), tmp_path / "state"
    text(*ONE, "--max_tokens", "0", "--state-out", state, folder=other)
    assert "the state was made by configuration" in refused("generate", run, *ONE, "--state-in", state)


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused(tmp_path, refused, missing):
    folder = save_model(tmp_path / "part")
    (folder / missing).unlink()
    assert f"holds no {missing}" in refused("generate", folder, *ONE)
