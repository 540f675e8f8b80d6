"""Who else uses the memory of a tensor: the same answer on all versions of torch."""

import torch

from phalanx._torch_private import other_views


def test_views_are_counted_and_forgotten():
    for x in (torch.zeros(8), torch.frombuffer(bytearray(8), dtype=torch.uint8)):
        assert other_views(x) == 0
        views = [x[:3], x.view(2, -1), x.detach()]
        assert other_views(x) == 3
        assert other_views(views[0]) == 3
        del views
        assert other_views(x) == 0
