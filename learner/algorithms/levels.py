"""Levels: the stretches of text that one ratio can cover. No torch, because the run file uses them, too."""

from typing import Literal

Level = Literal["token", "turn", "sequence"]
"""One ratio per token, per turn of the policy, or per trajectory."""
