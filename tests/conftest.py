"""What all tests need."""

from __future__ import annotations

import signal

# A run that was started in the background inherits an ignored Ctrl-C, and every process that it starts would ignore it
# too. Processes inherit what is ignored, but never a handler.
signal.signal(signal.SIGINT, signal.default_int_handler)
