"""A policy version as files, and its transfer to other hosts.

`format` says what a version is, `files` writes and verifies it, and `server` hands it out over HTTP.
"""
