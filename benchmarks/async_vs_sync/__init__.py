"""Wall time to equal tokens and to equal reward: asynchronous mode compared with lockstep."""
