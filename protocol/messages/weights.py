"""A new policy version, from the learner to the broker and from there to the generators."""

from typing import Annotated

from msgspec import Meta, field

from protocol.messages.fields import MAX_SOURCES, Address, Count, FilePath, Message, Root, Version
from protocol.version_line import MAX_FORKS


class PublishWeights(Message, tag="publish_weights", frozen=True):
    """A new policy version exists. The broker announces the newest one to generators in WeightsReady."""

    epoch: Count
    """Written by the learner; the broker refuses an epoch that is not the one of its Hello."""
    version: Version
    """Written by the learner, read by the broker for staleness; it refuses a lower one of the same epoch."""
    manifest: FilePath
    """Written by the learner: path of the manifest on its host. The broker passes it on to generators."""
    url: Address = ""
    """Written by the learner: URL where its host serves versions. The broker makes it the last source."""
    root: Root = ""
    """Written by the learner: hash that determines every byte. The broker passes it on to generators."""
    line: Annotated[list[tuple[Version, Version]], Meta(max_length=MAX_FORKS)] = field(default_factory=list)
    """Written by the learner: restarts behind these weights, as pairs (version continued, its new number).

    The broker measures policy lag with it, see `protocol.version_line`; `offbeat retrain` reads it, too.
    """


class WeightsReady(Message, tag="weights_ready", frozen=True):
    """The newest policy version, announced to a generator, which fetches, verifies and loads it."""

    epoch: Count
    """Copied by the broker from PublishWeights; the generator orders versions by (epoch, version)."""
    version: Version
    """Copied by the broker from PublishWeights; the generator takes a version newer than its own only."""
    manifest: FilePath
    """Copied by the broker from PublishWeights; generators on the learner's host read the version there."""
    sources: Annotated[list[Address], Meta(max_length=MAX_SOURCES)] = field(default_factory=list)
    """Written by the broker: URLs that serve the version, first of generators, last of the learner.

    A generator on a different host fetches the version from one of them.
    """
    root: Root = ""
    """Copied by the broker from PublishWeights; the generator checks by it the bytes that a source sends."""
