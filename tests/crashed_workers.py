"""The order of `pytest -n 3 --dist loadfile`, which survives a worker that ends in the middle of a test.

A test that hangs ends its worker (`faulthandler_exit_on_timeout`). pytest-xdist 3.8 would then give the same test to the next
worker, and the next, each for three minutes. And a new worker that gets a single test waits for a second one, forever.
"""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FilesOnce(LoadFileScheduling):
    """A file of tests at a time for each worker. If a worker ends in a test, that test has failed, and others run the rest."""

    def remove_node(self, node: WorkerController) -> str | None:
        crashed = None
        for tests in self.assigned_work[node].values():
            crashed = next((test for test, done in tests.items() if not done), None)
            if crashed is not None:
                tests[crashed] = True
                break
        super().remove_node(node)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:  # it has just been started, in place of one that ended
            return
        super()._reschedule(node)
        # a worker runs a test when it knows the one after it, or that there is none
        if not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
            self._reschedule(node)
