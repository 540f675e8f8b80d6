"""`python -m phalanx` is the command `phalanx`."""

import signal
import sys

usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if usual:  # while modules load, Ctrl-C ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from phalanx.cli.main import main  # noqa: E402

if usual:
    signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
