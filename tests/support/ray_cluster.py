"""A Ray cluster on this machine for tests: a head without processors and nodes with small object stores."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

STORE_BYTES = 80 << 20


def add_node(cluster: Any, num_cpus: int = 1, **options: Any) -> Any:
    return cluster.add_node(num_cpus=num_cpus, object_store_memory=STORE_BYTES, **options)


@contextmanager
def ray_cluster(nodes: int, num_cpus: int = 1, **head_options: Any) -> Iterator[Any]:
    """ray.cluster_utils.Cluster with `nodes` nodes of `num_cpus` processors each; everything is stopped at the end."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False, **head_options}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            add_node(cluster, num_cpus)
        yield cluster
    finally:
        if ray.is_initialized():
            ray.shutdown()
        cluster.shutdown()
        sys.stderr.flush()
