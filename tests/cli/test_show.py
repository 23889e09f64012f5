"""`subquad show`: its matrices are those of the layers, its pictures are written, its mistakes are named."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subquad import attention
from subquad.cli import main
from subquad.cli.show import PICTURES, _reading_example
from subquad.data.labelled import toy
from subquad.evaluation import drawing
from subquad.hf import SubquadEncoderForSequenceClassification
from subquad.hf.encoders import SubquadClassifierConfig
from subquad.models import DecoderConfig, EncoderConfig, matrices
from subquad.models.build import build_model
from subquad.models.costs import layer_costs
from subquad.testing import assert_exact, assert_same_maths
from subquad.training import TrainConfig
from subquad.training.runs import load_classifier, load_run
from tests.cli.folders import save_model

SMALL = ["--tokens", "16", "--dim", "16"]
PNG = b"\x89PNG"
STACK = "only the layers of mechanisms can be drawn, and "


def saved(folder, **config):
    return save_model(folder, tokenizer="bytes", seed=5, **{"position": "none", "num_layers": 2, **config})


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    options = {"llp": {"segment": 4}}
    return saved(tmp_path_factory.mktemp("hybrid"), attention=["llp", "elita"], options=options)


def fresh(name, tokens, **options):
    return matrices.fresh_layer(name, dim=16, num_heads=2, tokens=tokens, parts=4, options=options)


def picture(tmp_path, *arguments, suffix="png"):
    """The file that the command writes, after a look at its format."""
    file = tmp_path / f"picture.{suffix}"
    assert main(["show", *map(str, arguments), "--out", str(file)]) == 0
    data = file.read_bytes()
    assert data.startswith(PNG if suffix == "png" else b"<?xml")
    return data


def test_the_matrix_that_is_drawn_is_that_of_the_layer():
    before = torch.random.get_rng_state()
    layer, again = fresh("llp", 16, segment=4), fresh("llp", 16, segment=4)
    assert_exact(torch.random.get_rng_state(), before)
    assert_exact(layer.query.weight, again.query.weight)
    assert layer.config.segment == 4
    assert_exact(matrices.fresh_weights(layer, 16), layer.weights(matrices.drifting_input(16, 16))[0].detach())


@torch.no_grad()
def test_trained_weights_are_those_of_the_layers_own_inputs(hybrid):
    decoder = load_run(hybrid, "cpu").decoder
    tokens = torch.tensor([[7, 1, 200, 7, 9, 3]])
    layers = matrices.trained_weights(decoder, tokens[0].tolist())
    assert [(matrix.layer, matrix.name, matrix.causal) for matrix in layers] == [(0, "llp", True), (1, "elita", True)]
    block = decoder.blocks()[1]
    below, _ = decoder.blocks()[0](decoder.embedding(tokens))
    assert_exact(layers[1].weights_HTS, block.attention.weights(block.attention_norm(below))[0])


def test_loops_are_drawn_each_and_layers_with_the_memory_that_they_are_handed():
    shape = {"vocab_size": 9, "dim": 16, "num_heads": 2, "position": "none", "init_std": 0.5}
    loops = build_model(DecoderConfig(**shape, num_layers=1, attention="full", loops=3))
    first, _, third = matrices.trained_weights(loops, [1, 2, 3])
    assert not torch.equal(first.weights_HTS, third.weights_HTS)
    luna = build_model(DecoderConfig(**shape, num_layers=2, attention="luna"))
    matrices.trained_weights(luna, [1, 2, 3])
    first, second = (block.attention for block in luna.blocks())
    assert second.memory is first.memory


def labelling(folder, *, task=True, pooling="mean", **model):
    """Save an untrained classifier of the toy task; return its folder."""
    torch.manual_seed(5)
    shape = {"dim": 16, "num_heads": 2, "num_layers": 2, "position": "none", "init_std": 0.3}
    classify = {"pooling": pooling, "held_out": 5}
    values = {"task": "classify", "model": shape | model, "batch": {"length": 32}, "classify": classify}
    config = TrainConfig.from_dict(values)
    encoder = EncoderConfig.from_decoder(config.model.replace(vocab_size=3), num_classes=2, pooling=pooling)
    hf = SubquadClassifierConfig.from_encoder(encoder, classes=("no", "yes"))
    SubquadEncoderForSequenceClassification(hf).save_pretrained(folder)
    if task:
        config.to_file(folder / "config.yaml")
    return folder


BIDIRECTIONAL = [name for name in attention.names() if "bidirectional" in attention.mechanism(name).forms]
QUICK = {("full", "mean"), ("latte", "class"), ("luna", "class"), ("linformer", "mean")}


@pytest.mark.parametrize(("name", "pooling"), [
    pytest.param(name, pooling, marks=[] if (name, pooling) in QUICK else pytest.mark.slow)
    for name in BIDIRECTIONAL for pooling in ("mean", "class")
])  # fmt: skip
def test_weights_of_a_classifier_are_those_that_its_layers_mix_by(tmp_path, name, pooling):
    model = load_classifier(labelling(tmp_path, attention=name, pooling=pooling), "cpu").model.double()
    mixed, blocks = [], matrices.blocks(model)
    for block in blocks:
        block.attention_norm.register_forward_hook(lambda _, __, z_BTD: mixed.append([z_BTD]))
        # The first thing after the mixing: its output and the residual path.
        block.feedforward_norm.register_forward_pre_hook(lambda _, given: mixed[-1].append(given[0]))
        block.register_forward_pre_hook(lambda _, given: mixed.append(given[0]))
    layers = matrices.trained_weights(model, [0, 2, 1, 1, 2, 0, 1])
    del mixed[4:]  # each layer's input, computed once more
    assert len(layers) == 2
    for block, matrix, before_BTD, (z_BTD, after_BTD) in zip(blocks, layers, mixed[::2], mixed[1::2], strict=True):
        assert matrix.weights_HTS.shape[1:] == (7 + (pooling == "class"),) * 2
        with torch.no_grad():
            assert_exact(matrix.weights_HTS, block.attention.weights(z_BTD)[0])
            assert_same_maths(block.attention.definition(z_BTD), after_BTD - before_BTD)


@torch.no_grad()
def test_post_norm_layers_are_drawn_from_what_their_mechanisms_read():
    shape = {"vocab_size": 9, "dim": 16, "num_heads": 2, "num_layers": 2, "init_std": 0.5, "norm_position": "post"}
    model, tokens = build_model(DecoderConfig(**shape, attention="full")), torch.tensor([[1, 2, 3, 4]])
    below, _ = model.blocks()[0](model.embedding(tokens))
    _, matrix = matrices.trained_weights(model, tokens[0].tolist())
    assert_exact(matrix.weights_HTS, model.blocks()[1].attention.weights(below)[0])


def test_a_classifiers_picture_is_of_the_chosen_example(tmp_path):
    options = {"linformer": {"max_tokens": 33}}
    folder = labelling(tmp_path, attention="linformer", options=options, pooling="class")
    picture(tmp_path, "weights", folder, "--layer", "1", "--head", "0", "--tokens", "32", "--example", "4")
    items = toy(32, examples=1, held_out=5).held_out
    for arguments, number, length in (([], 0, 32), (["--example", "4", "--tokens", "9"], 4, 9)):
        chosen = PICTURES["weights"][0]().parse_args(["runs", *arguments])
        chosen.run = str(folder)
        (matrix, _), names = _reading_example(chosen)
        real = items[number]["attention_mask"].bool()
        tokens = items[number]["input_ids"][real][:length].tolist()
        assert matrix.weights_HTS.shape[-1] == len(tokens) + 1
        assert names == ["class", *map(str, tokens)]


@given(st.integers(0, 2**16), st.integers(1, 9), st.integers(1, 4))
@settings(max_examples=25)
def test_the_reach_is_that_of_walks_of_as_many_steps(seed, tokens, layers):
    allowed = torch.rand(tokens, tokens, generator=torch.Generator().manual_seed(seed)) < 0.2
    reached = list(matrices.reach([allowed] * layers))
    first = matrices.first_layer(reached)
    for number, reached_TS in enumerate(reached, 1):
        walks_TS = np.linalg.matrix_power(np.eye(tokens) + allowed.numpy(), number)  # a step may also stay
        assert (reached_TS.numpy() == (walks_TS > 0)).all()
        assert_exact((first > 0) & (first <= number), reached_TS)


@pytest.mark.parametrize("segment", [4, 8, 16])
def test_llp_reaches_its_first_token_after_one_layer_fewer_than_it_has_half_segments(segment):
    layer, needed = fresh("llp", 32, segment=segment), 2 * 32 // segment - 1
    first = matrices.first_layer(list(matrices.reach([matrices.allowed(layer, 32)] * needed)))
    assert first[-1, 0] == needed


@pytest.mark.parametrize("name", ["full", "latte", "linear", "elita", "performer"])
def test_what_reads_everything_reaches_everything_in_one_layer(name):
    assert_exact(matrices.allowed(fresh(name, 16), 16), torch.ones(16, 16, dtype=torch.bool).tril())


def test_position_terms_are_those_of_the_gates_equation():
    layer = fresh("elita", 9, horizon=7).double()
    t_T = torch.arange(9, dtype=torch.float64)
    angle = layer.frequency[..., None] * t_T / 7 + layer.phase[..., None]
    p_2HT = (layer.amplitude[..., None] * angle.sin()).sum(2)
    assert_same_maths(matrices.position_terms(layer, 9), (p_2HT[0][:, None] + p_2HT[1][..., None]).detach())


def test_pictures_of_untrained_layers(tmp_path, monkeypatch, printed):
    picture(tmp_path, "weights", "--attention", "llp,latte", *SMALL)
    picture(tmp_path, "reach", "--attention", "window,full", *SMALL, "--layers", "3")
    picture(tmp_path, "cost", "--attention", "linear", "--tokens", "16", "--dim", "16", "--heads", "2", suffix="svg")
    monkeypatch.chdir(tmp_path)
    assert printed("show", "positions", *SMALL) == "positions.png\n"
    assert (tmp_path / "positions.png").is_file()


@pytest.fixture
def drawn(monkeypatch):
    """Return the grids of panels that are drawn, and draw nothing."""
    grids = []
    monkeypatch.setattr(drawing, "draw_weights", lambda grid, **given: grids.append((grid, given)))
    monkeypatch.setattr(drawing, "save", lambda figure, file: file.touch())
    return grids


@pytest.mark.parametrize(("history", "rows"), [
    ("cross", ["0: latents", "1: latents"]),
    *((history, ["0: history", "0: latents", "1: latents"]) for history in ("self", "segments", "compressed")),
])  # fmt: skip
def test_perceiver_ar_is_drawn_by_layer_and_who_reads(drawn, tmp_path, history, rows):
    options = ["--attention", "perceiver_ar", "--options.perceiver_ar.history", history]
    assert main(["show", "weights", *options, *SMALL, "--out", str(tmp_path / "a.png")]) == 0
    ((grid, _),) = drawn
    assert [[panel.row for panel in line] for line in grid] == [[f"layer {row}"] * 2 for row in rows]
    by_row = {line[0].row: line[0].matrix for line in grid}
    before = 2 if history == "compressed" else 8
    assert by_row["layer 0: latents"].shape == (8, before + 8)
    assert by_row["layer 1: latents"].shape == (8, 8 if history == "cross" else before + 8)
    assert not by_row["layer 0: latents"][:, before:][np.triu_indices(8, 1)].any()
    assert by_row["layer 0: latents"][:, :before].all()
    if history != "cross":
        segment = np.arange(before) // (2 if history == "segments" else before)
        assert ((by_row["layer 0: history"] > 0) == (segment[:, None] == segment)).all()


def test_a_stack_is_drawn_beside_mechanisms_and_when_trained(drawn, tmp_path):
    out = ["--out", str(tmp_path / "a.png")]
    assert main(["show", "weights", "--attention", "window,perceiver_ar", *SMALL, *out]) == 0
    folder = str(MODELS["perceiver_ar"](tmp_path))
    for layer in "01":
        assert main(["show", "weights", folder, "--text", "abcdefg", "--layer", layer, *out]) == 0
    (beside, _), (first, _), (second, given) = drawn
    names = ["window", "perceiver_ar\nlayer 0: latents", "perceiver_ar\nlayer 1: latents"]
    assert [panel.title for line in beside for panel in line] == names
    assert [line[0].row for line in first] == ["layer 0: history", "layer 0: latents"]
    assert [line[0].row for line in second] == ["layer 1: latents"]
    assert [panel.keys for panel in second[0]] == [list("0123456")] * 2
    assert given["tokens"] == list("abcdefg")


def test_a_single_matrix_has_its_own_tokens_beside_it():
    panel = drawing.Panel(np.eye(2, 4), causal=True, keys=["row 0", "2", "3", "4"])
    axis = drawing.draw_weights([[panel]], title="", tokens=list("abcde")).axes[0]
    assert [text.get_text() for text in axis.get_xticklabels()] == ["row·0", "c", "d", "e"]
    assert [text.get_text() for text in axis.get_yticklabels()] == ["d", "e"]
    ticks = drawing.draw_weights([[panel, panel]], title="").axes[1]
    assert [text.get_text() for text in ticks.get_xticklabels() + ticks.get_yticklabels()] == ["row 0", "4", "3", "4"]
    (image,) = axis.images
    assert np.isnan(image.get_array().filled(np.nan)).tolist() == [[False] * 3 + [True], [False] * 4]


@pytest.mark.parametrize(("largest", "words", "label"), [
    ((0.4, 1.0), ["0", "0.02", "0.1", "0.25", "0.5 or more"], "weight"),
    ((3.0, 1.5), ["0", "0.04", "0.2", "0.5", "1"], "|weight| as a share of the panel's largest"),
    ((0.4, 3.0), ["0 (*: 0)", "0.02 (*: 0.04)", "0.1 (*: 0.2)", "0.25 (*: 0.5)", "0.5 or more (*: 1)"],
     "weight (*: |weight| as a share of the panel's largest)"),
], ids=["distributions", "others", "both"])  # fmt: skip
def test_the_scale_says_what_its_numbers_are(largest, words, label):
    figure = drawing.draw_weights([[drawing.Panel(np.full((2, 2), size), "a") for size in largest]], title="")
    figure.canvas.draw()
    *_, bar = figure.axes
    assert bar.get_ylabel() == label
    assert [text.get_text() for text in bar.get_yticklabels()] == words
    low, high = bar.get_ylim()
    assert (low, high) == pytest.approx((0, drawing.LARGEST))


def test_each_mechanism_has_a_named_row_of_costs_coloured_if_it_grows():
    measured = list(layer_costs(["latte", "linformer", "full"], [64, 128, 256], dim=16, num_heads=2, options={}))
    left, right = drawing.draw_cost(measured, title="").axes
    names = [text.get_text() for text in left.get_yticklabels()]
    assert sorted(names) == ["full", "latte", "linformer (bidirectional)"]
    assert names[-1] == "full"
    full = measured[-1].cost
    for axis, last in ((left, full.mixing_flops / 256), (right, full.state_bytes)):
        rows = {name: [line for line in axis.lines if line.get_ydata()[0] == i] for i, name in enumerate(names)}
        assert rows["full"][0].get_xdata()[-1] == last
        assert [line.get_marker() for line in rows["full"]] == ["|", "o", "o"]  # every length, the first, the last
        assert {line.get_color() for line in rows["full"]} == {drawing.COLOURS[4]}
        assert {line.get_color() for line in rows["latte"]} == {drawing.COLOURS[5]}
    assert [text.get_text() for text in right.texts] == ["none"]  # a bidirectional form keeps no state


@pytest.mark.slow
def test_pictures_of_all_mechanisms(tmp_path):
    for what in ("weights", "reach"):
        picture(tmp_path, what, *SMALL)
    picture(tmp_path, "cost", "--tokens", "32", "64", "--dim", "16", "--heads", "2")


def test_pictures_of_a_trained_model(tmp_path, hybrid, monkeypatch):
    text = ["weights", hybrid, "--text", "def main", "--head", "1"]
    assert picture(tmp_path, *text, "--layer", "0") != picture(tmp_path, *text, "--layer", "1")
    monkeypatch.setattr("subquad.evaluation.drawing.save", lambda figure, file: file.write_bytes(PNG))
    picture(tmp_path, "reach", hybrid, "--tokens", "8")
    picture(tmp_path, "positions", hybrid, "--tokens", "8")


@pytest.mark.parametrize(("arguments", "message"), [
    (["weights", "--attention", "llp", "--head", "2"], "there is no head 2: heads are 0 to 1"),
    (["weights", "--attention", "llp", "--layer", "0"], "--layer is for a trained model"),
    *(([what, "--attention", name], f"{STACK}{name} is a stack of its own")
      for what, name in (("cost", "perceiver_io"), ("weights", "perceiver"), ("reach", "perceiver_ar"))),
    (["weights", "--tokens", "0"], "--tokens must be at least 1, got 0"),
    (["weights", "--out", "a.jpg"], "a picture's name must end with .png or .svg, got 'a.jpg'"),
    (["weights", "--out", "nowhere/a.png"], "there is no folder nowhere for a.png"),
    (["weights", "nowhere", "--text", "x"], "there is no folder nowhere"),
    (["weights", "nowhere"], "give a text for the language model to read by --text"),
    (["reach", "--layers", "0"], "--layers must be at least 1, got 0"),
    (["positions", "--attention", "llp"], "'llp' has no position terms of its own"),
    (["cost", "--tokens", "0"], "--tokens must be at least 1, got 0"),
])  # fmt: skip
def test_mistakes_are_named(refused, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in re.sub(r"\s+", " ", refused("show", *arguments))
    assert list(tmp_path.iterdir()) == []


V1 = {"perceiver_ar": {"latents": 4, "history": "self"}}
MODELS = {
    "decoder": lambda folder: saved(folder, attention="full"),
    "perceiver_ar": lambda folder: saved(folder, attention="perceiver_ar", options=V1),
    "classifier": lambda folder: labelling(folder, attention="full"),
    "no config.yaml": lambda folder: labelling(folder, attention="full", task=False),
    "perceiver": lambda folder: labelling(folder, attention="perceiver"),
}


@pytest.mark.parametrize(("model", "arguments", "message"), [
    ("decoder", ["--text", "abc", "--layer", "2"], "there is no layer 2: layers are 0 to 1"),
    ("decoder", ["--text", "abc", "--layer", "0", "--head", "-1"], "there is no head -1: heads are 0 to 1"),
    ("decoder", ["--text", ""], "--text must have at least one token, got ''"),
    ("decoder", ["--text", "abc", "--example", "0"], "--example is for a classifier"),
    ("decoder", ["--text", "abc", "--attention", "llp"], "a run has its own mechanisms"),
    ("classifier", ["--example", "5"], "there is no example 5: examples are 0 to 4"),
    ("classifier", ["--text", "abc"], "--text is for a language model; choose a sequence of the classifier's task by"),
    ("no config.yaml", [], "has no config.yaml that names the sequences of its task"),
    ("perceiver", [], f"{STACK}this model is a stack of its own: perceiver"),
    ("perceiver_ar", ["--text", "abcde", "--layer", "2"], "there is no layer 2: layers are 0 to 1"),
])  # fmt: skip
def test_mistakes_about_a_trained_model_are_named(refused, tmp_path, model, arguments, message):
    assert message in refused("show", "weights", MODELS[model](tmp_path), *arguments)
