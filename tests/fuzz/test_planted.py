"""Planted faults are small, leave words alone, and are told from each other by the tests of their module."""

import ast

import pytest

from tests.fuzz import planted

SOURCE = '''"""Words of 2 lines."""
import logging

logger = logging.getLogger(__name__)


def at_most(x: "int | 3", most: int = 5) -> "int | 4":
    """Return the smaller of 2."""
    if not x >= 0:
        raise ValueError(f"x must be at least {0}, got {x}")
    logger.info("x is %d", x + 1)
    return min(x, most)


def is_small(x: int) -> bool:
    return x < 10
'''
TEST = """from subquad.small import at_most, is_small


def test_at_most():
    assert at_most(3, 2) == 2
    assert is_small(3)
"""


@pytest.fixture
def small(tmp_path, monkeypatch):
    """A package of one module with one test."""
    monkeypatch.setattr(planted, "LOADED", ("pytest",))
    files = {"subquad/__init__.py": "", "subquad/small.py": SOURCE, "tests/test_small.py": TEST, "pyproject.toml": ""}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_one_fault_is_caught_and_one_survives(small):
    found = {(one.before, one.after): one for one in planted.chosen(small, 100, 0)}
    kept = (small / "subquad/small.py").read_bytes()
    caught, survived = found["min(x, most)", "(max(x, most))"], found["x < 10", "(x <= 10)"]
    results = {one.key: planted.attempt(small, one, 20) for one in (caught, survived)}
    assert [result.outcome for result in results.values()] == ["caught", "survived"], results
    assert results[caught.key].by.startswith("FAILED tests/test_small.py::test_at_most")
    assert planted.table(results) == [f"survived  {survived.key}", "1 caught, 1 survived, 0 timeout"]
    assert (small / "subquad/small.py").read_bytes() == kept


def test_words_are_left_alone_and_a_seed_repeats_its_faults(small):
    found = planted.chosen(small, 100, 0)
    assert {(one.line, one.after) for one in found} == {
        (7, "6"), (9, "(x >= 0)"), (9, "(x > 0)"), (9, "1"), (10, "pass"), (12, "(max(x, most))"),
        (16, "(x <= 10)"), (16, "11"),
    }  # fmt: skip
    assert planted.chosen(small, 3, 0) == found[:3]
    assert planted.chosen(small, 100, 1) != found
    source = SOURCE.encode()
    assert all(ast.dump(ast.parse(one.applied(source))) != ast.dump(ast.parse(source)) for one in found)


@pytest.mark.parametrize(("before", "after"), [
    ("a == b", {"(a != b)"}), ("a in b", {"(a not in b)"}), ("a + b", {"(a - b)"}), ("a / b", {"(a * b)"}),
    ("a and b", {"(a or b)"}), ("not a", {"(a)"}), ("True", {"False"}), ("a[b:c]", {":c", "b:"}),
    ("f(a, b)", {"(f(b, a))", "pass"}), ("f(key=a)", {"(f())", "pass"}), ("f[a] = b", {"pass"}), ("a += b", {"pass"}),
    ("x.amax(a)", {"(x.amin(a))", "pass"}), ("a = f'{b + c}'", set()), ("logger.info(a + b)", set()),
])  # fmt: skip
def test_each_kind_of_fault(before, after):
    assert {one.after for one in planted.mutants("x.py", before.encode())} == after


def test_a_module_has_tests_of_its_name_of_its_users_and_of_its_room():
    own, users, room = planted.tests_of(planted.ROOT, "subquad/training/schedule.py")
    assert own == ["tests/training/test_schedule.py"]
    assert not set(own) & set(users)
    assert "tests/training/test_loop.py" in users + room
