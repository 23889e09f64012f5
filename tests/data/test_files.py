"""Where prepared data are kept."""

from subquad.data.files import cache_folder


def test_the_cache_is_where_one_says(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SUBQUAD_CACHE", raising=False)
    assert cache_folder(None) == tmp_path / ".cache" / "subquad"
    monkeypatch.setenv("SUBQUAD_CACHE", str(tmp_path / "a"))
    assert cache_folder(None) == tmp_path / "a"
    assert cache_folder("~/there") == tmp_path / "there"
