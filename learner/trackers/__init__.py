"""Trackers: where a run's records go, TensorBoard or a service such as Weights & Biases.

The learner's report writes records to sinks (`sink`). A sink of a tracker other than TensorBoard has a queue and a
thread (`feed`), because a tracker must never stop training. Each tracker is one file, which alone imports the tracker's
package.
"""
