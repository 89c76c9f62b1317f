"""What a file of tests leaves open is found at its end, and not while a test of another file runs."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def _nothing_stays_open():
    """Collect what the tests of a file dropped: an open socket or process warns here, and a warning is an error."""
    yield
    gc.collect()
