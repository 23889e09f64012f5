"""Who sees which window: exact for any number of processes."""

from hypothesis import given
from hypothesis import strategies as st

from subquad.training.reading import DealtBatches, HeldOutBatches, RunOrder


@given(
    windows=st.integers(1, 20),
    seed=st.integers(0, 5),
    steps=st.integers(1, 4),
    size=st.integers(1, 3),
    ranks=st.integers(1, 4),
    parts=st.integers(1, 3),
)
def test_every_step_of_all_processes_is_the_next_piece_of_the_order(
    windows: int, seed: int, steps: int, size: int, ranks: int, parts: int
) -> None:
    step = size * ranks * parts
    order = RunOrder(windows, seed, steps * step)
    dealt = [list(DealtBatches(order, size, rank, ranks)) for rank in range(ranks)]
    assert [len(batches) for batches in dealt] == [len(DealtBatches(order, size, 0, ranks))] * ranks
    assert len(dealt[0]) == steps * parts
    seen = [window for batches in zip(*dealt, strict=True) for batch in batches for window in batch]
    assert seen == list(order)
    for number in range(steps):  # what a run that goes on with another number of processes relies on
        parts_of_step = [dealt[rank][number * parts + part] for part in range(parts) for rank in range(ranks)]
        together = [window for part in parts_of_step for window in part]
        assert together == list(order)[number * step : (number + 1) * step]


@given(windows=st.integers(1, 9), together=st.integers(1, 4), total=st.integers(0, 60))
def test_what_belongs_together_follows_one_another(windows: int, together: int, total: int) -> None:
    order = list(RunOrder(windows * together, 3, total, together))
    whole = list(RunOrder(windows, 3, -(-total // together)))
    assert order == [together * window + part for window in whole for part in range(together)][:total]


@given(total=st.integers(0, 30), size=st.integers(1, 4), ranks=st.integers(1, 4))
def test_what_gives_no_whole_batch_to_all_is_left_out(total: int, size: int, ranks: int) -> None:
    order = RunOrder(9, 0, total)
    dealt = [list(DealtBatches(order, size, rank, ranks)) for rank in range(ranks)]
    whole = total // (size * ranks)
    assert all(len(batches) == whole and all(len(batch) == size for batch in batches) for batches in dealt)


@given(count=st.integers(1, 40), size=st.integers(1, 5), ranks=st.integers(1, 5))
def test_every_held_out_item_counts_once_and_all_processes_have_as_many_batches(
    count: int, size: int, ranks: int
) -> None:
    dealt = [list(HeldOutBatches(count, size, rank, ranks)) for rank in range(ranks)]
    sampler = HeldOutBatches(count, size, 0, ranks)
    assert {len(batches) for batches in dealt} == {len(sampler)}
    assert all(batch for batches in dealt for batch in batches)
    counted = [
        item
        for step in range(len(sampler))
        for rank, real in enumerate(sampler.counts(step))
        for item in dealt[rank][step][:real]
    ]
    assert counted == list(range(count))
