"""Environments on other hosts: a server that plays the episodes of a suite, and the suite `remote` that uses it.

- `wire`: the bodies of requests and answers, as JSON. `failures`: errors as answers, and back.
- `server`: the HTTP server. `sessions`: its episodes, each of a client that must not be silent for long. `episodes`:
  calls their environments.
- `client`: one server, as a client sees it. `suite`: the suite, and its episodes on one of several servers.
"""
