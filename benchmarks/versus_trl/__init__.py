"""The same training with Offbeat and with TRL."""
