import sys
import types

import pytest


class Rows(list):
    """Rows of a data set of the Hugging Face hub, read by column."""

    @property
    def column_names(self):
        return list(next(iter(self)))

    def __getitem__(self, column):
        return [row[column] for row in self]


@pytest.fixture
def hub(monkeypatch):
    """A package `datasets` whose data sets all hold `hub.rows`; `hub.asked` lists what was loaded."""
    module = types.ModuleType("datasets")
    fake = types.SimpleNamespace(rows=[], asked=[])

    def load_dataset(*args, split):
        fake.asked.append((*args, split))
        return Rows(fake.rows)

    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    return fake
