"""Claims: verdicts from rows, by kind, evidence and gate."""

from pathlib import Path

import pytest

from experiments.harness.claims import THEOREM, UNLEARNED, Claim, Expected, read_expected, verdicts
from experiments.harness.noise import FAILS, HOLDS, INDICATION, SAME, UNRESOLVED
from tests.experiments.helpers import rows, write


def claim(kind, *pairs, **more):
    given = {"id": "c", "says": "s", "theirs": "t", "kind": kind, "evidence": "fresh", "pairs": list(pairs)}
    return Claim.from_dict({**given, "gate": {"reference": {"arm": "b"}, "baseline": "base"}, **more})


def judge(chosen, found, folder=Path("nowhere")):
    expected = Expected(paper="p", title="t", source="s", comparable="no", claims=[chosen])
    known = [{"base": 9.0, **row} for row in found]
    (verdict,) = verdicts(folder, expected, {"cpu": {"rows": known, "done": 1, "units": 1}})
    return verdict.verdict, verdict.ours


def pair(left, right):
    return [{"arm": left}, {"arm": right}]


AB = pair("a", "b")
CLEAR = rows(a=[1.0, 1.01, 0.99], b=[2.0, 2.01, 1.99], c=[1.005] * 3)
CLEAR_AND_SAME = rows(a=[1.0, 1.01, 0.99], b=[2.0, 2.01, 1.99], c=[1.01, 1.0, 0.99])
NOISY = rows(a=[1.0, 2.0, 3.0], b=[1.1, 2.2, 3.0])
EQUAL = rows(a=[1.0] * 3, b=[1.0] * 3, c=[2.0] * 3)


def test_a_difference_counts_only_beyond_the_noise():
    for kind, pairs, found, verdict in (
        ("lower", [AB], CLEAR, HOLDS),
        ("higher", [AB], CLEAR, FAILS),
        ("lower", [AB], NOISY, UNRESOLVED),
        ("higher", [AB], NOISY, UNRESOLVED),
        # The claim is about all of its pairs.
        ("lower", [AB, pair("c", "b")], CLEAR, HOLDS),
        ("lower", [AB, pair("a", "c")], CLEAR, UNRESOLVED),
        ("lower", [AB, pair("b", "c")], CLEAR, FAILS),
        ("lower", [AB, pair("b", "d")], CLEAR, "not run"),
        ("lower", [AB], [], "not run"),
        # Equal values are no difference, however small the noise.
        ("lower", [AB], EQUAL, UNRESOLVED),
        ("lower", [pair("a", "c")], EQUAL, HOLDS),
        ("higher", [pair("a", "c")], EQUAL, FAILS),
    ):
        assert judge(claim(kind, *pairs), found)[0] == verdict, (kind, pairs)


def test_times_need_repeats_and_exact_figures_none():
    once = rows(a=[1.0, 1.01], b=[2.0, 2.01])
    repeated = [{**row, "seed": 0, "seconds": row["loss"]} for row in CLEAR]
    chosen = claim("lower", AB, evidence="times", metric="seconds")
    assert judge(claim("lower", AB), once) == (INDICATION, "1.005 against 2.005 (-1, -1.03 to -0.97); for the claim")
    assert judge(claim("higher", AB), once)[1].endswith("; against the claim")
    assert judge(chosen, repeated)[0] == HOLDS
    assert judge(claim("lower", AB, evidence="exact"), rows(a=[1.0], b=[2.0])) == (HOLDS, "1 against 2")
    assert judge(claim("lower", AB, evidence="exact"), rows(a=[1.0], b=[1.0]))[0] == FAILS
    assert judge(claim("lower", AB, seeds=5), CLEAR)[0] == INDICATION
    assert judge(claim("lower", pair("a", "c"), margin=0.1), CLEAR_AND_SAME)[0] == SAME


def test_models_need_the_error_of_the_text():
    chosen = claim("lower", AB, evidence="models")
    assert judge(chosen, CLEAR)[0] == INDICATION
    told = [{**row, "text": "t", "loss_blocks": [row["loss"], row["loss"] + 0.1 * row["seed"]]} for row in CLEAR]
    assert judge(chosen, told)[0] == HOLDS


GATE = {"reference": {"arm": "b"}, "baseline": "unigram"}


@pytest.mark.parametrize(
    ("unigram", "verdict"),
    [(2.1, HOLDS), (2.01, UNLEARNED), (1.9, UNLEARNED), (None, INDICATION)],  # three standard errors are 0.017
)
def test_a_claim_on_models_needs_a_reference_that_learned_something(unigram, verdict):
    known = [{**row, "text": "t"} | ({} if unigram is None else {"unigram": unigram}) for row in CLEAR]
    found = judge(claim("lower", AB, gate=GATE), known)
    assert found[0] == verdict
    if verdict == UNLEARNED:
        assert found[1].endswith(f"; the reference, b, has loss 2, unigram {unigram}")


def test_each_text_has_a_gate_and_another_arm_may_fail():
    low = [{**row, "text": text, "unigram": base} for text, base in (("t", 2.1), ("u", 1.9)) for row in CLEAR]
    assert judge(claim("lower", AB, gate=GATE, where={"text": "t"}), low)[0] == HOLDS
    assert judge(claim("lower", AB, gate=GATE), low)[0] == UNLEARNED
    assert judge(claim("lower", AB, gate=None), low)[0] == INDICATION  # a claim without a gate decides nothing
    a = {**GATE, "reference": {"arm": "a"}}  # b, worse than the baseline, is no reference
    assert judge(claim("lower", AB, gate=a, where={"text": "u"}), low)[0] == HOLDS
    right = [{**row, "accuracy": row["loss"], "chance": 0.5} for row in CLEAR]
    above = {"reference": {"arm": "b"}, "baseline": "chance", "metric": "accuracy", "better": "higher"}
    assert judge(claim("lower", AB, metric="accuracy", gate=above), right)[0] == HOLDS
    assert judge(claim("lower", AB, metric="accuracy", gate={**above, "better": "lower"}), right)[0] == UNLEARNED


def test_a_theorem_can_only_be_contradicted():
    proven = {"theorem": True, "why": "by definition"}
    assert judge(claim("lower", AB, **proven), NOISY) == (
        THEOREM,
        f"by definition; {judge(claim('lower', AB), NOISY)[1]}",
    )
    assert judge(claim("higher", AB, **proven), CLEAR)[0] == FAILS
    assert judge(claim("higher", AB, **proven), [])[0] == "not run"


def test_the_largest_complete_scale_with_rows_decides():
    expected = Expected(
        paper="p", title="t", source="s", comparable="no", claims=[claim("lower", AB, evidence="times")]
    )

    def told(**scales):
        given = {name: {"rows": found, "done": done, "units": 2} for name, (found, done) in scales.items()}
        (verdict,) = verdicts(Path("nowhere"), expected, given)
        return verdict.verdict, verdict.scale

    other = rows(a=[2.0, 2.01, 1.99], b=[1.0, 1.01, 0.99])
    assert told(cpu=(CLEAR, 2)) == (HOLDS, "cpu")
    assert told(cpu=(CLEAR, 2), gpu=(other, 2)) == (FAILS, "gpu")
    assert told(cpu=(CLEAR, 2), gpu=(other, 1)) == (HOLDS, "cpu")
    assert told(cpu=(CLEAR, 2), gpu=(rows(a=[1.0]), 2)) == (HOLDS, "cpu")
    assert told(cpu=(CLEAR, 1)) == (HOLDS, "cpu")
    assert told(smoke=(CLEAR, 2)) == ("not run", "")


def test_equal_is_about_every_row():
    chosen = claim("equal", [{"arm": "a"}], metric="n", value=3)
    assert judge(chosen, [{"arm": "a", "n": 3}, {"arm": "b", "n": 4}]) == (HOLDS, "3")
    assert judge(chosen, [{"arm": "a", "n": 3}, {"arm": "a", "n": 40000}]) == (FAILS, "3, 40,000")
    assert judge(chosen, [{"arm": "b", "n": 3}])[0] == "not run"


def test_claims_that_are_not_measured_give_their_reason():
    assert judge(claim("not comparable", why="words"), CLEAR) == ("not comparable", "words")
    assert judge(claim("waiting", why="a week"), []) == ("waiting for a GPU", "a week")


def test_the_experiments_own_judge(tmp_path):
    code = tmp_path / "experiment.py"
    code.write_text("def claim_c(rows):\n    return ('holds', str(len(rows))) if rows[0]['seed'] == 0 else None\n")
    assert judge(claim("function"), CLEAR, tmp_path) == (INDICATION, "9; for the claim")
    assert judge(claim("function", evidence="exact"), CLEAR, tmp_path) == (HOLDS, "9")
    assert judge(claim("function", where={"arm": "b"}, evidence="exact"), CLEAR, tmp_path) == (HOLDS, "3")
    assert judge(claim("function"), CLEAR[1:], tmp_path)[0] == "not run"
    differs = (
        "from experiments.harness.noise import compare\ndef claim_c(rows):\n    a, b = ({'arm': n} for n in 'ab')\n"
    )
    code.write_text(f"{differs}    return [compare(rows, a, b, 'loss').toward(-1, 0.5)], 'shown'\n")
    assert judge(claim("function"), CLEAR, tmp_path) == (HOLDS, "shown")
    for text, message in (
        ("def claim_c(rows):\n    return 'perhaps', ''\n", "claim_c returned 'perhaps'; valid: holds, "),
        ("", r"has no function claim_c\(rows\)"),
    ):
        code.write_text(text)
        with pytest.raises(ValueError, match=message):
            judge(claim("function"), CLEAR, tmp_path)


def test_errors_in_a_claim():
    for values, message in (
        ({"kind": "lower"}, "of kind 'lower' needs pairs of 2"),
        ({"kind": "equal", "pairs": [[{}, {}]]}, "of kind 'equal' needs pairs of 1"),
        ({"kind": "equal", "pairs": [[{}]]}, "of kind 'equal' needs a value"),
        ({"kind": "not comparable"}, "of kind 'not comparable' needs a reason in why"),
        ({"kind": "function", "theorem": True}, "that is a theorem needs a reason in why"),
        ({"kind": "function", "seeds": 2}, "needs seeds of at least 3 and a margin of at least 0, got 2, 0.0"),
        ({"kind": "function", "margin": -1.0}, "needs seeds of at least 3 and a margin of at least 0, got 3, -1.0"),
        ({"kind": "wrong"}, "must be one of its choices"),
    ):
        with pytest.raises(ValueError, match=message):
            Claim.from_dict({"id": "c", "says": "s", "theirs": "t", **values})


def test_claims_share_the_experiments_gate_and_those_without_a_paper_are_ours(tmp_path):
    plain = {"id": "a", "says": "s", "theirs": "t", "kind": "lower", "pairs": [AB]}
    own = {**plain, "id": "b", "gate": {**GATE, "baseline": "gzip"}, "ours": True}
    write(tmp_path, {}, [plain, own], gate=GATE)
    a, b = read_expected(tmp_path).claims
    assert (a.gate.baseline, b.gate.baseline, a.ours, b.ours) == ("unigram", "gzip", False, True)
    write(tmp_path, {}, [plain], paper="Ours")
    assert read_expected(tmp_path).claims[0].ours
