"""The learner's update: trajectories in, new weights out.

`engine.TrainingEngine` is what a process of the learner holds. On rank 0 it lays trajectories out as a `batch`, and
`ranks` sends that to the other ranks. On every rank `updater.Updater` cuts it into `micro_batches`, computes the
`objective` of their tokens and steps. `policy`, `critic` and `target_logp` are the models; `deepspeed_zero` is their
sharding.
"""
