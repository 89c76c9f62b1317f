"""Fixtures of the tests that fetch weights: a folder of versions, and chunks that are small enough for many of them."""

import pytest

import protocol.weights.files
from tests.integration.protocol.weights_harness import CHUNK


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(protocol.weights.files, "CHUNK_BYTES", CHUNK)


@pytest.fixture
def versions(tmp_path):
    folder = tmp_path / "learner"
    folder.mkdir()
    return folder
