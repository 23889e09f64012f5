"""The page of the data: every experiment names its data, and what is fetched or read is what the page lists."""

import bz2
import gzip
import hashlib
import http.server
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness import catalogue, command
from experiments.harness.catalogue import DATA, DataSet, Listed, asked, told
from experiments.harness.data import compared, find
from experiments.harness.fetch import fetch
from experiments.harness.recipe import read_recipe

ROOT = Path(__file__).resolve().parents[2]
HOME = ROOT / "experiments"
NAMES = command.experiments(HOME)
ARRIVES = {
    "/plain": b"all of it\n",
    "/packed.gz": gzip.compress(b"packed\n"),
    "/packed.bz2": bz2.compress(b"packed too\n"),
    "/book": "\ufeffTitle: A BOOK\r\n* START: A BOOK *\r\n\r\nA BOOK\r\n\r\nof caf\u00e9s\r\n\r\n* END\r\n".encode(),
    "/old_book": "A BOOK\r\nof caf\u00e9s\r\nEnd of it".encode("cp1252"),
}


def listed(name, content, url="", begins=""):
    return Listed(name=name, bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), url=url, begins=begins)


def one_set(*files):
    return DataSet(folder="some", holds="a text", what="A text.", source="here", terms="free", files=list(files))


@pytest.fixture
def server():
    """The address of a server with the files `ARRIVES`."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path in ARRIVES else 404)
            self.end_headers()
            self.wfile.write(ARRIVES.get(self.path, b""))

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()


@pytest.fixture
def data(tmp_path, monkeypatch):
    """The listed data sets, which a test may change, and an empty cache."""
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SUBQUAD_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    kept = dict(DATA)
    yield DATA
    DATA.clear()
    DATA.update(kept)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_names_its_data(name):
    recipe, page = read_recipe(HOME / name), (HOME / name / "README.md").read_text(encoding="utf-8")
    assert told(recipe) in page, f"run {name} --report"
    for scale in recipe.scales:
        for path in asked(recipe, scale):
            called = re.split("[@/]", path)[1] if path.startswith("@") else path.partition(":")[2].partition(":")[0]
            assert called in told(recipe)
            assert called in catalogue.page()


def test_the_page_of_the_data_is_that_of_the_list():
    page = (ROOT / "docs" / "data.md").read_text(encoding="utf-8")
    assert page == catalogue.page(), "python -m experiments --data_page docs/data.md"
    for name, one in DATA.items():
        assert f"\n## {name}\n" in page
        assert "https://" in one.source
        for file in one.files:
            assert re.fullmatch("[0-9a-f]{64}", file.sha256)
            assert f"| `{file.name}` | {file.bytes:,} | `{file.sha256}` |" in page


def test_the_real_files_are_the_listed_ones(data_folder, data, monkeypatch):
    monkeypatch.setenv("SUBQUAD_DATA", str(data_folder))
    assert compared([f"@{name}" for name in DATA], {}) == [f"{name}: the files of docs/data.md" for name in DATA]


def test_a_data_set_is_fetched_checked_and_found(data, server, tmp_path, capsys):
    book = "A BOOK\n\nof caf\u00e9s\n".encode()
    data["some"] = one_set(
        listed("a", ARRIVES["/plain"], f"{server}/plain"),
        listed("in/b", b"packed\n", f"{server}/packed.gz"),
        listed("in/c", b"packed too\n", f"{server}/packed.bz2"),
        listed("d", book, f"{server}/book", begins="A BOOK"),
        listed("e", "A BOOK\nof caf\u00e9s\n".encode(), f"{server}/old_book", begins="A BOOK"),
    )
    with pytest.raises(FileNotFoundError, match=r"python -m experiments --fetch some, or use --data some=PATH"):
        find("@some", {})
    assert command.main(["--fetch", "some"]) == 0
    assert Path(find("@some/d", {})).read_bytes() == book
    assert compared(["@some"], {}) == ["some: the files of docs/data.md"]
    assert "some: in/b, 7 bytes" in capsys.readouterr().err
    assert command.main(["--fetch", "some"]) == 0
    assert "some: already in" in capsys.readouterr().err


def test_what_is_not_listed_is_refused_and_leaves_nothing(data, server, tmp_path):
    for url, begins, error, message in (
        (f"{server}/plain", "", ValueError, "has no a with the SHA-256 .*: it has changed"),
        (f"{server}/book", "A BOOK", ValueError, "has no a with the SHA-256"),
        (f"{server}/none", "", OSError, r"can't be read .*404.*: get it by hand, see docs/data.md"),
        ("http://127.0.0.1:9/x", "", OSError, "can't be read"),
    ):
        data["some"] = one_set(listed("a", b"another text", url, begins))
        with pytest.raises(error, match=message):
            fetch("some", lambda _: None)
    data["some"] = one_set(listed("a", b"", f"{server}/plain"))
    ARRIVES["/plain"], kept = b"x" * (1 << 21), ARRIVES["/plain"]
    with pytest.raises(ValueError, match="has more than"):
        fetch("some", lambda _: None)
    ARRIVES["/plain"] = kept
    data["some"] = one_set(listed("a", b"text"))
    with pytest.raises(ValueError, match=r"some is not fetched \(free\): docs/data.md says where to get it"):
        fetch("some", lambda _: None)
    with pytest.raises(ValueError, match="unknown data set 'boks'; did you mean 'books'"):
        fetch("boks", lambda _: None)
    assert not (tmp_path / "cache" / "data" / "some").exists()


def test_a_run_says_whether_it_reads_the_listed_files(data, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.txt").write_bytes(b"a book")
    (tmp_path / "b").write_bytes(b"b")
    data["some"] = replace(one_set(listed("train/a.txt", b"a book"), listed("b", b"b")), parts=["train"])
    given, same, other = (
        {"some": str(tmp_path)},
        "some: the files of docs/data.md",
        "some: not the files of docs/data.md",
    )
    assert compared(["@some/train"], given) == [same]
    assert compared(["@some/train"], {"some/train": str(tmp_path / "train")}) == [same]
    (tmp_path / "b").write_bytes(b"c")
    assert compared(["@some/train"], given) == [same]  # it does not read b
    assert compared(["@some"], given)[0].startswith(f"{other} (b); figures don't compare")
    (tmp_path / "train" / "a.txt").unlink()
    assert compared(["@some"], given)[0].startswith(f"{other} (train/a.txt and others)")
    assert compared(["@some/else"], given)[0].startswith(f"{other}; figures")
    assert compared(["hf:a/b"], given) == []
    assert compared(["@little", "@little"], {}) == ["little: a substitute, the package email of this Python"]


def test_the_command_says_it(experiments, capsys):
    assert command.main(["trained", "--scale", "smoke", "--folder", str(experiments), "--processes", "1"]) == 0
    assert "trained: data little: a substitute" in capsys.readouterr().err
