"""The stretches of text that a ratio can be formed over. Without torch, because the run file names them, too."""

from typing import Literal

Level = Literal["token", "turn", "sequence"]
"""One ratio for each token, each turn of the policy, or each trajectory."""
