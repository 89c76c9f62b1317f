"""Plays an episode of a suite with given actions."""


def played(suite, actions, index=0, split="train"):
    """Return the texts that the policy reads, and the results of its actions."""
    env = suite.episode()
    try:
        texts, results = [env.reset({"index": index, "split": split})[-1]["content"]], []
        for action in actions:
            results.append(env.step(action))
            texts += [message["content"] for message in results[-1].messages()]
        return texts, results
    finally:
        env.close()
