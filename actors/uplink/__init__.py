"""An actor's side towards the broker: the tasks that it has leased, and the segments that it sends.

- `leased_episodes`: runs leased tasks, each as an episode. `lease_book`: the leases, and the credit for more.
- `segment_sender`: sends segments as far as credit reaches. `outbox`: keeps them until they are acknowledged.
"""
