"""PhalanxTrainer against Hugging Face's own Trainer, and a multi-node optimizer inside the latter."""

import pytest
from tests.integrations.jobs import needs, play

pytestmark = [pytest.mark.usefixtures("warm_python"), needs("transformers")]


def test_transformers(tmp_path):
    assert play(["tests/integrations/transformers_program.py", tmp_path]).count("did it") == 2
