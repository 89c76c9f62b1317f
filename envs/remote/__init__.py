"""Environments on other hosts: a server that plays the episodes of a suite, and the suite `remote` that uses it.

Both sides share the bodies of `wire`. On the server, each episode is a session of `sessions`, which ends if its
client is silent for too long.
"""
