"""accelerate on the backend, with ddp_hook, and with the multi-node optimizer in the place of DDP."""

import pytest
from tests.integrations.jobs import needs, play

pytestmark = [pytest.mark.usefixtures("warm_python"), needs("accelerate")]


def test_accelerate():
    assert play(["tests/integrations/accelerate_program.py"]).count("did it") == 2
