"""Changes of a model that is trained.

- `lora`: adapters of low rank, and what they add to the weights.
- `operations`: what a token takes, to compare speeds.
- `routes`: replays the choice of experts. `routers`: the layers that choose.
"""
