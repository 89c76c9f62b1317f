"""Training again from what a journal recorded: `recorded` is a step, `retrain` trains it."""
