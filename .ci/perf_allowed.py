"""Exits with 0 if the kernel allows this process to open a software perf event on itself."""

import ctypes
import platform
import struct
import sys

SYS_PERF_EVENT_OPEN = {"x86_64": 298, "aarch64": 241}
TYPE_SOFTWARE, SIZE, CPU_CLOCK, EXCLUDE_KERNEL = 1, 128, 0, 1 << 5

# struct perf_event_attr: type, size, config, period, sample_type, read_format, flags.
attr = struct.pack("IIQQQQQ", TYPE_SOFTWARE, SIZE, CPU_CLOCK, 0, 0, 0, EXCLUDE_KERNEL)
attr = ctypes.create_string_buffer(attr, SIZE)
libc = ctypes.CDLL(None, use_errno=True)
event = libc.syscall(SYS_PERF_EVENT_OPEN[platform.machine()], attr, 0, -1, -1, 0)
sys.exit(event < 0)
