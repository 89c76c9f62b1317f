"""The broker's decisions: messages and time in, actions out. No sockets, no clocks, no disk.

`dispatch` is the entry point. `state` has all that lasts, and only events and segments change it, so that a journal of
these is enough to recover it. `actors` and `learner` are the sides towards the kinds of peers.
"""
