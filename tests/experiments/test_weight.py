"""The weight of a result, and the hash of the code that computed it."""

import itertools

import pytest

from experiments.harness.claims import Claim, Verdict
from experiments.harness.source import bare, library_hash
from experiments.harness.weight import weigh


def verdicts(*words, evidence="models", **more):
    values = {"id": "c", "says": "s", "theirs": "t", "kind": "function", "evidence": evidence, **more}
    return [Verdict(Claim.from_dict(values), "", word) for word in words]


LONG, SHORT = [{"arm": "a", "seed": 0, "scored_tokens": 10**5}], [{"arm": "a", "seed": 0, "scored_tokens": 99_999}]


@pytest.mark.parametrize(
    ("found", "rows", "weight"),
    [
        (verdicts(*["holds"] * 4, "not resolved"), LONG, "strong"),
        (verdicts(*["holds"] * 4, "not resolved"), SHORT, "medium"),
        (verdicts(*["does not hold"] * 4, "not learned here"), LONG, "medium"),
        (verdicts("no difference", "indication"), LONG, "medium"),
        (verdicts("holds", "indication", "not resolved"), LONG, "weak"),
        # Counts beside models, theorems and what was not compared give no weight.
        (verdicts("indication") + verdicts(*["holds"] * 9, evidence="exact"), LONG, "weak"),
        (verdicts("theorem", theorem=True, why="w") + verdicts("not comparable"), LONG, "weak"),
        (verdicts("holds", evidence="exact"), LONG, "strong"),
        (verdicts("holds", evidence="times"), LONG, "medium"),
        (verdicts("holds", evidence="times"), [{"arm": "a", "seed": 0, "p20_ms": 1.0}], "strong"),
        (verdicts("holds", evidence="times"), [{"arm": "a", "seed": seed} for seed in range(3)], "strong"),
        (verdicts("holds", "not resolved", evidence="exact"), [], "medium"),
        ([], [], "weak"),
    ],
)
def test_the_rule(found, rows, weight):
    assert weigh(found, rows)[0] == weight


def test_the_hash_is_of_code_not_of_words(tmp_path, monkeypatch):
    code = 'class A:\n    """Words."""\n    x: int = 1\n    """More."""\n\n    def f(self):\n        """Do."""\n'
    assert bare(code) == bare(
        '"""Room."""\nclass A:\n    # other\n    x: int = 1\n\n\n    def f(self):\n        pass\n'
    )
    assert bare(code) != bare(code.replace("= 1", "= 2"))
    assert bare("x = 'text'") != bare("x = 'other'")
    for room in ("ops", "attention", "layers", "models", "cli"):
        (tmp_path / room).mkdir()
        (tmp_path / room / "a.py").write_text("x = 1\n")
    monkeypatch.setattr("subquad.__file__", str(tmp_path / "__init__.py"))
    hashes = [library_hash.__wrapped__()]
    for file, text in (("cli/a.py", "x = 2\n"), ("ops/a.py", "x = 2\n"), ("models/b.py", "x = 1\n")):
        (tmp_path / file).write_text(text)
        hashes.append(library_hash.__wrapped__())
    assert [a == b for a, b in itertools.pairwise(hashes)] == [True, False, False]
