"""The broker process: leases tasks to actors, journals segments, hands finished units to the learner.

Read `core.dispatch` first: it has every decision, as a function of messages and time. `output_commit` holds its answers
back until the journal has what they rest on, and `service` is the loop around the sockets.
"""
