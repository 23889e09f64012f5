"""Options in help: name, type, default and the docstring under each field."""

import inspect
import pydoc
from dataclasses import dataclass

import pytest

from subquad import attention
from subquad.config import Config
from subquad.options import DocWithOptions, options


@dataclass(frozen=True, kw_only=True)
class Base(Config):
    size: int
    """How large."""
    kept: float = 0.5
    """Stays
    as it is."""


@dataclass(frozen=True, kw_only=True)
class Derived(Base):
    size: int = 3
    """How large, here."""
    silent: bool = False


def test_options_have_the_meanings_of_their_fields_and_of_inherited_ones():
    assert options(Derived) == [
        ("size", "int", "3", "How large, here."),
        ("kept", "float", "0.5", "Stays as it is."),
        ("silent", "bool", "False", ""),
    ]
    assert options(Base)[0] == ("size", "int", "required", "How large.")


@pytest.mark.parametrize("name", attention.names())
def test_help_of_a_mechanism_shows_its_options_before_its_methods(name):
    cls = attention.mechanism(name)
    doc, shown = inspect.getdoc(cls), pydoc.plaintext.document(cls)
    listed = [line.strip().partition(":")[0] for line in doc.splitlines() if line[:4].isspace() and line[4] != " "]
    assert listed == [option for option, *_ in options(cls.Config)] == [*inspect.signature(cls).parameters]
    assert all(text in " ".join(doc.split()) for *_, text in options(cls.Config))
    assert shown.index("num_heads: int, required") < shown.index("Method resolution order")
    assert "Initialize internal Module state" not in shown


def test_without_source_or_docstrings_options_have_names_types_and_defaults(monkeypatch):
    @dataclass
    class Unread:
        size: int = 3
        """How large."""

    class Owner:
        __doc__ = DocWithOptions(None)  # what `python -OO` leaves of a docstring
        Config = Unread

    def unreadable(_):
        raise OSError

    monkeypatch.setattr(inspect, "getsource", unreadable)
    assert Owner.__doc__ == Owner().__doc__ == "Options:\n    size: int, default 3"
