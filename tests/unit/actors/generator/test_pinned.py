"""A generator that only evaluates loads the version that requests ask for, and keeps it."""

import pytest

from actors.config import GeneratorConfig
from actors.generator.requests import RequestBook
from actors.generator.weights.staging import MAX_KNOWN, Announced, PinnedVersions


def test_versions_that_are_published_meanwhile_are_not_loaded():
    pinned, book = PinnedVersions(), RequestBook(0.0)
    for version in (1, 2, 3):
        pinned.announced(Announced(1, version, f"v{version}"))
    assert pinned.wanted(book.lowest_wanted, in_service=0) is None, "nobody asks"
    book.add("a", min_version=2, version=0, now=0.0)
    assert pinned.wanted(book.lowest_wanted, in_service=0) == Announced(1, 2, "v2")
    assert book.start_held(version=2, now=1.0) == ["a"]
    pinned.announced(Announced(1, 4, "v4"))
    assert pinned.wanted(book.lowest_wanted, in_service=2) is None
    # The next evaluation.
    book.add("b", min_version=4, version=2, now=2.0)
    assert pinned.wanted(book.lowest_wanted, in_service=2) == Announced(1, 4, "v4")


def test_a_version_that_is_not_announced_yet_is_waited_for():
    pinned, book = PinnedVersions(), RequestBook(0.0)
    book.add("a", min_version=5, version=4, now=0.0)
    assert pinned.wanted(book.lowest_wanted, in_service=4) is None
    pinned.announced(Announced(1, 5))
    assert pinned.wanted(book.lowest_wanted, in_service=4).version == 5


def test_a_later_epoch_numbers_versions_again_and_few_are_remembered():
    pinned = PinnedVersions()
    for version in range(200):
        pinned.announced(Announced(1, version))
    pinned.announced(Announced(2, 150))
    assert pinned.wanted(150, in_service=0).epoch == 2
    assert pinned.wanted(1, in_service=0).version == 200 - MAX_KNOWN


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"evaluators": 1, "count": 1}, ["none is left for training"]),
        ({"evaluators": 1, "count": 2}, []),
        ({"evaluators": 1, "count": 2, "backend": "http", "url": "http://127.0.0.1:1"}, ["keeps no version"]),
    ],
)
def test_settings_that_leave_nobody_to_train_are_refused(settings, said):
    found = list(GeneratorConfig(**settings).contradictions("generator"))
    found = [text for text in found if "evaluators" in text]
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))
