"""Training that gives the same bits on any number of processes (EasyScale). Start at :class:`ElasticTrainer`."""

from ddltool.runtime.elastic.digests import digest, first_difference
from ddltool.runtime.elastic.run_recorder import RunRecorder
from ddltool.runtime.elastic.trainer import ElasticTrainer, start_processes

__all__ = [
    "ElasticTrainer",
    "RunRecorder",
    "digest",
    "first_difference",
    "start_processes",
]
