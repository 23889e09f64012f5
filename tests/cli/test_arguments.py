"""Options of mechanisms on the command line: every flag counts, over files too."""

import pytest
import yaml

from subquad.cli.train import read_config


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["llp.segment", "64", "llp.shifted_heads", "true"], {"llp": {"segment": 64, "shifted_heads": True}}),
        (["llp.segment", "64", "latte.num_latents", "3"], {"llp": {"segment": 64}, "latte": {"num_latents": 3}}),
        (["llp.segment", "64", "llp.segment", "32"], {"llp": {"segment": 32}}),
        (["llp.segment", "64", "llp", "{shifted_heads: true}"], {"llp": {"shifted_heads": True}}),
    ],
)
def test_flags_of_one_mechanism_add_up(arguments, options):
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    flags = [part for name, value in pairs for part in (f"--model.options.{name}", value)]
    assert read_config(flags).model.options == options


def test_a_flag_leaves_the_other_options_of_a_file_as_they_are(tmp_path):
    file = tmp_path / "run.yaml"
    options = {"llp": {"segment": 64}, "latte": {"num_latents": 5}}
    file.write_text(yaml.safe_dump({"model": {"attention": "llp", "options": options}}))
    config = read_config(["--config", str(file), "--model.options.llp.shifted_heads", "true"])
    assert config.model.options == {"llp": {"segment": 64, "shifted_heads": True}, "latte": {"num_latents": 5}}


@pytest.mark.parametrize("flags", [["--run.eval-every", "7"], ["--run.eval-every=7"], ["--run.eval_every", "7"]])
def test_a_flag_may_be_written_with_dashes(flags):
    assert read_config(flags).run.eval_every == 7


def test_a_wrong_flag_with_dashes_is_answered_as_it_was_written(capsys):
    with pytest.raises(SystemExit):
        read_config(["--run.evil-every", "7"])
    assert "unknown option 'run.evil-every'; did you mean 'run.eval_every'?" in capsys.readouterr().err
