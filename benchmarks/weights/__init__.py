"""The pause and the delay of a new policy version."""
