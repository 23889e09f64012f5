"""`subquad generate`: where the prompt comes from, states kept in files, stop strings, several texts."""

import io
import re

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from subquad.cli import main
from subquad.hf import SubquadConfig, SubquadForCausalLM

VOCABULARY = 23


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("llp"), seed=0)


def saved(folder, seed, dim=16, **fields):
    torch.manual_seed(seed)
    shape = {"vocab_size": VOCABULARY, "dim": dim, "num_layers": 2, "num_heads": 2, "init_std": 0.7}
    config = SubquadConfig(**shape, attention="llp", options={"llp": {"segment": 8}}, tie_embeddings=False, **fields)
    SubquadForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def text(run, capsys):
    def generated(*arguments, folder=run, temperature=("--temperature", "0")):
        capsys.readouterr()
        assert main(["generate", str(folder), *temperature, "--max_tokens", "8", *arguments]) == 0
        return capsys.readouterr().out

    return generated


def refused(arguments, run, capsys):
    capsys.readouterr()
    with pytest.raises(SystemExit) as exit_info:
        main(["generate", str(run), *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_a_prompt_is_a_text_a_file_or_standard_input(text, tmp_path, monkeypatch):
    expected = text("--prompt", "w1 w2 w3")
    (tmp_path / "prompt.txt").write_text("w1 w2 w3")
    assert text("--prompt-file", str(tmp_path / "prompt.txt")) == expected
    monkeypatch.setattr("sys.stdin", io.StringIO("w1 w2 w3"))
    assert text("--prompt", "-") == expected
    assert text("--prompt", "w1 w2 w3", "--no-stream") == expected


def test_a_state_file_goes_on_as_the_whole_text_would(text, run, tmp_path, capsys):
    file = str(tmp_path / "state.safetensors")
    assert text("--prompt", "w1 w2 w3", "--state-out", file, "--max_tokens", "0") == ""
    assert text("--prompt", " w4 w5", "--state-in", file) == text("--prompt", "w1 w2 w3 w4 w5").removeprefix("w1 w2 w3")
    again = str(tmp_path / "longer.safetensors")
    written = text("--prompt", " w4 w5", "--state-in", file, "--state-out", again)
    whole = text("--prompt", f"w1 w2 w3{written.rstrip()} w6")
    assert text("--prompt", " w6", "--state-in", again) == whole.removeprefix(f"w1 w2 w3{written.rstrip()}")
    main(["generate", str(run), "--prompt", "w1", "--state-in", file, "--state-out", again, "--max_tokens", "3"])
    said = capsys.readouterr().err
    assert re.search(rf"generated: 3 tokens in .* \(.* tokens/s\); state: [\d,]+ bytes in {again}\n$", said)


def test_a_stop_string_is_not_printed(text):
    free = text("--prompt", "w1 w2 w3").split()
    stop = free[6]
    assert text("--prompt", "w1 w2 w3", "--stop", stop).split() == free[: free.index(stop, 3)]
    two = ["--stop", "[none]", "--stop", stop]
    assert text("--prompt", "w1 w2 w3", *two).split() == free[: free.index(stop, 3)]


@pytest.mark.parametrize("prompt", ["# a comment", "null", "[w1]", "12"])
def test_a_prompt_is_taken_as_it_is_typed(text, prompt):
    assert text("--prompt", prompt).startswith(prompt)


def test_a_table_of_positions_ends_a_text_with_a_warning(tmp_path, capsys, caplog):
    run = saved(tmp_path / "learned", seed=0, position="learned", max_positions=16)
    for more in ([], ["--samples", "2"], ["--beams", "2"]):
        caplog.clear()
        assert main(["generate", str(run), "--prompt", "w1 w2", "--max_tokens", "50", *more]) == 0
        assert "the text ends after 15 tokens instead of max_tokens=50: the model has positions for 16" in caplog.text
    file = tmp_path / "state.safetensors"
    assert main(["generate", str(run), "--prompt", "w1 w2", "--max_tokens", "50", "--state-out", str(file)]) == 0
    assert "the text ends after 14 tokens" in caplog.text
    assert file.is_file()
    assert "has positions for 16 tokens (max_positions), and the prompt ends at 17" in refused(
        ["--prompt", "w1", "--state-in", str(file)], run, capsys
    )


def test_samples_are_those_of_their_seeds(text):
    drawn = {"temperature": ("--temperature", "1.5")}
    three = text("--prompt", "w1 w2", "--samples", "3", "--seed", "4", **drawn)
    alone = [text("--prompt", "w1 w2", "--seed", str(seed), **drawn) for seed in (4, 5, 6)]
    assert three == "".join(f"--- {i} ---\n{one}" for i, one in enumerate(alone, 1))
    assert len(set(alone)) == 3
    stop = alone[1].split()[5]
    stopped = text("--prompt", "w1 w2", "--samples", "3", "--seed", "4", "--stop", stop, **drawn)
    one = text("--prompt", "w1 w2", "--seed", "5", "--stop", stop, **drawn)
    assert f"--- 2 ---\n{one}" in stopped


def test_samples_go_on_from_a_state(text, tmp_path):
    file = str(tmp_path / "state.safetensors")
    text("--prompt", "w1 w2 w3", "--state-out", file, "--max_tokens", "0")
    two = text("--prompt", "w4", "--state-in", file, "--samples", "2")
    assert two == "".join(f"--- {i} ---\n{text('--prompt', 'w4', '--state-in', file)}" for i in (1, 2))


def test_beams_find_a_text_at_least_as_likely_as_the_greedy_one(run, capsys):
    def score(beams):
        assert main(["generate", str(run), "--prompt", "w1 w2", "--beams", str(beams), "--max_tokens", "6"]) == 0
        return float(re.search(r"score: (-[\d.]+) nats a token", capsys.readouterr().err)[1])

    assert score(8) >= score(2)


@pytest.mark.parametrize(("arguments", "match"), [
    ([], "give one of --prompt TEXT, --prompt - (standard input) and --prompt-file FILE, got none"),
    (["--prompt", "w1", "--prompt-file", "x"], "and --prompt-file FILE, got both"),
    (["--prompt-file", "/no/such"], "there is no file /no/such"),
    (["--prompt", "w1", "--state-in", "/no/such"], "there is no file /no/such"),
    (["--prompt", "w1", "--state-out", "/no/such/file"], "there is no folder /no/such for --state-out"),
    (["--prompt", "w1", "--state-out", "x", "--samples", "2"], "--state-out keeps one text"),
    (["--prompt", "w1", "--state-out", ""], "--state-out must be a file, got ''"),
    (["--prompt", "w1", "--state-out", "/"], "--state-out must be a file, got '/'"),
    (["--prompt", "\udcff"], "--prompt is not UTF-8 text"),
    (["--prompt", "w1", "--samples", "0"], "samples must be at least 1, got 0"),
    (["--prompt", "w1", "--beams", "0"], "beams must be at least 1, got 0"),
    (["--prompt", "w1", "--beams", "2", "--stop", "x"], "without stop strings: leave --stop out"),
    (["--prompt", "w1", "--beams", "2", "--samples", "2"], "leave --samples out"),
    (["--prompt", "w1", "--beams", "2", "--seed", "1"], "seed=1 has no effect with --beams; leave it out"),
    (["--prompt", "w1", "--stop", ""], "a stop string must hold at least one character"),
    (["--prompt", "w1", "--min_p", "2"], "min_p must be between 0 and 1, got 2.0"),
    (["--prompt", ""], "the prompt must hold at least one token, got an empty text"),
])  # fmt: skip
def test_what_does_not_go_together_is_refused(run, capsys, arguments, match):
    assert match in refused(arguments, run, capsys)


def test_a_file_that_is_no_text_and_the_states_of_others_are_refused(run, capsys, tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xfa")
    assert "bytes is not UTF-8 text" in refused(["--prompt-file", str(tmp_path / "bytes")], run, capsys)
    assert "is not a readable state file" in refused(
        ["--prompt", "w1", "--state-in", str(tmp_path / "bytes")], run, capsys
    )
    other = saved(tmp_path / "other", seed=0, dim=32)
    file = str(tmp_path / "state.safetensors")
    assert main(["generate", str(other), "--prompt", "w1", "--max_tokens", "0", "--state-out", file]) == 0
    assert "the state was made by configuration" in refused(["--prompt", "w1", "--state-in", file], run, capsys)
