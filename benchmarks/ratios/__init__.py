"""Codec, batching and objective against the least that would do: fails when one becomes dearer."""
