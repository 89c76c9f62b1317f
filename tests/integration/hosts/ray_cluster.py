"""A Ray cluster of several nodes on this machine, which its standard input changes: a line is an answer's question.

``start NAME``: a node with room for one host; ``kill NAME``: it dies, with all its workers; ``end``.
"""

import sys

from ray.cluster_utils import Cluster

MEMORY = 80 << 20
TRIES = 4
HEAD = {"num_cpus": 1, "object_store_memory": MEMORY, "include_dashboard": False}


def main():
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    nodes = {}
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        match line.split():
            case ["start", name]:
                nodes[name] = started(cluster, name)
            case ["kill", name]:
                cluster.remove_node(nodes.pop(name), allow_graceful=False)
            case _:
                break
        print(f"done {line.strip()}", flush=True)
    cluster.shutdown()


def started(cluster, name):
    """Start a node. Ray gives it 30 s, whatever else the machine does, so it is tried again."""
    for left in reversed(range(TRIES)):
        try:
            return cluster.add_node(num_cpus=1, resources={"host": 1, name: 1}, object_store_memory=MEMORY)
        except Exception as error:
            if not left or "timed out" not in str(error):
                raise
    raise AssertionError


if __name__ == "__main__":
    main()
