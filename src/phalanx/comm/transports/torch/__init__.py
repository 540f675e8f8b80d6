"""torch.distributed as a transport: the only package that names its collective functions.

process_group   meet the other ranks and initialise the default group, or use the user's own
transport       messages and collectives on it
errors          which of torch's errors are failures of the network
"""

from phalanx.comm.transports.torch.process_group import adopt, already_initialized, join
from phalanx.comm.transports.torch.transport import TorchTransport

__all__ = ["TorchTransport", "adopt", "already_initialized", "join"]
