"""Fixtures of tests with real engines: a tiny model, and engines that are closed at the end."""

import pytest

from tests.integration.learner.tiny_qwen3 import save, tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a tiny model with tied weights."""
    return str(save(tiny_model(tied=True, seed=3), tmp_path_factory.mktemp("model")))


@pytest.fixture
def engines():
    """Yield a list; every engine that a test puts into it is closed at the end."""
    made = []
    yield made
    for engine in made:
        engine.close()
