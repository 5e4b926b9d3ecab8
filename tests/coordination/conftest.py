"""The client of Kubernetes reads its files on a loop of its own, in a thread of its own."""

from __future__ import annotations

import pytest
from blockbuster import BlockBuster


@pytest.fixture(autouse=True)
def _reading_the_kubeconfig_blocks_its_own_loop(_loop_is_never_blocked: BlockBuster | None) -> None:
    if _loop_is_never_blocked is not None:
        for function in _loop_is_never_blocked.functions.values():
            function.can_block_in("mesh/coordination/kubernetes_api.py", {"_configuration"})
