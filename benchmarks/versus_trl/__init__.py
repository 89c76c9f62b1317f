"""The same training by Offbeat and by TRL."""
