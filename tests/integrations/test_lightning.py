"""PhalanxStrategy in Lightning: what DDPStrategy computes, and what it does not have."""

import pytest
from tests.integrations.jobs import needs, play

pytestmark = [pytest.mark.usefixtures("warm_python"), needs("lightning")]
PLAYS = "as_ddp", "replicas", "kinds", "checkpoint", "manual"


def test_lightning():
    out = play(["tests/integrations/lightning_program.py", ",".join(PLAYS)])
    assert [out.count(f"did {name}") for name in PLAYS] == [2] * len(PLAYS)
    assert "DistributedDataParallel, or something like it" not in out


@needs("pytorch_lightning")
def test_pytorch_lightning():
    out = play(["tests/integrations/lightning_program.py", "as_ddp", "pytorch_lightning"])
    assert out.count("did as_ddp") == 2
