"""The rollout buffer: turns the broker's messages into units that can be trained. Without torch.

`session.BrokerSession` is the conversation with the broker; it hands each message to `intake.Intake`, which keeps the
units from their delivery to their commit. Segments become trajectories in `trajectories`.
"""
