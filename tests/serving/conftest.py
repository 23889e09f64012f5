"""A client of a tiny model, and the folder of a run."""

import pytest

from subquad.generation import BatchDecoder
from subquad.serving import ServeConfig
from tests.cli.folders import save_model
from tests.serving.helpers import served, tiny_model


@pytest.fixture(scope="session")
def anyio_backend():
    """The event loop of tests that are coroutines."""
    return "asyncio"


@pytest.fixture(scope="session")
def model():
    return tiny_model()


@pytest.fixture(scope="session")
def client(model):
    config = ServeConfig(slots=4, max_prompt=64, max_tokens=32, max_requests=8, max_logprobs=10_000, max_body=20_000)
    with served(BatchDecoder(model, slots=4, max_context=config.max_context), config=config) as client:
        yield client


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """A run's folder, named tiny."""
    folder = tmp_path_factory.mktemp("serve") / "tiny"
    shape = {"dim": 32, "num_layers": 2, "init_std": 0.3, "options": {"llp": {"segment": 16}}}
    return save_model(folder, tokenizer="bytes", **shape)
