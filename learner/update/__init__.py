"""The learner's update: trajectories in, new weights out.

`engine.TrainingEngine` is what a process of the learner holds. On rank 0 it lays trajectories out as a `batch`, and
`ranks` sends that to the other ranks and shards the models over them. On every rank `updater.Updater` cuts it into
`micro_batches`, computes the `objective` of their tokens and steps. The models are in `policy`, `critic` and
`target_logp`.
"""
