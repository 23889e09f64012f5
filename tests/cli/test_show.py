"""`subquad show`: what the matrices hold, and that every picture is written, readable and repeatable."""

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import attention
from subquad.cli import main
from subquad.cli.show import PICTURES
from subquad.data.tokenizers import bytes_tokenizer
from subquad.evaluation import drawing
from subquad.hf import SubquadConfig, SubquadForCausalLM
from subquad.models import DecoderConfig, matrices
from subquad.testing import assert_exact, assert_same_maths

SMALL = ["--tokens", "16", "--dim", "16"]


def saved(folder, **settings):
    """The folder of a model with random weights, which reads bytes."""
    torch.manual_seed(5)
    config = DecoderConfig(vocab_size=256, dim=16, num_heads=2, position="none", init_std=0.3, **settings)
    SubquadForCausalLM(SubquadConfig.from_decoder(config)).save_pretrained(folder)
    bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    options = {"llp": {"segment": 4}}
    return saved(tmp_path_factory.mktemp("hybrid"), num_layers=2, attention=["llp", "elita"], options=options)


def shown(tmp_path, *arguments, suffix="png") -> bytes:
    """The file that the command writes, after a look at its format."""
    file = tmp_path / f"picture.{suffix}"
    assert main(["show", *arguments, "--out", str(file)]) == 0
    data = file.read_bytes()
    assert data.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    return data


def refused(capsys, *arguments) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main(["show", *arguments])
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err


# --- weights


@pytest.mark.parametrize("name", attention.names())
def test_every_mechanism_has_a_picture(name):
    layer = matrices.fresh_layer(name, dim=16, num_heads=2, tokens=16, parts=4, options={})
    w_HTS = matrices.fresh_weights(layer, 16)
    figure = drawing.draw_weights([[drawing.Weights(name, w_HTS[0].numpy(), layer.causal)]])
    image = figure.axes[0].get_images()[0].get_array()
    future = np.triu(np.ones((16, 16), dtype=bool), 1)
    assert (np.ma.getmaskarray(image) == (future & layer.causal)).all()


def test_the_matrix_that_is_drawn_is_that_of_the_layer():
    layer = matrices.fresh_layer("llp", dim=16, num_heads=2, tokens=16, parts=4, options={"segment": 4})
    assert layer.config.segment == 4
    assert_exact(matrices.fresh_weights(layer, 16), layer.weights(matrices.drifting_input(16, 16))[0].detach())


def test_fresh_layers_leave_the_random_numbers_alone():
    before = torch.random.get_rng_state()
    first = matrices.fresh_layer("full", dim=16, num_heads=2, tokens=8, parts=4, options={})
    second = matrices.fresh_layer("full", dim=16, num_heads=2, tokens=8, parts=4, options={})
    assert_exact(first.query.weight, second.query.weight)
    assert_exact(torch.random.get_rng_state(), before)


def test_weights_that_are_no_distribution_are_shown_relative_to_the_largest():
    matrix = np.array([[4.0, 0.0], [-2.0, 1.0]])
    figure = drawing.draw_weights([[drawing.Weights("x", matrix, causal=False)]])
    image = figure.axes[0].get_images()[0].get_array()
    top = drawing.LARGEST
    assert image.tolist() == [[top, 0.0], [top / 2, top / 4]]


def test_trained_weights_are_those_of_the_layers_own_inputs(hybrid):
    from subquad.training.runs import load_run

    decoder = load_run(hybrid, "cpu").decoder
    tokens = torch.tensor([[7, 1, 200, 7, 9, 3]])
    layers = matrices.trained_weights(decoder, tokens[0].tolist())
    assert [layer.name for layer, _ in layers] == ["llp", "elita"]
    block = decoder.blocks()[1]
    below, _, _ = decoder.blocks()[0](decoder.embedding(tokens), None, None)
    with torch.no_grad():
        assert_exact(layers[1][1], block.attention.weights(block.attention_norm(below))[0])


def test_a_looped_stack_has_the_weights_of_each_pass(tmp_path):
    from subquad.training.runs import load_run

    decoder = load_run(saved(tmp_path, num_layers=1, attention="full", loops=3), "cpu").decoder
    layers = matrices.trained_weights(decoder, [1, 2, 3])
    assert len(layers) == 3
    assert not torch.equal(layers[0][1], layers[2][1])


def test_layers_that_are_handed_a_memory_are_drawn_with_it(tmp_path):
    from subquad.training.runs import load_run

    decoder = load_run(saved(tmp_path, num_layers=2, attention="luna"), "cpu").decoder
    layers = matrices.trained_weights(decoder, [1, 2, 3])
    assert layers[1][0].memory is layers[0][0].memory


def test_a_stack_of_its_own_has_no_weights_to_draw(tmp_path, capsys):
    folder = saved(tmp_path, num_layers=2, attention="perceiver_ar", options={"perceiver_ar": {"latents": 4}})
    message = refused(capsys, "weights", str(folder), "--text", "abc")
    assert "this model is a stack of its own: perceiver_ar" in message


# --- reach


def paths(allowed: np.ndarray, layers: int) -> np.ndarray:
    """By walking: which tokens are reached in `layers` steps, each to an allowed token or staying."""
    T = len(allowed)
    reached = np.zeros((T, T), dtype=bool)
    for start in range(T):
        here = {start}
        for _ in range(layers):
            here |= {s for t in here for s in range(T) if allowed[t, s]}
        reached[start, list(here)] = True
    return reached


@given(st.integers(0, 2**16), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_the_reach_is_what_walking_finds(seed, tokens, layers):
    allowed = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(seed)) < 0.2
    reached = list(matrices.reach([allowed] * layers))
    for number, reached_TS in enumerate(reached, 1):
        assert (reached_TS.numpy() == paths(allowed.numpy(), number)).all()
    first = matrices.first_layer(reached)
    for number, reached_TS in enumerate(reached, 1):
        assert_exact((first > 0) & (first <= number), reached_TS)


@pytest.mark.parametrize("segment", [4, 8, 16])
def test_llp_reaches_its_first_token_after_one_layer_fewer_than_it_has_half_segments(segment):
    layer = matrices.fresh_layer("llp", dim=16, num_heads=2, tokens=32, parts=4, options={"segment": segment})
    needed = 2 * 32 // segment - 1
    first = matrices.first_layer(list(matrices.reach([matrices.allowed(layer, 32)] * needed)))
    assert first[-1, 0] == needed


@pytest.mark.parametrize("name", ["full", "latte", "linear", "elita", "performer"])
def test_what_reads_everything_reaches_everything_in_one_layer(name):
    layer = matrices.fresh_layer(name, dim=16, num_heads=2, tokens=16, parts=4, options={})
    assert_exact(matrices.allowed(layer, 16), torch.ones(16, 16, dtype=torch.bool).tril())


def test_the_reach_of_a_window_grows_by_its_width():
    layer = matrices.fresh_layer("window", dim=16, num_heads=2, tokens=16, parts=4, options={"width": 3})
    counts = [int(reached[-1].sum()) for reached in matrices.reach([matrices.allowed(layer, 16)] * 4)]
    assert counts == [3, 5, 7, 9]


# --- positions


def test_position_terms_are_those_of_the_gates_equation():
    layer = matrices.fresh_layer("elita", dim=16, num_heads=2, tokens=9, parts=4, options={"horizon": 7}).double()
    terms = matrices.position_terms(layer, 9)
    expected = torch.zeros(2, 9, 9, dtype=torch.float64)
    for h in range(2):
        for t in range(9):
            for s in range(9):
                p1 = sum(
                    c * torch.sin(a * s / 7 + b)
                    for a, b, c in zip(layer.frequency[0, h], layer.phase[0, h], layer.amplitude[h], strict=True)
                )
                p2 = sum(
                    c * torch.sin(a * t / 7 + b)
                    for a, b, c in zip(layer.frequency[1, h], layer.phase[1, h], layer.amplitude[h], strict=True)
                )
                expected[h, t, s] = p1 + p2
    assert_same_maths(terms, expected.detach())


def test_mechanisms_without_position_terms_are_refused():
    layer = matrices.fresh_layer("llp", dim=16, num_heads=2, tokens=8, parts=4, options={})
    with pytest.raises(ValueError, match="'llp' has no position terms of its own; mechanisms that have: elita"):
        matrices.position_terms(layer, 8)


# --- drawing


def test_no_two_of_the_first_lines_look_alike():
    styles = [drawing.Style.number(i) for i in range(24)]
    assert len({(style.color, style.linestyle) for style in styles}) == 24


def test_equal_lines_are_one_and_the_legend_goes_from_high_to_low():
    axis = drawing.new_figure(4, 3).subplots()
    drawing.lines(axis, [1, 2], {"a": [1, 2], "b": [3, 4], "c": [1, 2]}, ["a", "b", "c"])
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["b", "a, c"]


def test_rows_are_about_equally_long():
    assert [len(row) for row in drawing.in_rows(range(13), 5)] == [5, 5, 3]
    assert [len(row) for row in drawing.in_rows(range(6), 5)] == [3, 3]
    assert [len(row) for row in drawing.in_rows(range(5), 5)] == [5]


def test_tokens_are_shown_without_control_characters_or_formulas():
    assert [drawing.visible(token) for token in (" a", "\n", "\t", "$x$", "\x00", "漢")] == [
        "·a",
        "⏎",
        "⇥",
        r"\$x\$",
        "?",
        "?",
    ]


# --- the command


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_same_command_gives_the_same_file(tmp_path, suffix):
    arguments = ["weights", "--attention", "llp,latte", *SMALL]
    assert shown(tmp_path, *arguments, suffix=suffix) == shown(tmp_path, *arguments, suffix=suffix)


def test_fresh_pictures(tmp_path, capsys):
    shown(tmp_path, "weights", *SMALL)
    shown(tmp_path, "reach", *SMALL, "--layers", "3")
    shown(tmp_path, "positions", *SMALL)
    shown(tmp_path, "cost", "--tokens", "32", "64", "--dim", "16", "--heads", "2", suffix="svg")
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "picture.svg")


def test_pictures_of_a_trained_model(tmp_path, hybrid):
    one = shown(tmp_path, "weights", str(hybrid), "--text", "def main", "--layer", "0", "--head", "1")
    assert shown(tmp_path, "weights", str(hybrid), "--text", "def main", "--layer", "1", "--head", "1") != one
    shown(tmp_path, "weights", str(hybrid), "--text", "def main\n")
    shown(tmp_path, "reach", str(hybrid), "--tokens", "8")
    shown(tmp_path, "positions", str(hybrid), "--tokens", "8")


def test_a_file_name_is_made_from_the_pictures(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["show", "positions", *SMALL]) == 0
    assert (tmp_path / "positions.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["weights", "--attention", "lpp"], "unknown attention 'lpp'; did you mean 'llp'?"),
        (["weights", "--options.lpp.x", "1"], "unknown attention 'lpp'; did you mean 'llp'?"),
        (["weights", "--attention", "llp", "--head", "2"], "head 2 is not there: heads are 0 to 1"),
        (["weights", "--attention", "llp", "--layer", "0"], "--layer is for a trained model"),
        (["weights", "--text", "x"], "--text is for a trained model"),
        (["weights", "--example", "0"], "--example is for a trained model"),
        (
            ["weights", "--attention", "perceiver_ar"],
            "only the layers of mechanisms can be drawn, and perceiver_ar is a",
        ),
        (["cost", "--attention", "perceiver_io"], "and perceiver_io is a stack of its own"),
        (["weights", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["weights", "--out", "a.jpg"], "a picture's name must end with .png or .svg, got 'a.jpg'"),
        (["weights", "--out", "nowhere/a.png"], "there is no folder nowhere to write a.png to"),
        (["weights", "nowhere", "--text", "x"], "there is no folder nowhere"),
        (["weights", "nowhere"], "give the text that the model reads, by --text"),
        (["reach", "nowhere"], "there is no folder nowhere"),
        (["reach", "--layers", "0"], "--layers must be at least 1, got 0"),
        (["positions", "--attention", "llp"], "'llp' has no position terms of its own"),
        (["positions", "nowhere"], "there is no folder nowhere"),
        (["cost", "--tokens", "0"], "--tokens must be at least 1, got 0"),
        (["cost", "--atention", "llp"], "unknown option 'atention'; did you mean 'attention'?"),
    ],
)
def test_mistakes_are_named(capsys, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in re.sub(r"\s+", " ", refused(capsys, *arguments))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "abc", "--layer", "2"], "layer 2 is not there: layers are 0 to 1"),
        (["--text", "abc", "--layer", "0", "--head", "-1"], "head -1 is not there: heads are 0 to 1"),
        (["--text", ""], "--text must hold a token, got ''"),
        (["--text", "abc", "--example", "0"], "--example is for a classifier"),
        (["--text", "abc", "--attention", "llp"], "a run has its own mechanisms"),
    ],
)
def test_mistakes_about_a_trained_model_are_named(capsys, hybrid, arguments, message):
    assert message in refused(capsys, "weights", str(hybrid), *arguments)


def test_an_unknown_picture_is_answered_with_the_valid_ones(capsys):
    assert main(["show", "wieghts"]) == 2
    assert "unknown picture 'wieghts'; did you mean 'weights'?" in capsys.readouterr().err
    assert main(["show"]) == 2
    assert "no picture named" in capsys.readouterr().err


def test_the_overview_names_every_picture(capsys):
    assert main(["show", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {what} " in out for what in PICTURES)


@pytest.mark.parametrize("arguments", [["show", what] for what in PICTURES] + [["cost"]], ids=" ".join)
def test_the_help_loads_nothing_heavier_than_torch(arguments):
    code = (
        "import sys\nfrom subquad.cli import main\n"
        f"try:\n    main({arguments!r} + ['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([m for m in ('transformers', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("[]\n")
