"""A run on many hosts: the ticket that a further host needs, what is wanted of the fleet, and engines that start hosts.

We start, connect and drain; `ssh`, Slurm, systemd, Kubernetes or Ray schedule. `ticket` is one file with all that a
host needs, `wanted` the counts that a user asks for while a run goes on, `render` writes the files of an engine and
starts nothing.
"""
