"""A finished model whose files were damaged is refused by name; a run's folder has one process that trains it."""

import subprocess
import sys

import pytest

from subquad import disk
from subquad.parsing import read_json_mapping
from subquad.training import train
from subquad.training.checksums import CHECKSUMS, check_unchanged, trusting, write_checksums
from subquad.training.runs import load_run
from tests.training.helpers import python

FILES = ("model.safetensors", "config.json", "tokenizer.json")


@pytest.fixture
def finished(make_config):
    return train(make_config()).folder


def flip(file, place=-1):
    """Change one bit of a file."""
    content = bytearray(file.read_bytes())
    content[place] ^= 0x40
    file.write_bytes(content)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("part", [0.02, 0.5, 0.98])
def test_a_flipped_bit_is_named(finished, name, part):
    assert set(FILES) <= set(read_json_mapping(finished / CHECKSUMS))
    check_unchanged(finished)
    file = finished / name
    flip(file, int(part * file.stat().st_size))
    with pytest.raises(ValueError, match=f"{name} is not as it was saved: its SHA-256 differs"):
        load_run(finished, "cpu")
    with trusting():
        check_unchanged(finished)
    flip(file, int(part * file.stat().st_size))
    load_run(finished, "cpu")


def test_a_missing_file_is_named_and_a_folder_without_checksums_is_read(finished):
    (finished / CHECKSUMS).unlink()
    flip(finished / "tokenizer_config.json", 1)
    check_unchanged(finished)
    write_checksums(finished)
    (finished / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"tokenizer_config\.json is missing: checksums\.json names it"):
        check_unchanged(finished)


HOLD = """import sys
from pathlib import Path
from subquad import disk
with disk.claimed(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_folder_that_another_process_trains_is_refused_and_free_once_it_ended(make_config, tmp_path):
    config = make_config()
    holder = tmp_path / "run/.process"
    with subprocess.Popen([sys.executable, "-c", HOLD, holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=rf"run' is being trained by process {other.pid} on .*: wait for it"):
            train(config)
        other.kill()
        other.wait()
    assert train(config).steps == 4
    with disk.claimed(holder):
        pass  # free again


def test_the_command_line_says_who_trains(make_config, tmp_path):
    make_config().to_file(tmp_path / "c.yaml")
    with disk.claimed(tmp_path / "run/.process"):
        done = python("-m", "subquad", "train", "--config", tmp_path / "c.yaml", timeout=120)
    assert done.returncode == 1
    assert "is being trained by process" in done.stderr
    assert "Traceback" not in done.stderr
