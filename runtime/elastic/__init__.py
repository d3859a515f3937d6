"""Training that gives the same bits on any number of processes (EasyScale). Start at :class:`ElasticTrainer`."""

from ddltool.runtime.elastic.processes import start_processes
from ddltool.runtime.elastic.recording import RunRecorder
from ddltool.runtime.elastic.run_difference import first_difference
from ddltool.runtime.elastic.trainer import ElasticTrainer
from ddltool.runtime.processes.digests import digest

__all__ = ["ElasticTrainer", "RunRecorder", "digest", "first_difference", "start_processes"]
