"""The parts of one episode. `actors.episode` puts them together.

- `by_steps`: the environment and the policy take turns. `by_requests`: several answers are sampled at a time.
  `request_room`: the room that is left for each of them.
- `turn_line`: the order in the trajectory of turns that are sampled at a time.
- `conversation`: the conversations as tokens. `turn_tree`: which turn continues which.
- `answers`: samples one turn. `closing`: how the trajectory ends.
- `env_calls`: calls the environment, with deadlines. `clock`: the episode's own deadline.
- `segment_stream`: sends segments in order. `parts`: what a way of playing needs.
"""
