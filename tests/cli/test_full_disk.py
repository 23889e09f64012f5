"""A disk that fills up while a command writes: one line that says what to do, and nothing of what was there is lost."""

import itertools
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from subquad.cli import main
from tests.cli.folders import save_model
from tests.training.configs import config_of, write_text
from tests.training.helpers import assert_same_run, read_json, steps_of
from tests.training.test_checksums import adapter_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIZE, STEP = 20 << 20, 24 << 10


@pytest.fixture
def disk(tmp_path):
    """A file system of 20 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting needs the rights of an administrator")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(disk, left):
    """Leave `left` bytes of the disk's room."""
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(max(0, free - left)))


def one_error(capfd, *arguments):
    """The only error of a command that fails; None if it has room enough."""
    capfd.readouterr()
    status = main([str(argument) for argument in arguments])
    said = capfd.readouterr().err
    assert "Traceback" not in said, "of a thread either"
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert (status, len(lines)) in ((0, 0), (1, 1)), said
    assert all("ree some space and run the same command again" in line for line in lines), lines
    return lines[0] if lines else None


def test_a_run_that_fills_the_disk_goes_on_once_there_is_room(disk, tmp_path, capfd):
    text, met = write_text(tmp_path), Counter()

    def command(home, name):
        config = config_of(text, home, folder=name, trackers=["tensorboard"], sample_tokens=4)
        config.to_file(tmp_path / "run.yaml")
        return "train", "--config", tmp_path / "run.yaml"

    assert one_error(capfd, *command(tmp_path, "alone")) is None
    for left in itertools.count(0, STEP):
        fill(disk, left)
        line = one_error(capfd, *command(disk, f"run-{left}"))
        if line is None:
            break
        met[next(part for part in ("checkpoint", "final model", "metrics", "No space left") if part in line)] += 1
        (disk / "filler").unlink()
        assert one_error(capfd, *command(disk, f"run-{left}")) is None
        run = disk / f"run-{left}"
        assert_same_run(tmp_path / "alone", run)
        assert read_json(tmp_path / "alone" / "checksums.json") == read_json(run / "checksums.json")
        assert steps_of(run / "checkpoints") == [2, 4]
        shutil.rmtree(run)
    sys.stdout.write(f"a full disk at {sum(met.values())} places of a run: {dict(met)}\n")
    assert {"checkpoint", "No space left"} <= set(met)


FULL = {"attention": "full", "position": "rope"}


def exported(folder):
    """A transformers model."""
    assert main(["export", str(save_model(folder / "full", **FULL)), "--out", f"{folder}/theirs"]) == 0
    return folder / "theirs"


def generated(home, *more):
    return ("generate", save_model(home / "m"), "--prompt", "w1 w2", "--max_tokens", 9, *more)


COMMANDS = {
    "generate": lambda home: generated(home, "--state-out", "state"),
    "texts": lambda home: generated(home, "--texts", 3, "--out-file", "t.zip"),
    "eval": lambda home: (
        "eval", save_model(home / "m", tokenizer="bytes"), "--data.path", write_text(home), "--json", "e.json"
    ),
    "export": lambda home: ("export", save_model(home / "m", **FULL), "--out", "theirs"),
    "import": lambda home: ("import", exported(home), "--out", "ours"),
    "merge": lambda home: ("lora", "merge", adapter_of(save_model(home / "m")), "--out", "merged"),
    "cost": lambda home: ("cost", "--attention", "latte", "--json", "c.json"),
    "show": lambda home: ("show", "weights", "--attention", "latte", "--out", "w.png"),
    "data": lambda home: ("data", "tokens", write_text(home), "--tokenizer", "bytes", "--out", "set"),
}  # fmt: skip


@pytest.mark.parametrize("left", [0, 20 << 10])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_that_writes_says_what_to_do_and_leaves_nothing(disk, tmp_path, capfd, monkeypatch, name, left):
    arguments = COMMANDS[name](tmp_path)
    monkeypatch.chdir(disk)
    fill(disk, left)
    line = one_error(capfd, *arguments)
    assert line is not None or left
    assert line is None or [path.name for path in disk.iterdir()] == ["filler"]
    (disk / "filler").unlink()
    if line is not None:
        assert one_error(capfd, *arguments) is None
    monkeypatch.chdir(tmp_path)  # or the disk is in use
