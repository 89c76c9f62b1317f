"""`offbeat plan`: predicts what a run would do with other numbers of generators and actors.

Rates are observed in a real run (`observations`, `calibration`) or read (`rates`). The simulation moves its parts on a
virtual clock: it is pure, seeded and deterministic.
"""
