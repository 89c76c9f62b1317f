"""Reward after equally many updates, with the lag forced to exact numbers."""
