"""What every test run has in common: offline, one thread, reproducible."""

import gc
import logging
import os
import re
import sys
from pathlib import Path
from typing import Any

# Set before torch, transformers or matplotlib is imported anywhere, and inherited by child processes.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "Agg"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Parallel test processes have one, by which tables would be wrapped.
os.environ.pop("COLUMNS", None)
# Compiled graphs kept from an earlier version of an operation would not fit this one.
os.environ["TORCHINDUCTOR_FX_GRAPH_CACHE"] = "0"
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"
# The Triton kernels run on a CPU, in Triton's interpreter; `make gpu` runs the same tests on a GPU.
os.environ["TRITON_INTERPRET"] = "1"
# Workers and child processes would compile the library and rewrite the tests' assertions each by itself.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import pytest
import torch
from _pytest.logging import catching_logs
from hypothesis import Phase, settings

from subquad.attention.laws import Law
from subquad.testing import AttentionContract

# Messages name this Python as it was typed; a relative path would not be found in the folders that tests change to.
sys.orig_argv[:1] = [sys.executable]

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# Without explanations of failures, for which each example would be traced: that takes seconds for a planted fault.
settings.register_profile("local", deadline=None, phases=set(Phase) - {Phase.explain})
settings.register_profile("ci", settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

ROOT = Path(__file__).resolve().parents[1]
# What is imported and collected stays, so that collections of garbage meanwhile would find nothing.
gc.disable()
if not torch.cuda.is_available():
    # Each would keep a formatted stack per seed, until a device is there.
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None

COMPILED = ("full", "latte", "gla", "delta_net", "elita")
"""One mechanism of each engine: block attention, running softmax, gated scan, delta scan, gated mean."""
frozen_modules = 0
drawn_before: Any = None


def attach_to_root(catching: catching_logs[Any]) -> logging.Handler:
    """Attach a handler of pytest to the root logger alone.

    pytest looks, six times a test, at each of 700 loggers for those that do not propagate: that takes as long as all
    else that it does for a test.
    """
    if catching.level is not None:
        return attach(catching)
    logging.root.addHandler(catching.handler)
    catching.attached_loggers.append(logging.root)
    return catching.handler


attach = catching_logs.__enter__
if hasattr(catching_logs, "attached_loggers"):  # an older pytest attaches to the root alone
    catching_logs.__enter__ = attach_to_root  # type: ignore[method-assign]


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark as slow laws that a class does not name in `laws`, and what another test of the same law nearly covers.

    That is compiling by inductor; compiling a mechanism whose engine one of `COMPILED` has; long inputs in bfloat16,
    whose range is float32's; and the laws that take longest (costs, compiling, long inputs) of second forms.
    """
    contract, law = getattr(item, "cls", None), AttentionContract.law_of(item.name)
    if law is None or contract is None or not issubclass(contract, AttentionContract):
        return
    second = contract.__name__.endswith("Bidirectional") and law in (Law.COST, Law.COMPILED, Law.LONG)
    # What it sends is counted as that of the first form: by what its memories hold.
    second |= contract.__base__.__name__.startswith("Test") and "what_communication_says" in item.name
    of_an_engine = contract.name in COMPILED or not contract.__module__.startswith("tests.attention")
    same_engine = law is Law.COMPILED and not of_an_engine
    if law not in contract.laws or re.search("inductor|bfloat16", item.name) or second or same_engine:
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put tests marked `together` first: the processes of pytest-xdist take over each other's last tests.

    A process that takes over one of them would make, or wait for, what they share.
    """
    items.sort(key=lambda item: item.get_closest_marker("together") is None)


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among what was imported."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data, `SUBQUAD_DATA` or `../shared/data`; the test is skipped where there is none."""
    folder = ROOT / os.environ.get("SUBQUAD_DATA", "../shared/data")
    if not folder.is_dir():
        pytest.skip("no data")
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Curves, which take longer to draw than most of the tests' runs, are drawn where a test is marked `draws`.

    The report of a run reads 4,000 tokens for the size of the state, not 100,000.
    """
    global drawn_before
    if "subquad.training.report" in sys.modules:
        sys.modules["subquad.training.report"].STATE_AFTER = (1_000, 4_000)  # type: ignore[attr-defined]
    run = sys.modules.get("subquad.training.run")
    if run is not None:
        drawn_before = drawn_before or run.draw_curves  # type: ignore[attr-defined]
        drawn = item.get_closest_marker("draws") is not None
        run.draw_curves = drawn_before if drawn else lambda *args, **kwargs: None  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """The level of logging, which each command sets, is put back.

    What is imported stays: collections of garbage, of which a training run makes several, then pass it over.
    """
    global frozen_modules
    if logging.getLogger("subquad").level != logging.NOTSET:  # setting it forgets what every logger has looked up
        logging.getLogger("subquad").setLevel(logging.NOTSET)
    if len(sys.modules) > frozen_modules + 100:
        frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()
