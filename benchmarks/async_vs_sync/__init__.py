"""Wall time to equal tokens and equal reward, asynchronous over lockstep."""
