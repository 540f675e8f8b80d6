"""PhalanxStrategy in Lightning Fabric: what its DDPStrategy computes, and gossip."""

import pytest
from tests.integrations.jobs import needs, play

pytestmark = [pytest.mark.usefixtures("warm_python"), needs("lightning")]


def test_fabric():
    assert play(["tests/integrations/fabric_program.py"]).count("did it") == 2
