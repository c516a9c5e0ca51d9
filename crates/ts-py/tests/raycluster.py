# SPDX-License-Identifier: MIT OR Apache-2.0
"""Runs a Ray cluster of two nodes on this computer.

Both nodes have the same address, and share the memory of this computer. Ray listens on all
interfaces. The dashboard and usage statistics are off.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

__all__ = ["RayCluster"]

#: The size of a node's object store, in bytes. Ray's minimum is 75 MiB.
_STORE = 80 << 20


class RayCluster:
    """A cluster of two nodes, which ends with the ``with`` block.

    Args:
        cpus: The number of CPUs that each node claims to have.
    """

    def __init__(self, cpus: int = 8) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        from ray.cluster_utils import Cluster

        node = {"num_cpus": cpus, "object_store_memory": _STORE}
        head = {**node, "include_dashboard": False}
        self._cluster: Any = Cluster(initialize_head=True, head_node_args=head)
        self._cluster.add_node(**node)
        self.address: str = self._cluster.address

    def options(self) -> dict[str, Any]:
        """Returns the options of the provider "ray" for this cluster."""
        return {"address": self.address}

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()
