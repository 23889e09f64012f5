"""Files and folders appear whole or not at all; a claimed file has one holder, until that process ends."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors import SafetensorError

from subquad.disk import InUseError, aside, claimed, locked, sweep, sync, write_atomically, writing

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
IN_RUST = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    place = tmp_path / "new" / "file"
    with aside(place) as temporary:
        temporary.write_text("whole")
        assert not place.exists()
    with pytest.raises(SystemExit, match="4"), aside(place) as temporary:
        sys.exit(temporary.write_text("half"))
    assert place.read_text() == "whole"
    assert names(place.parent) == ["file"]


def test_the_first_of_two_folders_stays_and_folders_and_files_do_not_replace_each_other(tmp_path):
    file, place = tmp_path / "file", tmp_path / "folder"
    file.write_text("a file")
    with aside(place) as outer, aside(place) as inner:
        for folder, text in ((outer, "outer"), (inner, "inner")):
            folder.mkdir()
            (folder / "file").write_text(text)
    with pytest.raises(OSError, match=r"Not a directory|Is a directory|File exists"), aside(file) as made:
        made.mkdir()
    with pytest.raises(OSError, match=r"Is a directory|denied"), aside(place) as made:
        made.write_text("a file")
    assert (file.read_text(), (place / "file").read_text()) == ("a file", "inner")
    assert names(tmp_path) == ["file", "folder"]


def test_what_a_link_points_to_is_replaced_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there")
    with aside(tmp_path / "link") as made:
        made.mkdir()
        (made / "file").write_text("1")
    (tmp_path / "link.json").symlink_to(tmp_path / "there/file")
    write_atomically(tmp_path / "link.json", b"2")
    assert (tmp_path / "there/file").read_text() == "2"
    assert names(tmp_path) == ["link", "link.json", "there"]
    end, begin = os.pipe()
    with open(end, "rb") as pipe:
        write_atomically(Path(f"/dev/fd/{begin}"), b"3")
        os.close(begin)
        assert pipe.read() == b"3"


@pytest.mark.parametrize("error", [FULL, IN_RUST])
def test_a_full_disk_is_one_error_that_names_the_file(tmp_path, error):
    file = tmp_path / "file"
    with pytest.raises(OSError, match=rf"No space left on device: '{file}'") as caught, aside(file):
        raise error
    assert caught.value.errno == errno.ENOSPC
    for other in (OSError(errno.EACCES, "denied"), SafetensorError("no header (os error 2)"), KeyError("x")):
        with pytest.raises(type(other)) as caught, writing(file):
            raise other
        assert caught.value is other
    assert names(tmp_path) == []


def test_only_what_was_written_is_opened_to_flush_it(tmp_path, monkeypatch):
    opened, real = [], os.open
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)
    (tmp_path / "below").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda path, *args, **more: opened.append(path) or real(path, *args, **more))
        write_atomically(tmp_path / "a", b"new")
        first, second = opened
        assert (first.name[:3], second) == (".a.", tmp_path)
        opened.clear()
        sync(tmp_path)
    assert set(opened) == {tmp_path / "a", tmp_path / "b", tmp_path}


def test_what_a_killed_process_left_is_swept_a_day_later(tmp_path, caplog):
    old, new = (tmp_path / f".file.{digit * 32}" for digit in "01")
    for path in (old, new, tmp_path / ".file.other"):
        path.write_text("x")
    os.utime(old, (0, time.time() - 25 * 3600))
    sweep(tmp_path, "*")
    assert names(tmp_path) == sorted([new.name, ".file.other"])
    assert "the process that wrote it was killed" in caplog.text


def test_a_lock_keeps_others_out_and_leaves_no_file(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        with locked(tmp_path), pytest.raises(BlockingIOError, match="unavailable"):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(other)
    assert names(tmp_path) == []


HOLD = """import os, sys, time
from pathlib import Path
from subquad import disk
with disk.claimed(Path(sys.argv[1])):
    child = os.fork()
    if child == 0:
        time.sleep(60)
    print(child, flush=True)
    sys.stdin.read()
"""


def test_a_claim_ends_with_its_process_and_not_with_the_processes_that_this_forked(tmp_path):
    pytest.importorskip("fcntl")
    file = tmp_path / "new" / ".process"
    with subprocess.Popen([sys.executable, "-c", HOLD, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        child = int(other.stdout.readline())
        for _ in range(2):
            with pytest.raises(InUseError, match=rf"^process {other.pid} on \S+$"), claimed(file):
                pass
        other.kill()
        other.wait()
        os.kill(child, 0)  # it lives on
        with claimed(file):
            assert file.read_text().startswith(f"process {os.getpid()} on ")
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EIO])
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog, code):
    fcntl = pytest.importorskip("fcntl")

    def fail(*args):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", fail)
    if code == errno.EIO:
        with pytest.raises(OSError, match="Input/output error"), claimed(tmp_path / "file"):
            pass
        return
    with caplog.at_level(logging.WARNING), claimed(tmp_path / "file"):
        assert "file can't be locked (No locks available): nothing keeps another process out" in caplog.text
