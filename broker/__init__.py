"""Leases tasks to actors and finished work to the learner; see docs/ and protocol/SPEC.md."""
