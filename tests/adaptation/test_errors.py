"""What a conversion refuses, before anything is written."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from subquad.adaptation import ConvertConfig, convert
from subquad.adaptation.config import MatchConfig, MeasureConfig, TuneConfig
from subquad.adaptation.source import load_source, read_text
from subquad.adaptation.transfer import optimise
from subquad.cli import main
from subquad.data import DataConfig, load_tokenizer, write_tokens
from subquad.hf import lora
from subquad.training import BatchConfig
from subquad.training.errors import NonFiniteError
from tests.adaptation.models import save


@pytest.mark.parametrize(
    ("config", "values", "match"),
    [
        (ConvertConfig, {"out": ""}, "out must name a folder, got ''"),
        (
            ConvertConfig,
            {"attention": "luna"},
            "attention must be one of its choices, got 'luna'; .*valid: latte_macch",
        ),
        (ConvertConfig, {"keep_every": 1}, "keep_every must be 0 .* or at least 2 .*, got 1"),
        (ConvertConfig, {"keep_every": -2}, "keep_every must be 0 .* or at least 2 .*, got -2"),
        (ConvertConfig, {"seed": -1}, "seed must be at least 0, got -1"),
        (ConvertConfig, {"threads": 0}, "threads must be at least 1, got 0"),
        (ConvertConfig, {"options": {"window": {}}}, "options.window has no effect with attention=llp; leave it out"),
        (ConvertConfig, {"match": {"train": "new"}}, "match.train=new trains nothing: llp has no parameters that full"),
        (
            ConvertConfig,
            {"match": {"window_dropout": 0.5}},
            "match.window_dropout is for latte_macchiato: llp has no b",
        ),
        (ConvertConfig, {"lora": {"window_dropout": 0.5}}, "lora.window_dropout is for latte_macchiato: llp has no br"),
        (
            ConvertConfig,
            {"data": {"tokenizer": "bytes"}},
            "a conversion reads text by the model's own tokenizer: leave",
        ),
        (MatchConfig, {"steps": 0}, "match.steps must be at least 1, got 0"),
        (MatchConfig, {"lr": 0.0}, "match.lr must be a positive number, got 0.0"),
        (MatchConfig, {"window_dropout": 1.5}, "match.window_dropout must lie between 0 and 1, got 1.5"),
        (TuneConfig, {"rank": 0}, "lora.rank must be at least 1, got 0"),
        (TuneConfig, {"steps": 0}, "lora.steps must be at least 1, got 0"),
        (TuneConfig, {"alpha": 0}, "lora.alpha must be at least 1, got 0"),
        (TuneConfig, {"lr": -1.0}, "lora.lr must be a positive number, got -1.0"),
        (TuneConfig, {"window_dropout": -0.1}, "lora.window_dropout must lie between 0 and 1, got -0.1"),
        (MeasureConfig, {"windows": 0}, "measure.windows must be at least 1, got 0"),
        (MeasureConfig, {"passkeys": -1}, "measure.passkeys must be at least 0, got -1"),
        (MeasureConfig, {"contexts": [0]}, "measure.contexts must be at least 1, got 0"),
    ],
)
def test_settings_out_of_range_are_refused(config, values, match):
    with pytest.raises(ValueError, match=match):
        config.from_dict(values)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--keep_every", "5"], "keep_every must lie between 0 (replace all) and the model's 4 layers, got 5"),
        (
            ["--attention", "lpp"],
            "attention must be latte_macchiato, linear, llp or window, got 'lpp'; did you mean 'llp'",
        ),
        (["--options.llp.segments", "4"], "attention 'llp' has no option 'segments'; did you mean 'segment'"),
        (
            ["--options.llp.rope_base", "500"],
            "option 'rope_base' of attention 'llp' is the original's, by which its weights were trained: leave it out; "
            "valid: dropout, ",
        ),
        (["--batch.length", "500"], "tokens, too few for a window of 500 and the token after it; give more text"),
        (
            ["--batch.length", "8"],
            "options.llp.segment=8 must be below batch.length=8: in no window would there be anything to leave out",
        ),
        (["--data", "nowhere"], "there is no file or folder 'nowhere'"),
    ],
)
def test_a_command_that_cannot_be_is_refused_before_anything_is_written(flags, tmp_path, capsys, more, match):
    with pytest.raises(SystemExit) as exit_info:
        main(flags("llp", *more))
    assert exit_info.value.code == 2
    assert match in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_folder_of_another_conversion_is_left_alone(flags, tmp_path, capsys):
    assert main(flags("window", option="width=6")) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    for more, match in (
        (["--match.lr", "0.5"], "out holds another conversion (match.lr was 0.003, is 0.5); give --out another"),
        (["--seed", "1"], "out holds another conversion (seed was 0, is 1)"),
    ):
        with pytest.raises(SystemExit):
            main(flags("window", *more, option="width=6"))
        assert match in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(flags("llp"))
    assert "out holds another conversion (attention was 'window', is 'llp'; " in capsys.readouterr().err
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit):
        main(flags("llp", out="else"))
    assert "else holds files that are no conversion's; give --out a new folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(flags("llp", out="else/notes.txt"))
    assert "notes.txt is no folder; give --out a new one" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()} == before


def test_what_holds_no_model_is_refused(original, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere; give the folder of a model"):
        load_source(tmp_path / "nowhere")
    for name in ("config.json", "tokenizer.json"):
        folder = tmp_path / name
        shutil.copytree(original, folder)
        (folder / name).unlink()
        with pytest.raises(FileNotFoundError, match=f"holds no {name}; a conversion needs a model and its tokenizer"):
            load_source(folder)
    adapted = lora.add_adapter(lora.load_base(original), rank=1, base=lora.Base.of(original))
    lora.save_adapter(adapted, tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapter holds an adapter, no model of its own: merge it first"):
        load_source(tmp_path / "adapter")


def test_a_damaged_model_or_a_tokenizer_of_another_is_refused(original, flags, tmp_path, capsys):
    for name, change in (("damaged", lambda t: t.__setitem__((0, 0), torch.nan)), ("other", lambda t: None)):
        folder = tmp_path / name
        shutil.copytree(original, folder)
        tensors = load_file(folder / "model.safetensors")
        change(tensors["model.layers.1.attention.query.weight"])
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"damaged: model\.layers\.1\.attention\.query\.weight is not finite"):
        load_source(tmp_path / "damaged")
    load_tokenizer("bytes").save(str(tmp_path / "other" / "tokenizer.json"))
    with pytest.raises(SystemExit):
        main(flags("llp", model=tmp_path / "other"))
    assert re.search(r"256 tokens, the model knows \d+; is that in \S*other another model's", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def test_too_little_text_is_said_for_the_part_that_lacks_it(original, tmp_path):
    source, text = load_source(original), tmp_path / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 30)
    data = DataConfig(path=str(text), cache=str(tmp_path / "cache"), held_out=0.5)
    part = "the train part of .* has .* give more text or a shorter batch.length"
    with pytest.raises(ValueError, match=part):
        read_text(data, str(original), source.tokenizer, 1, 500)
    more = data.replace(held_out=0.05)
    with pytest.raises(
        ValueError, match=r"the held-out part of .* give more text, a larger data\.held_out or a shorter"
    ):
        read_text(more, str(original), source.tokenizer, 1, 40)


def test_learned_positions_bound_the_windows(texts, tmp_path):
    folder = save(tmp_path / "model", position="learned", max_positions=16)
    settings = {"out": str(tmp_path / "out"), "data": {"path": str(texts), "cache": str(tmp_path / "cache")}}
    config = ConvertConfig.from_dict({**settings, "batch": {"length": 17}})
    with pytest.raises(ValueError, match=r"the model has 16 learned positions, got batch.length=17; choose shorter"):
        convert(folder, config)


def test_token_shards_are_refused_with_what_to_give_instead(original, tmp_path, texts):
    source = load_source(original)
    shards = tmp_path / "shards"
    cache = str(tmp_path / "cache")
    write_tokens(shards, [str(texts)], source.tokenizer, shard_tokens=400)
    with pytest.raises(ValueError, match="is a folder of token shards; a conversion reads text"):
        read_text(DataConfig(path=str(shards), cache=cache), str(original), source.tokenizer, 1, 8)


def test_a_loss_that_is_not_finite_ends_the_stage():
    weight = torch.nn.Parameter(torch.ones(2))
    config = ConvertConfig(match=MatchConfig(steps=3, lr=0.5), batch=BatchConfig(accumulation=1))
    factors, generator = iter(torch.tensor([1.0, torch.inf, 1.0])), torch.Generator()
    with pytest.raises(
        NonFiniteError, match=r"the loss of the stage match is inf at step 2 of 3; nothing .* lower match.l"
    ):
        optimise(
            torch.nn.Module(),
            [weight],
            lambda batch: weight.sum() * batch,
            factors,
            config,
            "match",
            generator,
        )


def test_why_there_is_no_passkey_is_said(flags, tmp_path, capsys):
    assert main(flags("llp")) == 0
    assert "passkey: the tokenizer cannot spell digits" in capsys.readouterr().out
