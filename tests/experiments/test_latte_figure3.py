"""latte_figure3 reads the curves that latte_table3 keeps; figures worked out by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments.harness.recipe import read_recipe
from experiments.harness.source import library_hash
from experiments.harness.units import code, units_of

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "latte_figure3"
UNIT = next(u for u in units_of(FOLDER, read_recipe(FOLDER), "cpu", work=Path("work"), data={}) if u.seed == 1)
CURVE = {"curve_steps": [1, 2, 3, 4], "unigram": 3.3, "flops": 4000, "steps": 4, "block_size": 8}
ATTENTION = {**CURVE, "curve_losses": [4.0, 3.0, 2.5, 2.0], "loss_blocks": [2.9, 3.0]}
LATTE = {**CURVE, "curve_losses": [4.0, 3.5, 3.25, 3.0], "loss_blocks": [3.0, 3.2], "flops": 2000}
figure3 = code(FOLDER)


def rows(mechanism, row, seeds=5):
    """Return the rows of equal runs with a point of 4 tokens."""
    unit = replace(UNIT, settings={"curve_tokens": 4, "row": row})
    return [
        {"mechanism": mechanism, "position": "sines", "seed": seed, **one}
        for seed in range(seeds)
        for one in figure3.run(unit)
    ]


def test_a_claim_adds_the_error_of_the_text_for_the_tokens_of_a_point():
    both = rows("Latte", LATTE) + rows("attention", ATTENTION)
    gaps, told = figure3.claim_curves(both)
    assert [gap.value for gap in gaps] == [0.75, 1.0]  # steps 3 and 4
    # Blocks of 8 tokens differ by 0.1 and 0.2: 0.05 for 16 tokens, twice that for 4.
    assert [gap.error for gap in gaps] == pytest.approx([0.1, 0.1])
    assert all(gap.complete and gap.seeds == 5 for gap in gaps)
    assert told == "Latte - attention, from step 3 to 4: +0.750, +1.000 nats (± 0.1)"
    (distance,), told = figure3.claim_distance(both)
    assert distance.value == -0.5
    assert told == "Latte's loss falls by 0.500 nats, attention's by 1.000"


def test_equal_flops_are_found_between_two_evaluations():
    (gap,), told = figure3.claim_flops(rows("Latte", {**LATTE, "flops": 2500}) + rows("attention", ATTENTION))
    assert gap.value == 0.25
    assert told == "Latte 3.000 nats, attention 2.750 after 2.5e+03 FLOPs"


def test_the_row_of_the_same_run_is_read_and_a_missing_or_stale_one_is_refused(tmp_path):
    unit = replace(UNIT, experiment=str(tmp_path / "latte_figure3"))

    def stored(library, **row):
        (tmp_path / "latte_table3").mkdir(exist_ok=True)
        scale = dict.fromkeys(("units", "done", "processes"), 1) | {key: [] for key in ("dates", "commits", "machines")}
        scale |= {"identity": "x", "versions": {}, "libraries": {library: 1}, "rows": [{**LATTE, **row}]}
        (tmp_path / "latte_table3" / "result.json").write_text(json.dumps({"scales": {"cpu": scale}}))
        return figure3.run(unit)

    run = {"arm": unit.arm, "seed": 1}
    assert [row["held_out_loss"] for row in stored(library_hash(), **run)] == LATTE["curve_losses"]
    with pytest.raises(
        ValueError, match=f"latte_table3 has no curve of {unit.arm}, seed 1: run `python -m experiments"
    ):
        stored(library_hash(), arm=unit.arm, seed=2)
    with pytest.raises(ValueError, match="latte_table3 was measured with another version of the library: run"):
        stored("an older one", **run)
