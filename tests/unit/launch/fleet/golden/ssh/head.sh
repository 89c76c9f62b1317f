#!/bin/bash
exec offbeat train run.toml learner.steps=40 broker.endpoint=tcp://0.0.0.0:5755 broker.http=0.0.0.0:5756 weights.http=0.0.0.0:5757 weights.advertised_host=10.0.0.5 generator.count=0 actor.count=0 --again "$@"
