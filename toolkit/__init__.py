"""ddltool: one model of a distributed training job, and the tools that read it.

The package itself holds the nouns (Graph, Profile, Cluster, Job, Plan, Enforcement) and how they are read and
written; start at :mod:`ddltool.graph`. Importing it is cheap: nothing heavy is loaded until a command needs it.
"""

__version__ = "0.1.0"
