"""What nccl-tests print (github.com/NVIDIA/nccl-tests): the rate that a link reaches. Start at :func:`bus_bandwidth`."""

from __future__ import annotations

import re
from statistics import median

from ddltool.errors import InputError

# An all-reduce of less than this is bound by latency, not by the link.
_LARGE_BYTES = 64 * 2**20
# Size, count and type; what stands before them is of whoever collected the output of several processes.
_ROW = re.compile(r"(?:^|\s)(\d+)\s+\d+\s+(?:u?int\d+|half|float|double|bfloat16|f8\w+)\s")


def is_nccl_log(text: str) -> bool:
    """Return whether a text is what nccl-tests print: a header names the bus bandwidth."""
    return "busbw" in text


def bus_bandwidth(text: str, where: str) -> float:
    """Return the median out-of-place bus bandwidth of the large messages of an nccl-tests log, in bytes per second.

    Bus bandwidth is what each device sends over its link. Columns are the header's, counted from the right: versions differ in
    those before the time (``root`` came later, ``redop`` may be blank), and a column of errors may be ``N/A``. ``where``: the
    file, for errors. Raises InputError for a log without large messages.

    >>> log = "# size count type redop time algbw busbw error" + chr(10) + "134217728 33554432 float sum 2240 60.0 90.0 2e-07"
    >>> bus_bandwidth(log, "nccl.log")
    90000000000.0
    """
    time = bandwidth = 0
    found = []
    for line in text.splitlines():
        words = line.split()
        if "busbw" in words and "time" in words:
            time, bandwidth = (len(words) - words.index(name) for name in ("time", "busbw"))
        elif time and len(words) >= time and (row := _ROW.search(line)) and int(row[1]) >= _LARGE_BYTES:
            try:
                seconds, rate = float(words[-time]), float(words[-bandwidth])
            except ValueError:
                continue
            if seconds > 0 and 0 < rate < float("inf"):
                found.append(rate * 1e9)
    if not found:
        remedy = "run nccl-tests up to 1G: all_reduce_perf -b 8 -e 1G"
        raise InputError(where, "has no row of 64 MiB or more below a header with time and busbw", remedy)
    return median(found)
